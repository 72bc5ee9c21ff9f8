"""Plain data -> typed values, collecting every problem on the way.

Enters: data as YAML gives it, and a type. Leaves: the value, or `INVALID` where it could not be made; then the
collector has at least one problem more. The one rule: never stop at the first problem.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from ipaddress import ip_address
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from pointsman.config.problems import FieldPath, Problems, bounds_in_words, expected, found, is_list, is_mapping, listed
from pointsman.errors import did_you_mean
from pointsman.parameters import (
    DurationText,
    FileName,
    PluginRef,
    QuantityText,
    ReadBy,
    quantity,
    seconds,
    unmarked,
    yaml_name,
)

# The base of everything that is written as fields with values.


class Section(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """Snake case here, camel case in YAML; a field that nobody knows is an error."""


# Where servers are, as people write it: http://host:port and host:port.


_HOST = r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
_LISTEN = re.compile(rf"{_HOST}:(?P<port>\d{{1,5}})")
_URL = re.compile(rf"(?P<scheme>https?)://{_HOST}:(?P<port>\d{{1,5}})/?", re.IGNORECASE)

_ANY_URL = re.compile(rf"https?://{_HOST}(?::(?P<port>\d{{1,5}}))?(?:/.*)?", re.IGNORECASE)


def host_and_port(text: str) -> tuple[str, int]:
    """127.0.0.1:8080 or [::1]:8080, as sockets want it. Raises ValueError, with an example, for anything else."""
    match = _LISTEN.fullmatch(text)
    if match is None or int(match["port"]) > 65535 or not _is_host(match["host"]):
        raise ValueError(f"expected host:port, such as 127.0.0.1:8080 or [::1]:8080, found {found(text)}")
    return match["host"].strip("[]"), int(match["port"])


def base_url(text: str) -> tuple[str, str]:
    """http://host:port without a path, and its host:port. Raises ValueError, with an example, for anything else."""
    match = _URL.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65535 or not _is_host(match["host"]):
        raise ValueError(f"expected http://host:port or https://host:port, without a path, found {found(text)}")
    place = f"{match['host'].lower()}:{int(match['port'])}"
    return f"{match['scheme'].lower()}://{place}", place


def is_url(text: str) -> bool:
    """Whether it is http://host, with or without a port and a path."""
    match = _ANY_URL.fullmatch(text)
    return match is not None and 1 <= int(match["port"] or 80) <= 65535 and _is_host(match["host"])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_host(host: str) -> bool:
    """A number in brackets, or that looks like one, must be one."""
    if host[0] != "[" and re.search(r"[^0-9.]", host):
        return True
    try:
        return ip_address(host.strip("[]")).version == (6 if host[0] == "[" else 4)
    except ValueError:
        return False


T = TypeVar("T")


class Invalid:
    """Stands where no value could be made. It is false, so that "if spec.type:" reads well."""

    def __bool__(self) -> bool:
        return False


INVALID: Any = Invalid()


def usable(items: Sequence[T]) -> Iterator[tuple[int, T]]:
    """The items of a list that was validated, with their places, without those that are INVALID."""
    return ((place, item) for place, item in enumerate(items or ()) if item is not INVALID)


Resolve = Callable[[str, PluginRef, FieldPath], Any]
"""The plugin of a name, or INVALID after noting a problem."""


class Validator:
    """Walks data and types together."""

    def __init__(self, problems: Problems, resolve: Resolve | None = None, folder: Path | None = None) -> None:
        self.problems = problems
        self._resolve = resolve
        """None: references stay the names that they are."""
        self._folder = folder
        """What paths are relative to. None: they stay as they are."""

    def value(self, data: Any, annotation: Any, path: FieldPath) -> Any:
        """The data as a value of this type."""
        kind, marks = unmarked(annotation)
        if data is None and _may_be_none(kind):
            return None
        for mark in marks:
            if isinstance(mark, PluginRef):
                name = self.value(data, str, path)
                return name if name is INVALID or self._resolve is None else self._resolve(name, mark, path)
            if isinstance(mark, FileName):
                name = self.value(data, str, path)
                return name if name is INVALID or self._folder is None else self._file(name, self._folder, mark, path)
            if isinstance(mark, ReadBy):
                text = self.value(data, str, path)
                return text if text is INVALID else self._readable(text, mark, path)
        value = self._measured_value(data, kind, marks, path)
        bounds = [mark for mark in marks if isinstance(mark, msgspec.Meta)]
        return value if value is INVALID or not bounds else self._bounded(value, data, annotation, path)

    def fields(
        self, data: Any, fields: Mapping[str, "Field"], path: FieldPath, *, kind: str = "field"
    ) -> dict[str, Any]:
        """The values of named fields, by their names in Python. Fields that are absent and optional are left out."""
        if not isinstance(data, dict):
            self.problems.add(path, f"expected a mapping (field: value), found {found(data)}")
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
            elif not field.optional:
                self.problems.add(path, f'{kind} "{written}" is missing')
                values[field.name] = INVALID
        return values

    def _measured_value(self, data: Any, kind: Any, marks: Collection[Any], path: FieldPath) -> Any:
        if any(isinstance(mark, DurationText) for mark in marks):
            return self._with_unit(data, seconds, "a duration such as 200ms, 60s or 1m30s", path)
        if any(isinstance(mark, QuantityText) for mark in marks):
            return self._with_unit(data, quantity, "an amount such as 500, 2k or 1Gi", path)
        return self._unmarked_value(data, kind, path)

    def _unmarked_value(self, data: Any, kind: Any, path: FieldPath) -> Any:
        origin = get_origin(kind)
        if kind is Any or kind is object:
            return data
        if origin in (Union, UnionType):
            return self._one_of(data, [member for member in get_args(kind) if member is not NoneType], path)
        if origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
            return self._choice(data, kind, path)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._struct(data, kind, path)
        if is_mapping(kind):
            return self._mapping(data, kind, path)
        if is_list(kind):
            return self._list(data, kind, path)
        return self._leaf(data, kind, path)

    def _struct(self, data: Any, kind: type[msgspec.Struct], path: FieldPath) -> Any:
        before = len(self.problems)
        values = self.fields(data, fields_of(kind), path)
        # An incomplete struct still shows the rest of the loader what is there, so that it finds more problems.
        if not isinstance(data, dict) or (len(self.problems) > before and hasattr(kind, "__post_init__")):
            return INVALID
        try:
            return kind(**values)
        except ValueError as error:
            self.problems.add(path, str(error))
            return INVALID

    def _mapping(self, data: Any, kind: Any, path: FieldPath) -> Any:
        if not isinstance(data, dict):
            return self._unexpected(data, kind, path)
        of_values = (get_args(kind) or (str, Any))[1]
        return {name: self.value(value, of_values, (*path, name)) for name, value in data.items()}

    def _list(self, data: Any, kind: Any, path: FieldPath) -> Any:
        if not isinstance(data, list):
            return self._unexpected(data, kind, path)
        of_items = (get_args(kind) or (Any,))[0]
        items = [self.value(item, of_items, (*path, place)) for place, item in enumerate(data)]
        container = get_origin(kind) or kind
        concrete = container if container in (tuple, set, frozenset) else list
        return items if concrete is list else concrete(items)

    def _one_of(self, data: Any, members: list[Any], path: FieldPath) -> Any:
        if len(members) == 1:
            return self.value(data, members[0], path)
        for member in sorted(members, key=lambda member: member is str):  # "5s" is a duration before it is text
            apart = self.problems.apart()
            value = type(self)(apart, self._resolve, self._folder).value(data, member, path)
            if not apart:
                return value
            if is_mapping(unmarked(member)[0]) and isinstance(data, dict):
                self.problems.take(apart)
                return INVALID
        words = listed([expected(unmarked(member)[0]) for member in members])
        self.problems.add(path, f"expected {words}, found {found(data)}")
        return INVALID

    def _choice(self, data: Any, kind: Any, path: FieldPath) -> Any:
        choices: dict[Any, Any] = {choice: choice for choice in get_args(kind)} or {c.value: c for c in kind}
        for choice, value in choices.items():
            if type(choice) is type(data) and choice == data:
                return value
        words = [choice for choice in choices if isinstance(choice, str)]
        near = did_you_mean(data, words) if isinstance(data, str) and words else ""
        near = near if near.startswith("; did") else ""
        self.problems.add(path, f"expected {expected(kind)}, found {found(data)}{near}")
        return INVALID

    def _leaf(self, data: Any, kind: Any, path: FieldPath) -> Any:
        if kind in (int, float):
            whole = isinstance(data, int) or (isinstance(data, float) and data.is_integer())
            if isinstance(data, bool) or not isinstance(data, int | float) or (kind is int and not whole):
                return self._unexpected(data, kind, path)
            return kind(data) if isfinite(data) else self._unexpected(data, kind, path)
        if kind is str and isinstance(data, int | float):
            self.problems.add(path, f"expected text, found {found(data)}; put it in quotes")
            return INVALID
        if kind in (str, bool):
            return data if isinstance(data, kind) else self._unexpected(data, kind, path)
        try:
            return msgspec.convert(data, kind)
        except (msgspec.ValidationError, TypeError):
            return self._unexpected(data, kind, path)

    def _with_unit(self, data: Any, read: Callable[[str], float], words: str, path: FieldPath) -> Any:
        if isinstance(data, str):
            try:
                return read(data)
            except ValueError as error:
                self.problems.add(path, str(error))
                return INVALID
        if isinstance(data, bool) or not isinstance(data, int | float) or not isfinite(data):
            self.problems.add(path, f"expected {words}, found {found(data)}")
            return INVALID
        return read(str(data)) if read is quantity else float(data)

    def _file(self, name: str, folder: Path, mark: FileName, path: FieldPath) -> Any:
        if name.startswith("package:") or not name:
            return name
        try:
            file = folder / Path(name).expanduser()
            there = file.exists()
        except (OSError, RuntimeError) as error:  # nobody may look there, or nobody has that home
            self.problems.add(path, f"cannot look for {found(name)}: {error}")
            return INVALID
        if mark.or_name:
            return str(file) if there or name[0] in "./~" else name
        if mark.must_exist and not file.is_file():
            self.problems.add(path, f"there is no file {file}" if not there else f"{file} is not a file")
            return INVALID
        return str(file)

    def _readable(self, text: str, mark: ReadBy, path: FieldPath) -> Any:
        try:
            mark.read(text)
        except ValueError as error:
            self.problems.add(path, str(error))
            return INVALID
        return text

    def _bounded(self, value: Any, data: Any, annotation: Any, path: FieldPath) -> Any:
        try:
            msgspec.convert(value, annotation)
        except msgspec.ValidationError as error:
            self.problems.add(path, f"{bounds_in_words(str(error))}, found {found(data)}")
            return INVALID
        return value

    def _unexpected(self, data: Any, kind: Any, path: FieldPath) -> Any:
        self.problems.add(path, f"expected {expected(kind)}, found {found(data)}")
        return INVALID


class Field(msgspec.Struct, frozen=True):
    """A named value: how Python calls it, how YAML may spell it, its type, and whether it may be left out."""

    name: str
    spellings: Sequence[str]
    """The first is the one to write."""
    annotation: Any
    optional: bool
    default: Any = None

    @property
    def null_is_default(self) -> bool:
        """Whether it may be written without a value as if it were left out: nothing is no value of its own."""
        return self.optional and not _may_be_none(unmarked(self.annotation)[0])


def fields_of(kind: type[msgspec.Struct]) -> dict[str, Field]:
    """The fields of a struct by their names in YAML."""
    fields = {}
    for info in msgspec.structs.fields(kind):
        written = yaml_name(info)
        default = None if info.default is msgspec.NODEFAULT else info.default
        fields[written] = Field(info.name, (written,), info.type, not info.required, default)
    return fields


def _may_be_none(kind: Any) -> bool:
    return kind is NoneType or (get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind))
