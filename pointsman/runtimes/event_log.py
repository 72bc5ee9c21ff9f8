"""What has changed on a plane, in order: phases of instances, documents in force, replica targets, promotions.

Enters: changes, as they happen. Leaves: numbered events, for `pointsman events`, metrics and the dashboard. The one
rule: nothing waits for the log. The newest events are kept, and an event that cannot be stored is still shown.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

import msgspec

from pointsman.control.events import PhaseChange
from pointsman.control.instances import Phase
from pointsman.reasons import Reason

KEPT = 2_000
"""Maximum number of events in memory, and of events that are read back from the file."""


RESTART = (Phase.BACKING_OFF.value, Phase.STARTING.value)
"""The phases before and after a restart."""


class Asker(NamedTuple):
    """The operator who requested a change."""

    name: str = ""
    """Empty if the plane itself decided the change."""
    key: str = ""
    """The fingerprint of the admin key that allowed the change; empty if no key was needed."""


THE_PLANE = Asker()


class PlaneEvent(msgspec.Struct, frozen=True):
    number: int
    """Grows by one with each event, even across restarts."""
    at: float
    """Unix time."""
    deployment: str
    """Empty if the event is about the plane as a whole."""
    what: Reason
    asker: Asker = THE_PLANE

    def as_dict(self) -> dict[str, Any]:
        at = datetime.fromtimestamp(self.at, UTC).isoformat(timespec="milliseconds")
        head = {
            "number": self.number,
            "at": at,
            "deployment": self.deployment,
            "by": self.asker.name,
            "key": self.asker.key,
        }
        return head | self.what.as_dict()


class EventStore(Protocol):
    """Where events are stored, one JSON object per line."""

    def lines(self, limit: int) -> list[bytes]: ...

    def append(self, lines: Iterable[bytes]) -> None: ...

    def problems(self) -> list[Reason]: ...

    async def close(self) -> None: ...


class EventLog:
    """The events of one plane."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: Unix time."""
        self.phases: Counter[tuple[str, str, str]] = Counter()
        """Phases that instances have entered, by deployment, phase, and code of the reason."""
        self.restarts: Counter[str] = Counter()
        """Instances that were started again after a failure, by deployment."""
        self.followers: list[Callable[[], None]] = []
        """Called after each event."""
        self._clock = clock
        self._events: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._store: EventStore | None = None
        self._last = 0

    def open(self, store: EventStore) -> None:
        """Load the stored events, and store further events in the same place."""
        earlier = []
        for line in store.lines(KEPT):
            with suppress(msgspec.MsgspecError, KeyError):  # the last line of a killed plane may be incomplete
                event = msgspec.json.decode(line, type=dict[str, Any])
                earlier.append(event | {"number": int(event["number"])})
        offset = earlier[-1]["number"] if earlier else 0
        newer = [event | {"number": event["number"] + offset} for event in self._events]
        self._events = deque([*earlier, *newer], KEPT)
        self._last += offset
        self._store = store
        self._append(newer)

    def problems(self) -> list[Reason]:
        """Why events are not stored."""
        return [] if self._store is None else self._store.problems()

    async def close(self) -> None:
        """Store the pending events. Later events are not stored."""
        store, self._store = self._store, None
        if store is not None:
            await store.close()

    @property
    def last(self) -> int:
        """The number of the newest event; 0 if there is none."""
        return self._last

    def note(self, deployment: str, what: Reason, asker: Asker = THE_PLANE) -> None:
        self._last += 1
        event = PlaneEvent(self._last, self._clock(), deployment, what, asker).as_dict()
        self._events.append(event)
        self._append([event])
        for follower in tuple(self.followers):
            follower()

    def note_phase(self, change: PhaseChange) -> None:
        self.phases[change.deployment, change.phase, "" if change.why is None else change.why.code] += 1
        self.restarts[change.deployment] += (change.before, change.phase) == RESTART
        facts = {"instance": change.instance_id, "before": change.before, "phase": change.phase, "why": change.why}
        self.note(change.deployment, Reason("phase-changed", facts))

    def forget(self, deployments: Set[str]) -> None:
        """Stop counting all deployments except these."""
        for key in [key for key in self.phases if key[0] not in deployments]:
            del self.phases[key]
        for name in self.restarts.keys() - deployments:
            del self.restarts[name]

    def since(self, number: int, limit: int, deployment: str = "") -> list[dict[str, Any]]:
        """The newest events after a number, oldest first. If the number is above the last one, it is from another log,
        and all events are new."""
        number = number if number <= self._last else 0
        found = [one for one in self._events if one["number"] > number and deployment in ("", one["deployment"])]
        return found[-limit:] if limit else []

    def _append(self, events: Iterable[dict[str, Any]]) -> None:
        if self._store is not None:
            self._store.append(map(msgspec.json.encode, events))
