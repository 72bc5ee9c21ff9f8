"""The problems of a file, collected so that its author sees all of them at once."""

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import NoneType
from typing import Any, Literal, TypeAlias, get_args, get_origin

import msgspec

from pointsman.errors import ConfigError
from pointsman.parameters import is_secret, quoted, without_secrets
from pointsman.types import MAX_NAME

FieldPath: TypeAlias = tuple[str | int, ...]
"""The path to a value in a document: field names, and indices of lists."""


class Problem(msgspec.Struct, frozen=True):
    """One mistake: what it is, where it is, and what to do about it."""

    file: str
    line: int
    """The line number, counted from 1. 0 stands for the whole file."""
    field: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(filter(None, [where, self.field, self.message]))


class ConfigWarning(Problem, frozen=True):
    """An accepted setting that has no effect, or an effect that its author may not expect."""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(filter(None, [where, "warning", self.field, self.message]))


class Problems:
    """Collects the problems and the warnings of one file while it is loaded."""

    def __init__(self, file: str, lines: Mapping[FieldPath, int] | None = None) -> None:
        self.file = file
        self.was_in_force = False
        """Whether the file was applied before. If so, problems that are not essential are tolerated."""
        self._lines = lines if lines is not None else {}
        self._found: list[Problem] = []
        self._warnings: list[ConfigWarning] = []

    def add(self, path: FieldPath, message: str) -> None:
        """Report a problem at a path. An absent field is reported where it would be."""
        problem = Problem(self.file, self.line_of(path), field_name(path), message)
        if problem not in self._found:
            self._found.append(problem)

    def add_at(self, line: int, message: str, path: FieldPath = ()) -> None:
        """Report a problem at a line, for cases where the path does not give the line."""
        self._found.append(Problem(self.file, line, field_name(path), message))

    def warn(self, path: FieldPath, message: str) -> None:
        """Report a warning about an accepted setting."""
        warning = ConfigWarning(self.file, self.line_of(path), field_name(path), message)
        if warning not in self._warnings:
            self._warnings.append(warning)

    @property
    def warnings(self) -> tuple[ConfigWarning, ...]:
        """The warnings, in the order of their lines."""
        return tuple(sorted(self._warnings, key=lambda warning: warning.line))

    def line_of(self, path: FieldPath) -> int:
        """The line of the value at a path, or of the nearest value around it."""
        for length in range(len(path), -1, -1):
            line = self._lines.get(path[:length])
            if line is not None:
                return line
        return 0

    def written(self, path: FieldPath) -> bool:
        """Whether the file contains this field, even if with the default value."""
        return path in self._lines

    def apart(self) -> "Problems":
        """A second collector for the same file; `take` adds its problems to this one."""
        other = Problems(self.file, self._lines)
        other.was_in_force = self.was_in_force
        return other

    def take(self, others: Iterable[Problem]) -> None:
        self._found += [problem for problem in others if problem not in self._found]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Problem]:
        return iter(sorted(self._found, key=lambda problem: problem.line))

    def raise_if_any(self) -> None:
        """If there are problems, raise `ConfigError` with all of them, in the order of their lines."""
        if self._found:
            raise ConfigError(list(self))


class Names:
    """Checks that each entry in one list of a document has a name, and that no two names are equal."""

    def __init__(self, word: str, problems: Problems, taken: Iterable[str] = ()) -> None:
        """`taken` are names that are in use outside the list."""
        self._word = word
        self._problems = problems
        self._lines = dict.fromkeys(taken, 0)

    def take(self, name: str, path: FieldPath) -> None:
        """Check the name of the entry at a path. An INVALID name has been reported already."""
        field = (*path, "name")
        if name == "":
            self._problems.add(field, "must not be empty")
        elif name and len(name) > MAX_NAME:
            self._problems.add(field, f"expected at most {MAX_NAME} characters, found {len(name)}")
        elif name and name in self._lines:
            where = f" on line {self._lines[name]}" if self._lines[name] else ""
            self._problems.add(field, f'there is already {a(self._word)} "{name}"{where}')
        elif name:
            self._lines[name] = self._problems.line_of(field)


def field_name(path: FieldPath) -> str:
    """("plugins", 2, "type") -> plugins[2].type"""
    name = ""
    for step in path:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else step
    return name


_TYPE_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    NoneType: "nothing",
}
_BOUND_WORDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}


def expected(annotation: Any) -> str:
    """A type in words: "a whole number"."""
    if get_origin(annotation) is Literal:
        return listed([found(choice) for choice in get_args(annotation)])
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return listed([found(choice.value) for choice in annotation])
    if is_mapping(annotation):
        return "a mapping (field: value)"
    if is_list(annotation):
        return "a list"
    return _TYPE_WORDS.get(annotation) or str(getattr(annotation, "__name__", "a value"))


def found(data: Any, path: FieldPath = ()) -> str:
    """A value in words: mappings and lists by their kind, text in quotes, numbers as they are. The value is
    not shown if its path says that it may be a secret."""
    if isinstance(data, dict):
        return "a mapping"
    if isinstance(data, list):
        return "a list"
    if data is not None and is_secret(field_name(path)):
        return "another value"
    return "nothing" if data is None else quoted(without_secrets(data))


def bounds_in_words(error: msgspec.ValidationError) -> str:
    """What must be true of a value that is out of bounds. "Expected `int` >= 1" -> must be at least 1."""
    wanted = str(error).removeprefix("Expected ").partition(" - at ")[0].replace("`", "")
    bound = re.fullmatch(r"(?:int|float) (>=|<=|>|<) (.+)", wanted)
    return f"must be {_BOUND_WORDS[bound[1]]} {float(bound[2]):g}" if bound is not None else f"expected {wanted}"


def listed(words: list[str]) -> str:
    """a, b or c"""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def a(noun: str) -> str:
    """A noun with its article."""
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"  # a usage limit policy


def is_mapping(annotation: Any) -> bool:
    """Whether values of this type are mappings in YAML."""
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct | Mapping)


def is_list(annotation: Any) -> bool:
    """Whether values of this type are lists in YAML."""
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, Iterable) and kind is not str and not is_mapping(annotation)
