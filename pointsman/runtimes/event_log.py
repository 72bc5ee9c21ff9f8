"""What has changed on a plane, in order: phases of instances, documents in force, replica targets, promotions.

Enters: changes, as they happen. Leaves: numbered events, for `pointsman events`, metrics and the dashboard. The one
rule: nothing waits for the log. The newest events are kept, and one that cannot be stored is still shown.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from pointsman.control.events import PhaseChange
from pointsman.reasons import Reason

KEPT = 2_000
"""Events in memory; as many are read back from the file."""


class PlaneEvent(msgspec.Struct, frozen=True):
    number: int
    """Grows by one with each event, also over restarts."""
    at: float
    """Unix time."""
    deployment: str
    """Empty if it is about the plane as a whole."""
    what: Reason
    by: str = ""
    """Who asked for it; empty if the plane decided it."""

    def as_dict(self) -> dict[str, Any]:
        at = datetime.fromtimestamp(self.at, UTC).isoformat(timespec="milliseconds")
        head = {"number": self.number, "at": at, "deployment": self.deployment, "by": self.by}
        return head | self.what.as_dict()


class EventStore(Protocol):
    """Where events are stored, one JSON object per line."""

    def lines(self, limit: int) -> list[bytes]: ...

    def append(self, lines: Iterable[bytes]) -> None: ...

    async def close(self) -> None: ...


class EventLog:
    """The events of one plane."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: Unix time."""
        self.phases: Counter[tuple[str, str, str]] = Counter()
        """Phases that instances have entered, by deployment, phase, and code of the reason."""
        self.followers: list[Callable[[], None]] = []
        """Called after each event."""
        self._clock = clock
        self._events: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._store: EventStore | None = None
        self._last = 0

    def open(self, store: EventStore) -> None:
        """Go on from what is stored, and store there from now on."""
        earlier = []
        for line in store.lines(KEPT):
            with suppress(msgspec.MsgspecError, KeyError):  # the last one of a plane that was killed may be cut off
                event = msgspec.json.decode(line, type=dict[str, Any])
                earlier.append(event | {"number": int(event["number"])})
        offset = earlier[-1]["number"] if earlier else 0
        newer = [event | {"number": event["number"] + offset} for event in self._events]
        self._events = deque([*earlier, *newer], KEPT)
        self._last += offset
        self._store = store
        self._append(newer)

    async def close(self) -> None:
        """Store what is not stored yet; nothing after that."""
        store, self._store = self._store, None
        if store is not None:
            await store.close()

    def note(self, deployment: str, what: Reason, by: str = "") -> None:
        self._last += 1
        event = PlaneEvent(self._last, self._clock(), deployment, what, by).as_dict()
        self._events.append(event)
        self._append([event])
        for follower in tuple(self.followers):
            follower()

    def note_phase(self, change: PhaseChange) -> None:
        self.phases[change.deployment, change.phase, "" if change.why is None else change.why.code] += 1
        facts = {"instance": change.instance_id, "before": change.before, "phase": change.phase, "why": change.why}
        self.note(change.deployment, Reason("phase-changed", facts))

    def forget(self, deployments: Collection[str]) -> None:
        """Count only what is about these from now on."""
        for key in [key for key in self.phases if key[0] not in deployments]:
            del self.phases[key]

    def since(self, number: int, limit: int, deployment: str = "") -> list[dict[str, Any]]:
        """The newest events after a number, oldest first."""
        found = [one for one in self._events if one["number"] > number and deployment in ("", one["deployment"])]
        return found[-limit:] if limit else []

    def _append(self, events: Iterable[dict[str, Any]]) -> None:
        if self._store is not None:
            self._store.append(map(msgspec.json.encode, events))
