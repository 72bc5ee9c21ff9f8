"""Pickers for candidates of any kind. Ties and every other random choice use the dice of the cycle."""

from collections.abc import Sequence
from typing import Any, TypeVar

from pointsman.selection.arrays import np
from pointsman.selection.columns import where_largest
from pointsman.selection.plugins import Cycle
from pointsman.selection.profile import Ranked

C = TypeVar("C")

__all__ = ["MaxScorePicker", "PowerOfTwoPicker", "RandomPicker", "WeightedRandomPicker"]


class MaxScorePicker:
    """The highest total; equals in random order."""

    def __init__(self, max_num_of_endpoints: int = 1) -> None:
        self.most = max_num_of_endpoints if max_num_of_endpoints > 0 else 1

    def pick(self, cycle: Cycle[Any], ranked: Ranked[C]) -> Sequence[C]:
        if self.most == 1:
            best = where_largest(ranked.totals)
            return (ranked.candidates[best[0] if len(best) == 1 else best[cycle.chance.below(len(best))]],)
        shuffled = cycle.chance.shuffled(range(len(ranked)))
        order = sorted(shuffled, key=lambda position: -ranked.totals[position])
        return [ranked.candidates[position] for position in order[: self.most]]


class RandomPicker:
    """Anybody, each as likely as the other."""

    def __init__(self, max_num_of_endpoints: int = 1) -> None:
        self.most = max_num_of_endpoints if max_num_of_endpoints > 0 else 1

    def pick(self, cycle: Cycle[Any], ranked: Ranked[C]) -> Sequence[C]:
        if self.most == 1:
            return (ranked.candidates[cycle.chance.below(len(ranked))],)
        order = cycle.chance.shuffled(range(len(ranked)))
        return [ranked.candidates[position] for position in order[: self.most]]


class WeightedRandomPicker:
    """Likelier the higher the total (a single pick: total / sum); nobody has any: as the random picker."""

    def __init__(self, max_num_of_endpoints: int = 1) -> None:
        self.most = max_num_of_endpoints if max_num_of_endpoints > 0 else 1
        self._random = RandomPicker(self.most)

    def pick(self, cycle: Cycle[Any], ranked: Ranked[C]) -> Sequence[C]:
        totals = np.asarray(ranked.totals)
        if not (totals > 0).any():
            return self._random.pick(cycle, ranked)
        # Efraimidis and Spirakis: the k largest of U^(1/w) are a weighted sample without replacement.
        keys = [cycle.chance.random() ** (1 / total) if total > 0 else 0.0 for total in totals.tolist()]
        order = sorted(range(len(keys)), key=keys.__getitem__, reverse=True)
        return [ranked.candidates[position] for position in order[: self.most]]


class PowerOfTwoPicker:
    """The better of two taken at random: nearly as even as the best of all, without everybody choosing the same."""

    def pick(self, cycle: Cycle[Any], ranked: Ranked[C]) -> Sequence[C]:
        if len(ranked) == 1:
            return (ranked.candidates[0],)
        one = cycle.chance.below(len(ranked))
        other = cycle.chance.below(len(ranked) - 1)
        other += other >= one
        better = one if ranked.totals[one] >= ranked.totals[other] else other
        return (ranked.candidates[better],)
