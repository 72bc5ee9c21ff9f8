"""The expected workload, which is learned from asks. Packing keeps room for it.

Enters: asks, as they are made. Leaves: kinds with weights. The one rule: the result depends only on the asks and their
order, and not on where instances were placed.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from pointsman.placement.asks import Ask
from pointsman.placement.fragmentation import AskKind, Workload

MAX_HISTORY = 20_000
"""Maximum number of counted asks. When it is exceeded, all counts are halved, so that recent asks weigh more."""
MAX_REMEMBERED = 1_024
"""Maximum number of kinds. When it is exceeded, the rarest kinds are dropped."""
FIRST_ASKS = 16
"""Minimum number of asks for the workload to count as known."""


class KindCount(msgspec.Struct, frozen=True):
    kind: AskKind
    count: float


class LearnedWorkload:
    """Counts asks. The workload changes when the number of asks has doubled, later every `MAX_HISTORY` / 2 asks."""

    def __init__(self, counts: Iterable[KindCount] = ()) -> None:
        self._counts: Counter[AskKind] = Counter()
        for one in counts:
            self._counts[one.kind] += one.count  # type: ignore[assignment]
        self._asked = sum(self._counts.values())
        self._next = max(FIRST_ASKS, self._asked)
        self.version = 0
        """A version that grows whenever the workload changes."""
        self.workload: Workload | None = None
        """The workload; None until enough asks have been counted."""
        self._renew()

    def __len__(self) -> int:
        return len(self._counts)

    def saw(self, ask: Ask) -> None:
        """Count the ask of an instance. Asks without GPUs have no effect on GPUs."""
        if max(ask.need.tensor_parallel_sizes, default=0) <= 0:
            return
        self._counts[AskKind.of(ask)] += 1
        self._asked += 1
        if self._asked >= self._next:
            self._renew()

    def counts(self) -> list[KindCount]:
        """The counts, to be stored for the next placer."""
        return [KindCount(kind, count) for kind, count in self._counts.most_common(MAX_REMEMBERED)]

    def as_json(self) -> str:
        return msgspec.json.encode(self.counts()).decode()

    def copy(self) -> "LearnedWorkload":
        return LearnedWorkload(self.counts())

    def _renew(self) -> None:
        if self._asked < FIRST_ASKS:
            return
        while self._asked > MAX_HISTORY:
            halved = {kind: count / 2 for kind, count in self._counts.most_common(MAX_REMEMBERED) if count >= 2}
            self._counts = Counter(halved)
            self._asked = sum(self._counts.values())
        self._next = min(2 * self._asked, self._asked + MAX_HISTORY // 2)
        self.workload = Workload.of_counts(self._counts)
        self.version += 1
