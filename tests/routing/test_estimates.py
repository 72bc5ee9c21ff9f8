"""What a request would take and cost: one formula, told as columns and for one endpoint."""

from math import isnan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.routing.endpoints import EndpointTable
from pointsman.routing.estimates import (
    DEFAULT_OUTPUT_TOKENS,
    CostRates,
    billed_tokens,
    expected,
    latency_ms,
    output_tokens,
)
from pointsman.routing.plugins import Endpoints
from pointsman.selection import Column
from pointsman.selection.columns import ARRAYS_FROM, linear
from pointsman.types import ExecutionInstance, RequestMetadata
from tests.routing.fleets import both_lengths

Facts = dict[str, Any]


def fleet_of(rows: list[Facts], long: bool) -> EndpointTable:
    others = [ExecutionInstance(instance_id=f"other {n}") for n in range(ARRAYS_FROM if long else 0)]
    return EndpointTable([*(ExecutionInstance(instance_id=str(n), **row) for n, row in enumerate(rows)), *others])


def cost(request: RequestMetadata, candidates: Endpoints, price: float) -> Column:
    return linear(CostRates(price).of(candidates), billed_tokens(request), 0.0)


def known(number: float) -> float | None:
    return None if isnan(number) else float(number)


@both_lengths
@pytest.mark.parametrize(
    ("facts", "latency"),
    [
        ({"avg_latency_ms": 100}, 100),
        ({"avg_latency_ms": 100, "max_concurrency": 4, "current_load": 4}, 200),
        ({"avg_latency_ms": 100, "current_load": 256}, 200),
        ({"throughput_tokens_per_sec": 50}, 2000),
        ({"throughput_tokens_per_sec": 50, "current_load": 3}, 8000),
        ({"throughput_tokens_per_sec": 50, "avg_latency_ms": 100}, 100),
        ({"throughput_tokens_per_sec": 0, "avg_latency_ms": 0}, None),
        ({}, None),
    ],
)
def test_latency(facts: Facts, latency: float | None, long: bool) -> None:
    fleet = fleet_of([{"avg_latency_ms": 1}, facts], long)
    request = RequestMetadata("r", max_tokens=100)
    assert known(latency_ms(request, fleet.roster)[1]) == latency
    assert expected(request, 1, fleet.roster.columns, 2.0)[0] == latency


@both_lengths
@pytest.mark.parametrize(
    ("facts", "price"),
    [
        ({"throughput_tokens_per_sec": 10}, 2 * 360 / 3600 / 10),
        ({"throughput_tokens_per_sec": 10, "gpu_count": 8}, 8 * 2 * 360 / 3600 / 10),
        ({"throughput_tokens_per_sec": 10, "price_per_gpu_hour": 5}, 5 * 360 / 3600 / 10),
        ({"throughput_tokens_per_sec": 10, "price_per_gpu_hour": 0}, 0),
        ({"price_per_gpu_hour": 5}, None),
        ({}, None),
    ],
)
def test_cost(facts: Facts, price: float | None, long: bool) -> None:
    fleet = fleet_of([{"throughput_tokens_per_sec": 1}, facts], long)
    request = RequestMetadata("r", max_tokens=300, prompt_tokens=60)
    assert known(cost(request, fleet.roster, 2.0)[1]) == (None if price is None else pytest.approx(price))
    assert expected(request, 1, fleet.roster.columns, 2.0)[1] == (None if price is None else pytest.approx(price))


def test_an_answer_of_unknown_length() -> None:
    assert output_tokens(RequestMetadata("r")) == DEFAULT_OUTPUT_TOKENS
    assert output_tokens(RequestMetadata("r", max_tokens=0)) == 0


@both_lengths
def test_no_candidates(long: bool) -> None:
    fleet = fleet_of([], long)
    empty = fleet.roster.without(range(len(fleet)))
    assert len(latency_ms(RequestMetadata("r"), empty)) == len(cost(RequestMetadata("r"), empty, 2.0)) == 0


@both_lengths
def test_rates_follow_every_change_and_fit_every_part_of_the_fleet(long: bool) -> None:
    fleet, rates = (
        fleet_of([{"throughput_tokens_per_sec": 1}, {"throughput_tokens_per_sec": 2}, {}], long),
        CostRates(7.2),
    )

    def told(roster: Endpoints) -> list[float | None]:
        return [known(rate * 1000) for rate in rates.of(roster)][:3]

    assert told(fleet.roster.only(1)) == [1.0]
    assert told(fleet.roster) == [2.0, 1.0, None]
    assert told(fleet.roster.without([0]))[:2] == [1.0, None]
    assert told(fleet.roster.only(0)) == [2.0]
    fleet.update(ExecutionInstance(instance_id="1", throughput_tokens_per_sec=2, price_per_gpu_hour=0.72))
    assert told(fleet.roster) == [2.0, pytest.approx(0.1), None]
    fleet.remove("0")
    assert told(fleet.roster)[:2] == [pytest.approx(0.1), None]


numbers = st.none() | st.just(0.0) | st.floats(0.001, 1e6)
rows = st.lists(
    st.fixed_dictionaries(
        {
            "avg_latency_ms": numbers,
            "throughput_tokens_per_sec": numbers,
            "price_per_gpu_hour": numbers,
            "gpu_count": st.integers(1, 8),
            "current_load": st.integers(0, 300),
            "max_concurrency": st.none() | st.integers(0, 300),
        }
    ),
    min_size=1,
    max_size=6,
)
requests = st.builds(
    RequestMetadata,
    request_id=st.just("r"),
    max_tokens=st.none() | st.integers(0, 5000),
    prompt_tokens=st.none() | st.integers(0, 5000),
    prompt=st.text(max_size=9),
)


@given(rows, requests, st.floats(0.01, 100))
def test_columns_lists_arrays_and_the_numbers_of_one_endpoint_agree(
    facts: list[Facts], request: RequestMetadata, price: float
) -> None:
    for long in (False, True):
        roster = fleet_of(facts, long).roster
        latencies, costs = latency_ms(request, roster), cost(request, roster, price)
        for row in range(len(facts)):
            latency, money = expected(request, row, roster.columns, price)
            assert known(latencies[row]) == (None if latency is None else pytest.approx(latency))
            assert known(costs[row]) == (None if money is None else pytest.approx(money))
            assert latency is None or latency >= 0
            assert (latency is None) == (
                not facts[row]["avg_latency_ms"] and not facts[row]["throughput_tokens_per_sec"]
            )


@both_lengths
def test_a_smaller_roster_has_the_numbers_of_those_who_are_left(long: bool) -> None:
    roster = fleet_of([{"avg_latency_ms": 10 * n + 10} for n in range(4)], long).roster.without([0, 2])
    request = RequestMetadata("r")
    assert [float(number) for number in latency_ms(request, roster)][:2] == [20, 40]
