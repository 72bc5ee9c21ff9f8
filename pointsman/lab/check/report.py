"""What a check finds, as it goes on and in the end."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

import msgspec


class Broken(msgspec.Struct, frozen=True):
    """A promise that is not kept."""

    promise: str
    what: str
    example: str
    """The smallest situation in which it happens."""

    def __str__(self) -> str:
        return f"BROKEN  {self.promise}\n  {self.what}\n{self.example}"


class Report(msgspec.Struct, frozen=True):
    """What was checked and what was found."""

    roles: list[str]
    kept: list[str]
    broken: list[Broken]
    untried: list[str] = []
    """What cannot be asked about these, since it does not answer, or not in time."""

    @property
    def ok(self) -> bool:
        return not self.broken

    def __str__(self) -> str:
        verdict = "keeps all its promises" if self.ok else f"breaks {len(self.broken)} of its promises"
        if not self.kept and not self.broken:
            verdict = "was not checked: nothing is promised of it that could be tried out"
        kept = [f"kept    {promise}" for promise in self.kept]
        untried = [f"untried {promise}" for promise in self.untried]
        return "\n".join([*kept, *map(str, self.broken), *untried, f"this {' and '.join(self.roles)} {verdict}"])


class Begun(msgspec.Struct, frozen=True, tag=True):
    """It was built; this will be tried."""

    roles: list[str]
    promises: list[str]


class Trying(msgspec.Struct, frozen=True, tag=True):
    """Nothing more will be heard if it never answers."""

    promise: str
    example: str


class Found(msgspec.Struct, frozen=True, tag=True):
    """One promise has been tried; None: it is kept."""

    promise: str
    broken: Broken | None


Event: TypeAlias = Begun | Trying | Found


class Watch(Protocol):
    """Sees how a check goes on."""

    def tell(self, event: Event) -> None:
        """Take in what happened."""

    def answering(self) -> AbstractContextManager[None]:
        """Around every question, for whoever does not wait for ever."""


class Gathered:
    """Makes a report of events. It waits as long as it takes."""

    def __init__(self) -> None:
        self.begun: Begun | None = None
        self.trying: Trying | None = None
        """What was tried last."""
        self._found: dict[str, Broken | None] = {}

    def tell(self, event: Event) -> None:
        if isinstance(event, Begun):
            self.begun = event
        elif isinstance(event, Trying):
            self.trying = event
        else:
            self._found[event.promise] = event.broken

    def answering(self) -> AbstractContextManager[None]:
        return nullcontext()

    def report(self) -> Report:
        """What is known by now."""
        begun = self.begun or Begun([], [])
        kept = [promise for promise, broken in self._found.items() if broken is None]
        broken = [broken for broken in self._found.values() if broken is not None]
        return Report(begun.roles, kept, broken, [name for name in begun.promises if name not in self._found])
