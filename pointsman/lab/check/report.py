"""The report of a check, and the events from which the report is built."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

import msgspec


class Broken(msgspec.Struct, frozen=True):
    promise: str
    what: str
    example: str
    """The smallest case in which the promise is broken."""

    def __str__(self) -> str:
        return f"BROKEN  {self.promise}\n  {self.what}\n{self.example}"


class Report(msgspec.Struct, frozen=True):
    roles: list[str]
    kept: list[str]
    broken: list[Broken]
    untried: list[str] = []
    """Promises that could not be judged, because the policy does not answer, or does not answer in time."""

    @property
    def ok(self) -> bool:
        return not self.broken

    def __str__(self) -> str:
        verdict = "keeps all its promises" if self.ok else f"breaks {len(self.broken)} of its promises"
        if not self.kept and not self.broken:
            verdict = "was not checked: it has no promises that can be tried"
        kept = [f"kept    {promise}" for promise in self.kept]
        untried = [f"untried {promise}" for promise in self.untried]
        return "\n".join([*kept, *map(str, self.broken), *untried, f"this {' and '.join(self.roles)} {verdict}"])


class Unjudged(Exception):
    """A promise that cannot be judged, because the policy gives no answers."""


class CheckStarted(msgspec.Struct, frozen=True, tag=True):
    """The policy was built; these promises will be tried."""

    roles: list[str]
    promises: list[str]


class CaseStarted(msgspec.Struct, frozen=True, tag=True):
    """The policy is about to be called. If the policy never returns, this is the last event."""

    promise: str
    example: str


class PromiseChecked(msgspec.Struct, frozen=True, tag=True):
    """A promise was tested. `broken` is None if the promise is kept."""

    promise: str
    broken: Broken | None


CheckEvent: TypeAlias = CheckStarted | CaseStarted | PromiseChecked


class CheckListener(Protocol):
    """Follows a check while it runs."""

    def on_event(self, event: CheckEvent) -> None:
        """Called after each step."""

    def time_limit(self) -> AbstractContextManager[None]:
        """A context that surrounds every call of the policy."""


class ReportBuilder:
    """Builds a report from events. It sets no time limit."""

    def __init__(self) -> None:
        self.started: CheckStarted | None = None
        self.last_case: CaseStarted | None = None
        self._checked: dict[str, Broken | None] = {}

    def on_event(self, event: CheckEvent) -> None:
        if isinstance(event, CheckStarted):
            self.started = event
        elif isinstance(event, CaseStarted):
            self.last_case = event
        else:
            self._checked[event.promise] = self._checked.get(event.promise) or event.broken  # the first finding counts

    def time_limit(self) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def judged(self) -> list[str]:
        return list(self._checked)

    def report(self) -> Report:
        started = self.started or CheckStarted([], [])
        kept = [promise for promise, broken in self._checked.items() if broken is None]
        broken = [broken for broken in self._checked.values() if broken is not None]
        return Report(started.roles, kept, broken, [name for name in started.promises if name not in self._checked])
