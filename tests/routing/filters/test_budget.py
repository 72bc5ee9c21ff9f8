"""Requests with a budget stay away from endpoints that would exceed it."""

from math import inf
from typing import Any

import pytest

from pointsman.routing.endpoints import EndpointTable
from pointsman.routing.filters.budget import WithinBudget
from pointsman.routing.plugins import Endpoints
from pointsman.selection import Cycle
from pointsman.selection.columns import ARRAYS_FROM
from pointsman.types import ExecutionInstance, RequestMetadata
from tests.routing.fleets import both_lengths, kept, reasons

Facts = dict[str, Any]


def roster_of(rows: list[Facts], long: bool) -> Endpoints:
    others = [ExecutionInstance(instance_id=f"other {n}") for n in range(ARRAYS_FROM if long else 0)]
    fleet = EndpointTable([*(ExecutionInstance(instance_id=str(n), **row) for n, row in enumerate(rows)), *others])
    return fleet.roster.without(range(len(rows), len(fleet))) if long else fleet.roster


def asks(budget: float | None) -> Cycle[RequestMetadata]:
    """For 3600 tokens: an endpoint that makes one a second takes an hour for them."""
    return Cycle(RequestMetadata("r", prompt_tokens=600, max_tokens=3000, cost_budget=budget))


def costs(dollars: float) -> Facts:
    return {"throughput_tokens_per_sec": 1, "price_per_gpu_hour": dollars}


UNKNOWN: Facts = {}


@both_lengths
@pytest.mark.parametrize(
    ("budget", "rows", "expected"),
    [
        (None, [costs(5), UNKNOWN], [0, 1]),
        (2.0, [costs(1), costs(2), costs(2.001), costs(9)], [0, 1]),
        (2.0, [UNKNOWN, costs(1)], [1]),
        (2.0, [UNKNOWN, UNKNOWN], []),
        (0.0, [costs(0), costs(0.01)], [0]),
        (inf, [costs(5), UNKNOWN], [0, 1]),
        (-1.0, [costs(0)], []),
        (2.0, [], []),
    ],
)
def test_keeps_endpoints_within_the_budget(
    budget: float | None, rows: list[Facts], expected: list[int], long: bool
) -> None:
    assert kept(WithinBudget(), asks(budget), roster_of(rows, long)) == expected


@both_lengths
def test_the_default_price_is_for_instances_without_their_own(long: bool) -> None:
    roster = roster_of([{"throughput_tokens_per_sec": 1}, {"throughput_tokens_per_sec": 1, "gpu_count": 2}], long)
    assert kept(WithinBudget(), asks(2.0), roster) == [0]
    assert kept(WithinBudget(1.0), asks(2.0), roster) == [0, 1]
    assert kept(WithinBudget(2.5), asks(2.0), roster) == []


@both_lengths
def test_says_why(long: bool) -> None:
    roster = roster_of([costs(5), costs(1), UNKNOWN], long)
    assert reasons(WithinBudget(), asks(1.25), roster) == [
        "over budget: would cost 5, the budget is 1.25",
        "over budget: its cost is not known, and the budget is 1.25",
    ]
