"""Pickers for candidates of any kind. Ties and all other random choices use the generator of the cycle."""

from collections.abc import Sequence
from typing import Any, TypeVar

from pointsman.selection.arrays import np
from pointsman.selection.columns import where_largest
from pointsman.selection.plugins import Cycle
from pointsman.selection.profile import Ranked

C = TypeVar("C")

__all__ = ["MaxScorePicker", "PowerOfTwoPicker", "RandomPicker", "WeightedRandomPicker"]


class MaxScorePicker:
    """Picks the highest totals; ties in random order."""

    def __init__(self, max_num_of_endpoints: int = 1) -> None:
        self.max_targets = max_num_of_endpoints if max_num_of_endpoints > 0 else 1

    def pick(self, cycle: Cycle[Any], ranked: Ranked[C]) -> Sequence[C]:
        if self.max_targets == 1:
            best = where_largest(ranked.totals)
            return (ranked.candidates[best[0] if len(best) == 1 else best[cycle.rng.below(len(best))]],)
        shuffled = cycle.rng.shuffled(range(len(ranked)))
        order = sorted(shuffled, key=lambda position: -ranked.totals[position])
        return [ranked.candidates[position] for position in order[: self.max_targets]]


class RandomPicker:
    """Picks at random, each candidate with the same probability."""

    def __init__(self, max_num_of_endpoints: int = 1) -> None:
        self.max_targets = max_num_of_endpoints if max_num_of_endpoints > 0 else 1

    def pick(self, cycle: Cycle[Any], ranked: Ranked[C]) -> Sequence[C]:
        if self.max_targets == 1:
            return (ranked.candidates[cycle.rng.below(len(ranked))],)
        order = cycle.rng.shuffled(range(len(ranked)))
        return [ranked.candidates[position] for position in order[: self.max_targets]]


class WeightedRandomPicker:
    """Picks with a probability in proportion to the total; if all totals are 0, like the random picker."""

    def __init__(self, max_num_of_endpoints: int = 1) -> None:
        self.max_targets = max_num_of_endpoints if max_num_of_endpoints > 0 else 1
        self._random = RandomPicker(self.max_targets)

    def pick(self, cycle: Cycle[Any], ranked: Ranked[C]) -> Sequence[C]:
        totals = np.asarray(ranked.totals)
        if not (totals > 0).any():
            return self._random.pick(cycle, ranked)
        # Efraimidis and Spirakis: the k largest of U^(1/w) are a weighted sample without replacement.
        keys = [cycle.rng.random() ** (1 / total) if total > 0 else 0.0 for total in totals.tolist()]
        order = sorted(range(len(keys)), key=keys.__getitem__, reverse=True)
        return [ranked.candidates[position] for position in order[: self.max_targets]]


class PowerOfTwoPicker:
    """Picks the better of two random candidates: spreads load nearly as well as the best of all, without herding."""

    def pick(self, cycle: Cycle[Any], ranked: Ranked[C]) -> Sequence[C]:
        if len(ranked) == 1:
            return (ranked.candidates[0],)
        one = cycle.rng.below(len(ranked))
        other = cycle.rng.below(len(ranked) - 1)
        other += other >= one
        better = one if ranked.totals[one] >= ranked.totals[other] else other
        return (ranked.candidates[better],)
