"""What the two processes of a check say to each other: one order in, lines of JSON out."""

from typing import Any, TypeAlias

import msgspec

from pointsman.config.problems import Problem
from pointsman.lab.check.report import Event

MADE_WITHIN_S = 60.0
"""What it imports may be large."""


class Order(msgspec.Struct, frozen=True):
    """What to check."""

    name: str
    parameters: dict[str, Any]
    examples: int
    answer_s: float
    """Whoever has not answered after this is ended."""
    path: list[str]
    """Where to import from."""


class CheckRefused(msgspec.Struct, frozen=True, tag=True):
    """It cannot be built."""

    message: str
    problems: list[Problem]


class Raised(msgspec.Struct, frozen=True, tag=True):
    """It raised what nobody catches, or what ends a program."""

    error: str


class CheckEnded(msgspec.Struct, frozen=True, tag=True):
    """All has been told."""


Last: TypeAlias = CheckRefused | Raised | CheckEnded
Line: TypeAlias = Event | Last
