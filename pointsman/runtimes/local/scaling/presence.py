"""Who is there of a deployment: how many are ready, on their way, or without a place, and since when."""

from collections import Counter
from collections.abc import Iterable

from pointsman.control import InstanceStatus, Phase

ON_THEIR_WAY = (Phase.STARTING, Phase.BACKING_OFF)


class ReplicaCounts:
    """Of a node with shards, a replica is one of each."""

    def __init__(self) -> None:
        self.ready = self.starting = self.unplaced = 0
        self.trouble = ""
        """Why an instance that should run does not; empty: all do."""
        self.loaded_at: float | None = None
        """Since when there is an instance that takes requests; None: there is none."""
        self._started: set[tuple[str, int | None]] = set()
        """Instances and processes whose start-up has been told."""

    def see(self, instances: Iterable[InstanceStatus], members: tuple[str, ...], now: float) -> list[float]:
        """Take in how things stand. The start-ups that have come to their end since: how long each took."""
        mine = [one for one in instances if one.deployment in members and one.endpoint is None]
        self.ready = min(_counts(mine, members, Phase.READY))
        self.starting = max(_counts(mine, members, *ON_THEIR_WAY))
        self.unplaced = max(_counts([one for one in mine if one.unplaced], members, *Phase))
        failed = (one for one in mine if one.has_failed and one.reason)
        self.trouble = next((f"{one.id} does not run: {one.reason}" for one in failed), "")
        self.loaded_at = None if not self.ready else now if self.loaded_at is None else self.loaded_at
        return self._start_ups(mine)

    def loaded_for_s(self, now: float) -> float:
        """Since there is somebody who takes requests; below 0: there is nobody."""
        return -1.0 if self.loaded_at is None else now - self.loaded_at

    def _start_ups(self, mine: Iterable[InstanceStatus]) -> list[float]:
        ready = {(one.id, one.pid): one.start_up_s for one in mine if one.phase is Phase.READY}
        found = [taken_s for one, taken_s in ready.items() if taken_s is not None and one not in self._started]
        self._started = (self._started & {(one.id, one.pid) for one in mine}) | ready.keys()
        return found


def _counts(instances: Iterable[InstanceStatus], members: tuple[str, ...], *phases: Phase) -> list[int]:
    """Of each deployment, how many are in one of these phases."""
    counted = Counter(one.deployment for one in instances if one.phase in phases)
    return [counted[name] for name in members]
