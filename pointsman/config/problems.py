"""What is wrong with a file, collected so that its author sees everything at once."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec

from pointsman.errors import ConfigError

FieldPath: TypeAlias = tuple[str | int, ...]
"""The way to a value in a document: field names and places in lists."""


class Problem(msgspec.Struct, frozen=True):
    """One mistake, where it is, and what to do about it."""

    file: str
    line: int
    """From 1; 0: the whole file."""
    field: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(filter(None, [where, self.field, self.message]))


class Problems:
    """Collects the problems of one file."""

    def __init__(self, file: str, lines: Mapping[FieldPath, int] | None = None) -> None:
        self.file = file
        self.was_in_force = False
        """The file ran before, and must run again if that is possible: what can be done without is no problem."""
        self._lines = lines if lines is not None else {}
        self._found: list[Problem] = []

    def add(self, path: FieldPath, message: str) -> None:
        """Note a problem at a path. What the file does not spell out is reported where it would stand."""
        problem = Problem(self.file, self.line_of(path), field_name(path), message)
        if problem not in self._found:
            self._found.append(problem)

    def add_at(self, line: int, message: str, path: FieldPath = ()) -> None:
        """Note a problem whose line is known better than the path says."""
        self._found.append(Problem(self.file, line, field_name(path), message))

    def line_of(self, path: FieldPath) -> int:
        """The line of the value at a path, or of the nearest thing around it."""
        for length in range(len(path), -1, -1):
            line = self._lines.get(path[:length])
            if line is not None:
                return line
        return 0

    def written(self, path: FieldPath) -> bool:
        """Whether the file spells this out, and did not just leave it to its default."""
        return path in self._lines

    def apart(self) -> "Problems":
        """A collector for the same file whose problems do not count unless somebody takes them over."""
        other = Problems(self.file, self._lines)
        other.was_in_force = self.was_in_force
        return other

    def take(self, others: Iterable[Problem]) -> None:
        """Count problems that were collected apart."""
        self._found += [problem for problem in others if problem not in self._found]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Problem]:
        return iter(sorted(self._found, key=lambda problem: problem.line))

    def raise_if_any(self) -> None:
        """Raise `ConfigError` with all of them, in the order of their lines."""
        if self._found:
            raise ConfigError(list(self))


def field_name(path: FieldPath) -> str:
    """("plugins", 2, "type") -> plugins[2].type"""
    name = ""
    for step in path:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else step
    return name
