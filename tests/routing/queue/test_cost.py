"""Order is kept, not recomputed: measured in comparisons of keys, without a clock."""

from collections.abc import Callable
from math import log2
from typing import Any, TypeVar

import pytest

from pointsman.routing.queue import (
    BandSettings,
    FairnessPolicy,
    FlowControl,
    GlobalStrictFairnessPolicy,
    Queued,
    RoundRobinFairnessPolicy,
    VirtualTokenCounterFairnessPolicy,
)
from tests.routing.queue.waiting import item, offer

T = TypeVar("T")

WAITING = 10_000


class Counted:
    """A key that counts how often it is compared."""

    comparisons = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def __lt__(self, other: "Counted") -> bool:
        Counted.comparisons += 1
        return self.value < other.value

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return isinstance(other, Counted) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


class CountedOrdering:
    """An ordering whose keys count their comparisons."""

    def __init__(self) -> None:
        self.keys = 0

    def key(self, item: Queued) -> Any:
        self.keys += 1
        return Counted(float(self.keys * 7919 % 10_007))


def comparisons(step: Callable[..., T], *arguments: Any) -> tuple[int, T]:
    """The number of comparisons in a step, and its result."""
    before = Counted.comparisons
    result = step(*arguments)
    return Counted.comparisons - before, result


@pytest.mark.parametrize("flows", [1, WAITING])
@pytest.mark.parametrize(
    "fairness",
    [GlobalStrictFairnessPolicy(), RoundRobinFairnessPolicy(), VirtualTokenCounterFairnessPolicy()],
    ids=lambda policy: type(policy).__name__,
)
def test_no_operation_compares_more_than_log_n_keys(fairness: FairnessPolicy, flows: int) -> None:
    ordering = CountedOrdering()
    queue = FlowControl([BandSettings(fairness=fairness, ordering=ordering, max_requests=None)])
    for number in range(WAITING):
        offer(queue, item(f"{number}", flow=f"flow{number % flows}"), now=number / 1000)
    # Comparing two entries compares their keys at most twice; a heap goes down and up once; a head changes once.
    bound = 8 * log2(WAITING)
    costs: list[int] = []
    for number in range(300):
        cost, one = comparisons(queue.pop, 0.0, 0.0)
        assert one is not None
        costs.append(cost)
        if number % 3:
            costs.append(comparisons(queue.served, one)[0])
            costs.append(comparisons(queue.ended, one, 10)[0])
        else:
            costs.append(comparisons(queue.put_back, one)[0])
        costs.append(comparisons(queue.cancel, f"{WAITING - 1 - 5 * number}")[0])
        costs.append(comparisons(offer, queue, item(f"n{number}", flow=f"flow{number % flows}"))[0])
    assert 0 < max(costs) <= bound
    assert ordering.keys == WAITING + 300
