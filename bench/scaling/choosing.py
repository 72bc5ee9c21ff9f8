"""Cross-validation: parameters chosen on all series but one, applied to that one."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import msgspec

from bench.scaling.recordings import Load
from pointsman.lab.scaling import Replay, ReplayOutcome, Setting
from pointsman.scaling.policies.predictive import SHAPES, Habits, Predictive

PRICE = 50.0
"""Cost of an unserved request, in served requests: 0.2 % unserved cost as much as a tenth of the fleet."""


class Choice(msgspec.Struct, frozen=True):
    """Parameters of the predictive policy."""

    spread_bins: int
    caution: float
    shapes: str

    def policy(self, capacity: float) -> Predictive:
        policy = Predictive(capacity, caution=self.caution, react_s=0.0)
        policy.habits = Habits(shapes=SHAPES[: KINDS[self.shapes]], spread_bins=self.spread_bins)
        return policy

    def __str__(self) -> str:
        return f"{self.spread_bins} bins, caution {self.caution:g}, {self.shapes}"


KINDS = {"now": 1, "short memory": 2, "memory": 4, "memory and seasons": len(SHAPES)}
"""Number of shapes, from the simplest on."""
CHOICES = [
    *(Choice(bins, caution, "memory and seasons") for bins, caution in product((6, 12, 24), (1.0, 0.75, 0.5))),
    *(Choice(12, 0.75, kind) for kind in list(KINDS)[:-1]),
]
DEFAULT = Choice(12, 0.75, "memory and seasons")

Results = Mapping[tuple[str, Choice], ReplayOutcome]


def try_all(loads: Sequence[Load], progress: Callable[[str], None]) -> Results:
    """Every choice on every load, with a start-up of 600 s and one call per bin."""
    found = {}
    for load in loads:
        setting = Setting(capacity=load.capacity, start_up_s=600.0, interval_s=load.series.bin_s)
        for choice in CHOICES:
            progress(f"leave one out: {load.short}, {choice}")
            found[load.short, choice] = Replay(load.series, setting).run(choice.policy(load.capacity))
    return found


def chosen_without(left_out: str, names: Sequence[str], results: Results) -> Choice:
    """The cheapest on all others; of equals, the first."""
    others = [name for name in names if name != left_out]
    return min(CHOICES, key=lambda choice: sum(price(results[name, choice]) for name in others))


def price(outcome: ReplayOutcome) -> float:
    return outcome.ratio + PRICE * outcome.unserved


HEADS = ("left out", "chosen on the others", "ratio", "unserved", "default", "unserved", "best for it", "unserved")


def rows(names: Sequence[str], results: Results) -> list[list[str]]:
    table = []
    for name in names:
        choice = chosen_without(name, names, results)
        best = min(CHOICES, key=lambda one: price(results[name, one]))
        row = [name, str(choice)]
        for one in (choice, DEFAULT, best):
            row += [f"{results[name, one].ratio:.3f}", f"{results[name, one].unserved:.2%}"]
        table.append(row)
    return table
