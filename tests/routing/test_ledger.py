"""Reservations: visible at once, and released exactly once whatever happens in between."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.routing.endpoints import IN_FLIGHT_REQUESTS, IN_FLIGHT_TOKENS, LOAD, Endpoint, EndpointTable
from pointsman.routing.plugins import UNCACHED_REQUEST_TOKENS
from pointsman.routing.request_table import Hold, Ledger, holds_of
from pointsman.selection import Cycle, SchedulingResult
from pointsman.selection.columns import ARRAYS_FROM
from pointsman.types import ExecutionInstance, RequestMetadata
from tests.properties import examples
from tests.routing.fleets import result_of


def fleet_of(number: int = 3) -> EndpointTable:
    return EndpointTable([ExecutionInstance(instance_id=f"i{n}", max_concurrency=4) for n in range(number)])


def counts(fleet: EndpointTable) -> list[tuple[float, float, float]]:
    """(requests, tokens, load) of each."""
    columns = (fleet.roster.column(name) for name in (IN_FLIGHT_REQUESTS, IN_FLIGHT_TOKENS, LOAD))
    return [(float(a), float(b), float(c)) for a, b, c in zip(*columns, strict=True)]


def test_a_reservation_is_seen_at_once_and_released_once() -> None:
    fleet = fleet_of(2)
    ledger = Ledger(fleet)
    ledger.reserve("r", [Hold(fleet["i0"], 10.0), Hold(fleet["i1"], 4.0, prefill=True)])
    assert counts(fleet) == [(1, 10, 1), (1, 4, 1)]
    assert "r" in ledger
    assert len(ledger) == 1
    ledger.first_token("r")
    assert counts(fleet) == [(1, 0, 1), (0, 0, 0)], (
        "the prompt is computed, and the endpoint that only prefilled is released"
    )
    ledger.first_token("r")
    assert counts(fleet) == [(1, 0, 1), (0, 0, 0)]
    assert ledger.release("r")
    assert not ledger.release("r")
    ledger.first_token("r")
    assert counts(fleet) == [(0, 0, 0), (0, 0, 0)]
    assert "r" not in ledger


def test_an_end_without_a_first_token_releases_everything() -> None:
    fleet = fleet_of(2)
    ledger = Ledger(fleet)
    ledger.reserve("r", [Hold(fleet["i0"], 10.0), Hold(fleet["i1"], 4.0, prefill=True)])
    assert ledger.release("r")
    assert counts(fleet) == [(0, 0, 0), (0, 0, 0)]


def test_an_endpoint_that_only_prefills_is_released_once() -> None:
    fleet = fleet_of(1)
    ledger = Ledger(fleet)
    ledger.reserve("r", [Hold(fleet["i0"], 10.0, prefill=True)])
    ledger.first_token("r")
    ledger.first_token("r")
    assert ledger.release("r")
    assert counts(fleet) == [(0, 0, 0)]


def test_a_request_in_flight_is_not_reserved_again() -> None:
    fleet = fleet_of(1)
    ledger = Ledger(fleet)
    ledger.reserve("r", [Hold(fleet["i0"], 1.0)])
    with pytest.raises(ValueError, match='request "r" is already in flight'):
        ledger.reserve("r", [Hold(fleet["i0"], 1.0)])
    assert counts(fleet) == [(1, 1, 1)]


def test_requests_of_an_endpoint_are_listed_oldest_first() -> None:
    fleet = fleet_of(2)
    ledger = Ledger(fleet)
    ledger.reserve("b", [Hold(fleet["i0"], 1.0), Hold(fleet["i1"], 1.0, prefill=True)])
    ledger.reserve("a", [Hold(fleet["i1"], 1.0)])
    assert (ledger.on(fleet["i0"]), ledger.on(fleet["i1"])) == (["b"], ["b", "a"])
    ledger.first_token("b")
    assert ledger.on(fleet["i1"]) == ["a"]


def test_holds_of_an_endpoint_that_left_do_not_count_on_a_new_one_of_the_same_id() -> None:
    fleet = fleet_of(2)
    ledger = Ledger(fleet)
    ledger.reserve("r", [Hold(fleet["i0"], 5.0)])
    gone = fleet.remove("i0")
    fleet.add(ExecutionInstance(instance_id="i0"))
    assert ledger.on(gone) == ["r"]
    assert ledger.on(fleet["i0"]) == []
    assert ledger.release("r")
    assert counts(fleet) == [(0, 0, 0), (0, 0, 0)]


# The holds of a result


def result(fleet: EndpointTable, primary: str, **targets: Sequence[int]) -> SchedulingResult[Endpoint]:
    runs = {name: result_of(name, fleet.roster, *places) for name, places in targets.items()}
    return SchedulingResult(runs, primary)


def test_the_first_target_of_each_profile_is_held_for_the_tokens_it_has_to_compute() -> None:
    fleet = fleet_of()
    cycle: Cycle[RequestMetadata] = Cycle(RequestMetadata("r", prompt_tokens=100))
    split = result(fleet, "decode", decode=[0, 1], prefill=[2])
    assert holds_of(cycle, split) == [Hold(fleet["i0"], 100.0), Hold(fleet["i2"], 100.0, prefill=True)]
    cycle[UNCACHED_REQUEST_TOKENS] = [30.0, 40.0, 50.0]
    assert holds_of(cycle, split) == [Hold(fleet["i0"], 30.0), Hold(fleet["i2"], 50.0, prefill=True)]


def test_the_endpoint_that_answers_is_held_to_the_end_whatever_its_profile_is_called() -> None:
    fleet = fleet_of()
    cycle: Cycle[RequestMetadata] = Cycle(RequestMetadata("r", prompt_tokens=9))
    assert holds_of(cycle, result(fleet, "prefill", prefill=[1])) == [Hold(fleet["i1"], 9.0)]


# Anything in any order

steps = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "first token", "release", "leave", "return"]),
        st.integers(0, 5),
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 500), st.booleans()), min_size=1, max_size=3),
    ),
    max_size=40,
)


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from([3, ARRAYS_FROM]), steps)
def test_columns_return_to_zero_through_any_sequence(number: int, moves: list[Any]) -> None:
    fleet = fleet_of(number)
    ledger = Ledger(fleet)
    held: dict[str, list[Hold]] = {}
    for what, which, parts in moves:
        name = f"r{which}"
        if what == "reserve" and name not in held:
            held[name] = [
                Hold(fleet[f"i{place}"], float(tokens), prefill)
                for place, tokens, prefill in parts
                if f"i{place}" in fleet
            ]
            ledger.reserve(name, held[name])
        elif what == "first token" and name in held:
            ledger.first_token(name)
            held[name] = [msgspec.structs.replace(hold, tokens=0.0) for hold in held[name] if not hold.prefill]
        elif what == "release":
            assert ledger.release(name) is (name in held)
            held.pop(name, None)
        elif what == "leave" and f"i{which}" in fleet and which < 3:
            fleet.remove(f"i{which}")
        elif what == "return" and which < 3 and f"i{which}" not in fleet:
            fleet.add(ExecutionInstance(instance_id=f"i{which}"))
        mine = [hold for holds in held.values() for hold in holds]
        for endpoint, (requests, tokens, load) in zip(fleet.roster, counts(fleet), strict=True):
            parts = [hold for hold in mine if hold.endpoint is endpoint]
            assert (requests, load) == (len(parts), len(parts))
            assert tokens == sum(hold.tokens for hold in parts)
        assert len(ledger) == len(held)
    for name in list(held):
        assert ledger.release(name)
    assert set(counts(fleet)) == {(0, 0, 0)} or not len(fleet)
