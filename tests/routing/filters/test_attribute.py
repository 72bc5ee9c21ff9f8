from typing import Any

import pytest

from pointsman.routing.endpoints import Attribute, observe
from pointsman.routing.filters import EndpointAttributeFilter
from pointsman.routing.filters.attribute import (
    COMPARE,
    FilterAlgorithm,
    Operator,
    Percentile,
    Threshold,
    TopK,
    ValueRange,
)
from tests.routing.fleets import Candidate, both_lengths, fleet_of, kept, reasons, scene, waiting


def threshold(operator: Operator, value: float) -> FilterAlgorithm:
    return FilterAlgorithm("threshold", threshold=Threshold(operator, value))


def within(low: float, high: float) -> FilterAlgorithm:
    return FilterAlgorithm("range", range=ValueRange(low, high))


def top(k: int, higher: bool = True) -> FilterAlgorithm:
    return FilterAlgorithm("topK", top_k=TopK(k, higher))


def percentile(number: float, higher: bool = True) -> FilterAlgorithm:
    return FilterAlgorithm("percentile", percentile=Percentile(number, higher))


ROWS = [waiting(2), waiting(4), waiting(4), waiting(10), Candidate()]


@both_lengths
@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (threshold("LessThan", 4), [0, 4]),
        (threshold("LessThanOrEqual", 4), [0, 1, 2, 4]),
        (threshold("GreaterThan", 4), [3, 4]),
        (threshold("GreaterThanOrEqual", 4), [1, 2, 3, 4]),
        (threshold("Equal", 4), [1, 2, 4]),
        (threshold("NotEqual", 4), [0, 3, 4]),
        (within(3, 4), [1, 2, 4]),
        (within(2, 2), [0, 4]),
        (top(1), [3, 4]),
        (top(2), [1, 3, 4]),  # of equal ones the first
        (top(2, False), [0, 1, 4]),
        (top(9), [0, 1, 2, 3, 4]),
        (percentile(0), [0, 1, 2, 3, 4]),
        (percentile(25), [0, 1, 2, 3, 4]),
        (percentile(50), [1, 2, 3, 4]),
        (percentile(76), [3, 4]),
        (percentile(100), [3, 4]),
        (percentile(25, False), [0, 4]),
        (percentile(50, False), [0, 1, 2, 4]),
    ],
)
def test_endpoints_that_pass(algorithm: FilterAlgorithm, expected: list[int], long: bool) -> None:
    assert kept(EndpointAttributeFilter("waiting_queue_size", algorithm), *scene(ROWS, long=long)) == expected
    strict = EndpointAttributeFilter("waiting_queue_size", algorithm, on_missing="Fail")
    assert kept(strict, *scene(ROWS, long=long)) == [place for place in expected if place != 4]


@both_lengths
def test_if_none_passes_all_do_only_if_so_configured(long: bool) -> None:
    none = threshold("GreaterThan", 99)
    scenery = scene(ROWS[:4], long=long)
    assert kept(EndpointAttributeFilter("waiting_queue_size", none), *scenery) == []
    assert kept(EndpointAttributeFilter("waiting_queue_size", none, fallback_on_empty=True), *scenery) == [0, 1, 2, 3]


def test_values_are_judged_again_when_they_change() -> None:
    fleet = fleet_of([waiting(1), waiting(9)])
    chooser = EndpointAttributeFilter("temperature", threshold("LessThan", 80), producer="thermometer")
    assert kept(chooser, *scene([], fleet=fleet)[:1], fleet.roster) == [0, 1]
    observe(fleet, "1", Attribute("temperature"), 90.0, 0.0)
    assert kept(chooser, *scene([], fleet=fleet)[:1], fleet.roster) == [0]
    observe(fleet, "1", Attribute("temperature"), 70.0, 0.0)
    assert kept(chooser, *scene([], fleet=fleet)[:1], fleet.roster) == [0, 1]


def test_our_own_load_is_always_current() -> None:
    fleet = fleet_of([Candidate(), Candidate()])
    chooser = EndpointAttributeFilter("in_flight_requests", threshold("LessThan", 1))
    assert kept(chooser, *scene([], fleet=fleet)[:1], fleet.roster) == [0, 1]
    fleet.load.reserve(fleet["0"], 10.0)
    assert kept(chooser, *scene([], fleet=fleet)[:1], fleet.roster) == [1]


def test_the_reason() -> None:
    [why] = reasons(EndpointAttributeFilter("waiting_queue_size", threshold("LessThan", 4)), *scene([waiting(9)]))
    wanted = "waiting_queue_size is 9 (nan: unknown), demanded: type threshold, operator LessThan, value 4"
    assert why == f"an attribute is not as demanded: {wanted}"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: EndpointAttributeFilter("", within(0, 1)), "attribute is empty"),
        (lambda: EndpointAttributeFilter("a/b", within(0, 1)), 'producer is missing; attribute "a/b"'),
        (lambda: EndpointAttributeFilter("a", FilterAlgorithm("range")), "algorithm.range is missing"),
        (lambda: within(2, 1), "range is 2 to 1"),
        (lambda: top(0), "topK.k is 0"),
        (lambda: percentile(101), "percentile.percentile is 101"),
    ],
)
def test_bad_parameters(made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


def test_every_operator_compares() -> None:
    assert set(COMPARE) == set(Operator.__args__)  # type: ignore[attr-defined]
