"""The workload that packing keeps room for, learned from what is asked.

Enters: asks, as they are made. Leaves: kinds with weights. The one rule: what is learned depends on what was asked and
in which order, not on where it was placed.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from pointsman.placement.asks import Ask
from pointsman.placement.fragmentation import AskKind, Workload

MAX_HISTORY = 20_000
"""Asks that are remembered; beyond it, all counts are halved, so that what is asked now outweighs what was."""
MAX_REMEMBERED = 1_024
"""Kinds; beyond it, the rarest are forgotten."""
FIRST_ASKS = 16
"""From so many asks on, what is typical is taken from them."""


class KindCount(msgspec.Struct, frozen=True):
    kind: AskKind
    count: float


class LearnedWorkload:
    """Counts what is asked. Its workload changes when the number of asks has doubled, later every `MAX_HISTORY` / 2."""

    def __init__(self, counts: Iterable[KindCount] = ()) -> None:
        self._counts: Counter[AskKind] = Counter()
        for one in counts:
            self._counts[one.kind] += one.count  # type: ignore[assignment]
        self._asked = sum(self._counts.values())
        self._next = max(FIRST_ASKS, self._asked)
        self.version = 0
        """Raised whenever the workload changes."""
        self.workload: Workload | None = None
        """None as long as too little was asked to know."""
        self._renew()

    def __len__(self) -> int:
        return len(self._counts)

    def saw(self, ask: Ask) -> None:
        """An instance asks for a place. Asks that use no GPU say nothing about GPUs."""
        if max(ask.need.tensor_parallel_sizes, default=0) <= 0:
            return
        self._counts[AskKind.of(ask)] += 1
        self._asked += 1
        if self._asked >= self._next:
            self._renew()

    def counts(self) -> list[KindCount]:
        """To be kept, and given to the next one."""
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
