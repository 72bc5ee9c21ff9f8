"""Plain data -> typed values. Every problem on the way is collected.

Enters: data as YAML gives it, and a type. Leaves: the value, or `INVALID` if the data is wrong. In that
case the collector has at least one more problem. The one rule: never stop at the first problem.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from pointsman.config.problems import FieldPath, Problems, bounds_in_words, expected, found, is_list, is_mapping, listed
from pointsman.errors import did_you_mean, system_reason
from pointsman.parameters import (
    DurationText,
    FileName,
    NoEffect,
    PluginRef,
    QuantityText,
    ReadBy,
    quantity,
    seconds,
    unmarked,
    yaml_name,
)

T = TypeVar("T")
Resolve = Callable[[str, PluginRef, FieldPath], Any]
"""Returns the plugin with a name, or INVALID after reporting a problem."""


class Section(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """Base of the sections of a document: snake case in Python, camel case in YAML."""


class Invalid:
    """Stands in for a value that could not be read. It is falsy, so that `if spec.type:` reads well."""

    def __bool__(self) -> bool:
        return False


INVALID: Any = Invalid()


def usable(items: Sequence[T]) -> Iterator[tuple[int, T]]:
    """The valid items of a validated list, with their indices."""
    return ((index, item) for index, item in enumerate(items or ()) if item is not INVALID)


class Field(msgspec.Struct, frozen=True):
    """A named value: its name in Python, its spellings in YAML, its type, and whether it is optional."""

    name: str
    spellings: Sequence[str]
    """All accepted spellings. The first is the preferred one."""
    annotation: Any
    optional: bool
    default: Any = None

    @property
    def null_is_default(self) -> bool:
        """Whether null counts as absent because None is not a value of the field's type."""
        return self.optional and not _may_be_none(unmarked(self.annotation)[0])


def fields_of(kind: type[msgspec.Struct]) -> dict[str, Field]:
    """The fields of a struct by their names in YAML."""
    fields = {}
    for info in msgspec.structs.fields(kind):
        written = yaml_name(info)
        default = None if info.default is msgspec.NODEFAULT else info.default
        fields[written] = Field(info.name, (written,), info.type, not info.required, default)
    return fields


class Validator:
    """Walks data and types together. `Scalars` reads the values that contain no others."""

    def __init__(self, problems: Problems, resolve: Resolve | None = None, folder: Path | None = None) -> None:
        self.problems = problems
        self._scalars = Scalars(problems)
        self._resolve = resolve
        """How references become plugins. If None, references stay names."""
        self._folder = folder
        """The folder that paths are relative to. If None, paths stay as they are."""

    def value(self, data: Any, annotation: Any, path: FieldPath) -> Any:
        """The data as a value of this type."""
        kind, marks = unmarked(annotation)
        if data is None and _may_be_none(kind):
            return None
        for mark in marks:
            if isinstance(mark, PluginRef | FileName | ReadBy):
                text = self.value(data, str, path)
                return text if text is INVALID else self._marked_text(text, mark, path)
        if any(isinstance(mark, DurationText) for mark in marks):
            value = self._scalars.with_unit(data, seconds, "a duration such as 200ms, 60s or 1m30s", path)
        elif any(isinstance(mark, QuantityText) for mark in marks):
            value = self._scalars.with_unit(data, quantity, "an amount such as 500, 2k or 1Gi", path)
        else:
            value = self._unmarked_value(data, kind, path)
        bounded = value is not INVALID and any(isinstance(mark, msgspec.Meta) for mark in marks)
        return self._scalars.bounded(value, data, annotation, path) if bounded else value

    def fields(self, data: Any, fields: Mapping[str, Field], path: FieldPath, *, kind: str = "field") -> dict[str, Any]:
        """The values of named fields, by their names in Python. Absent optional fields are left out."""
        if not isinstance(data, dict):
            self.problems.add(path, f"expected a mapping (field: value), found {found(data, path)}")
            return {}
        known = {spelling for field in fields.values() for spelling in field.spellings}
        for name in data:
            if name not in known:
                self.problems.add((*path, name), f"unknown {kind}{did_you_mean(name, fields)}")
        values: dict[str, Any] = {}
        for written, field in fields.items():
            given = [spelling for spelling in field.spellings if spelling in data]
            if len(given) > 1:
                self.problems.add((*path, given[1]), f"is the same {kind} as {given[0]}; write it once")
            if given and not (data[given[0]] is None and field.null_is_default):
                values[field.name] = self.value(data[given[0]], field.annotation, (*path, given[0]))
                for mark in unmarked(field.annotation)[1]:
                    if isinstance(mark, NoEffect):
                        self.problems.warn((*path, given[0]), f"has no effect: {mark.why}")
            elif not field.optional:
                self.problems.add(path, f'{kind} "{written}" is missing')
                values[field.name] = INVALID
        return values

    def _marked_text(self, text: str, mark: PluginRef | FileName | ReadBy, path: FieldPath) -> Any:
        if isinstance(mark, PluginRef):
            return text if self._resolve is None else self._resolve(text, mark, path)
        if isinstance(mark, FileName):
            return text if self._folder is None else self._scalars.file(text, self._folder, mark, path)
        return self._scalars.readable(text, mark, path)

    def _unmarked_value(self, data: Any, kind: Any, path: FieldPath) -> Any:
        origin = get_origin(kind)
        if kind is Any or kind is object:
            return data
        if origin in (Union, UnionType):
            return self._one_of(data, [member for member in get_args(kind) if member is not NoneType], path)
        if origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
            return self._scalars.choice(data, kind, path)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._struct(data, kind, path)
        if is_mapping(kind):
            return self._mapping(data, kind, path)
        if is_list(kind):
            return self._list(data, kind, path)
        return self._scalars.plain(data, kind, path)

    def _struct(self, data: Any, kind: type[msgspec.Struct], path: FieldPath) -> Any:
        before = len(self.problems)
        values = self.fields(data, fields_of(kind), path)
        # With an incomplete struct, the rest of the loader can check the present fields and find more problems.
        if not isinstance(data, dict) or (len(self.problems) > before and hasattr(kind, "__post_init__")):
            return INVALID
        try:
            return kind(**values)
        except ValueError as error:
            self.problems.add(path, str(error))
            return INVALID

    def _mapping(self, data: Any, kind: Any, path: FieldPath) -> Any:
        if not isinstance(data, dict):
            return self._scalars.unexpected(data, kind, path)
        of_values = (get_args(kind) or (str, Any))[1]
        return {name: self.value(value, of_values, (*path, name)) for name, value in data.items()}

    def _list(self, data: Any, kind: Any, path: FieldPath) -> Any:
        if not isinstance(data, list):
            return self._scalars.unexpected(data, kind, path)
        of_items = (get_args(kind) or (Any,))[0]
        items = [self.value(item, of_items, (*path, index)) for index, item in enumerate(data)]
        container = get_origin(kind) or kind
        return container(items) if container in (tuple, set, frozenset) else items

    def _one_of(self, data: Any, members: list[Any], path: FieldPath) -> Any:
        if len(members) == 1:
            return self.value(data, members[0], path)
        for member in sorted(members, key=lambda member: member is str):  # "5s" is a duration, not text
            apart = self.problems.apart()
            value = type(self)(apart, self._resolve, self._folder).value(data, member, path)
            if not apart:
                return value
            if _has_fields(unmarked(member)[0]) and isinstance(data, dict):
                self.problems.take(apart)
                return INVALID
        words = listed([expected(unmarked(member)[0]) for member in members])
        self.problems.add(path, f"expected {words}, found {found(data, path)}")
        return INVALID


class Scalars:
    """Reads numbers, text, choices and paths."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems

    def plain(self, data: Any, kind: Any, path: FieldPath) -> Any:
        if kind in (int, float):
            whole = isinstance(data, int) or (isinstance(data, float) and data.is_integer())
            if isinstance(data, bool) or not isinstance(data, int | float) or (kind is int and not whole):
                return self.unexpected(data, kind, path)
            return kind(data) if isfinite(data) else self.unexpected(data, kind, path)
        if kind is str and isinstance(data, int | float):
            return self._reject(path, f"expected text, found {found(data, path)}; put it in quotes")
        if kind in (str, bool):
            return data if isinstance(data, kind) else self.unexpected(data, kind, path)
        try:
            return msgspec.convert(data, kind)
        except (msgspec.ValidationError, TypeError):
            return self.unexpected(data, kind, path)

    def choice(self, data: Any, kind: Any, path: FieldPath) -> Any:
        """A value of a `Literal` or an `Enum`."""
        choices: dict[Any, Any] = {choice: choice for choice in get_args(kind)} or {c.value: c for c in kind}
        for choice, value in choices.items():
            if type(choice) is type(data) and choice == data:
                return value
        words = [choice for choice in choices if isinstance(choice, str)]
        near = did_you_mean(data, words, list_known=False) if isinstance(data, str) else ""
        return self._reject(path, f"expected {expected(kind)}, found {found(data, path)}{near}")

    def with_unit(self, data: Any, read: Callable[[str], float], words: str, path: FieldPath) -> Any:
        """A number, or text with a unit."""
        if isinstance(data, str):
            try:
                return read(data)
            except ValueError as error:
                return self._reject(path, str(error))
        if isinstance(data, bool) or not isinstance(data, int | float) or not isfinite(data):
            return self._reject(path, f"expected {words}, found {found(data, path)}")
        return read(str(data)) if read is quantity else float(data)

    def file(self, name: str, folder: Path, mark: FileName, path: FieldPath) -> Any:
        """The absolute path of a file, or the name if it does not mean a file."""
        if name.startswith("package:") or not name:
            return name
        try:
            file = folder / Path(name).expanduser()
            exists = file.exists()
        except (OSError, RuntimeError) as error:  # access is not permitted, or the user in ~user is unknown
            why = system_reason(error) if isinstance(error, OSError) else error
            return self._reject(path, f"cannot look for {found(name, path)}: {why}")
        if mark.or_name:
            return str(file) if exists or name[0] in "./~" else name
        if mark.must_exist and not file.is_file():
            return self._reject(path, f"{file} is not a file" if exists else f"there is no file {file}")
        return str(file)

    def readable(self, text: str, mark: ReadBy, path: FieldPath) -> Any:
        try:
            mark.read(text)
        except ValueError as error:
            return self._reject(path, str(error))
        return text

    def bounded(self, value: Any, data: Any, annotation: Any, path: FieldPath) -> Any:
        try:
            msgspec.convert(value, annotation)
        except msgspec.ValidationError as error:
            return self._reject(path, f"{bounds_in_words(error)}, found {found(data, path)}")
        return value

    def unexpected(self, data: Any, kind: Any, path: FieldPath) -> Any:
        return self._reject(path, f"expected {expected(kind)}, found {found(data, path)}")

    def _reject(self, path: FieldPath, message: str) -> Any:
        self._problems.add(path, message)
        return INVALID


def _has_fields(kind: Any) -> bool:
    return is_mapping(kind) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))


def _may_be_none(kind: Any) -> bool:
    return kind is NoneType or (get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind))
