"""Load, speed and cost by what is known of the instances themselves."""

from math import nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.routing.endpoints import Endpoint, EndpointTable, Metrics
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.scorers.speed import Cheapest, Fastest, LeastLoaded
from pointsman.selection import Cycle, Scorer
from pointsman.selection.columns import ARRAYS_FROM, best_over, column_of
from pointsman.types import ExecutionInstance, RequestMetadata
from tests.routing.fleets import both_lengths, scores

Facts = dict[str, Any]


def faced(rows: list[Facts], long: bool, request: RequestMetadata | None = None) -> tuple[RequestCycle, Endpoints]:
    """A cycle and the endpoints of these facts; a long fleet has others that are not candidates."""
    others = [ExecutionInstance(instance_id=f"other {n}") for n in range(ARRAYS_FROM if long else 0)]
    fleet = EndpointTable([*(ExecutionInstance(instance_id=str(n), **row) for n, row in enumerate(rows)), *others])
    roster = fleet.roster.without(range(len(rows), len(fleet))) if long else fleet.roster
    return Cycle(request or RequestMetadata("r", max_tokens=100)), roster


def load(running: int, limit: int | None = 4) -> Facts:
    return {"current_load": running, "max_concurrency": limit}


def takes(latency_ms: float | None = None, rate: float | None = None, **more: Any) -> Facts:
    return {"avg_latency_ms": latency_ms, "throughput_tokens_per_sec": rate, "max_concurrency": 4} | more


def costs(rate: float | None, gpus: int = 1, price: float | None = None, **more: Any) -> Facts:
    return {"throughput_tokens_per_sec": rate, "gpu_count": gpus, "price_per_gpu_hour": price} | more


TABLE: list[tuple[Scorer[Endpoint], list[Facts], list[float]]] = [
    (LeastLoaded(), [load(0), load(2), load(4), load(12)], [1.0, 4 / 6, 0.5, 0.25]),
    (LeastLoaded(), [load(0, None), load(256, None)], [1.0, 0.5]),
    (LeastLoaded(), [load(0, 0), load(1, 0)], [1.0, 0.5]),
    (Fastest(), [takes(100), takes(200), takes(400)], [1.0, 0.5, 0.25]),
    # At its limit an instance takes twice as long.
    (Fastest(), [takes(100, current_load=4), takes(100)], [0.5, 1.0]),
    (Fastest(), [takes(), takes(100), takes()], [0.0, 1.0, 0.0]),
    (Fastest(), [takes(100), takes()], [1.0, 0.0]),
    # 100 tokens at 1000 a second, shared by the requests on it.
    (Fastest(), [takes(rate=1000), takes(100), takes(rate=1000, current_load=1)], [1.0, 1.0, 0.5]),
    (Fastest(), [takes(), takes(current_load=4)], [1.0, 0.5]),
    (Fastest(), [takes(0.0), takes(50)], [0.0, 1.0]),
    (Cheapest(), [costs(100), costs(100, gpus=2), costs(50, gpus=4)], [1.0, 0.5, 0.125]),
    (Cheapest(4.0), [costs(100), costs(100, price=2.0), costs(100, price=8.0)], [0.5, 1.0, 0.25]),
    (Cheapest(), [costs(None), costs(10)], [0.0, 1.0]),
    (Cheapest(), [costs(None, max_concurrency=2), costs(None, max_concurrency=2, current_load=2)], [1.0, 0.5]),
    # A machine without a price by the hour: no other endpoint is nearly as cheap.
    (Cheapest(), [costs(10), costs(10, price=0.0), costs(None), costs(20, price=0.0)], [0.0, 1.0, 0.0, 1.0]),
    (Cheapest(), [costs(10, price=0.0)], [1.0]),
]


@both_lengths
@pytest.mark.parametrize(("scorer", "rows", "expected"), TABLE)
def test_scores(scorer: Scorer[Endpoint], rows: list[Facts], expected: list[float], long: bool) -> None:
    assert scores(scorer, *faced(rows, long)) == pytest.approx(expected)


@both_lengths
@pytest.mark.parametrize("scorer", [LeastLoaded(), Fastest(), Cheapest()], ids=lambda one: type(one).__name__)
def test_no_candidates_no_scores(scorer: Scorer[Endpoint], long: bool) -> None:
    assert scores(scorer, *faced([], long)) == []


@both_lengths
def test_an_answer_of_no_tokens_has_scores(long: bool) -> None:
    nothing = RequestMetadata("r", prompt="", max_tokens=0)
    rows = [takes(rate=10), takes(50), takes(rate=20)]
    assert scores(Fastest(), *faced(rows, long, nothing)) == [1.0, 0.0, 1.0]
    assert scores(Cheapest(), *faced(rows, long, nothing)) == [0.5, 0.0, 1.0]


@both_lengths
def test_load_that_was_reported_counts(long: bool) -> None:
    fleet = EndpointTable(
        [ExecutionInstance(instance_id=str(n), max_concurrency=4) for n in range(ARRAYS_FROM if long else 2)]
    )
    fleet.measure("0", Metrics(running_requests_size=3, waiting_queue_size=1), 0.0)
    fleet.load.reserve(fleet["1"], 1.0)
    assert scores(LeastLoaded(), Cycle(RequestMetadata("r")), fleet.roster)[:2] == pytest.approx([0.5, 0.8])


numbers = st.none() | st.sampled_from([0.0, 1.0, 100.0]) | st.floats(0.01, 1e6)
facts = st.fixed_dictionaries(
    {
        "avg_latency_ms": numbers,
        "throughput_tokens_per_sec": numbers,
        "price_per_gpu_hour": numbers,
        "gpu_count": st.integers(1, 8),
        "current_load": st.integers(0, 10),
        "max_concurrency": st.none() | st.integers(0, 10),
    }
)


@given(st.lists(facts, min_size=1, max_size=6), st.none() | st.integers(0, 1000))
def test_lists_and_arrays_agree_and_keep_the_bounds_that_they_promise(rows: list[Facts], most: int | None) -> None:
    request = RequestMetadata("r", "hello", max_tokens=most)
    for scorer in (LeastLoaded(), Fastest(), Cheapest()):
        short, long = (scores(scorer, *faced(rows, long, request)) for long in (False, True))
        assert short == pytest.approx(long)
        assert scorer.bounded
        assert all(0 <= score <= 1 for score in short)
        assert max(short) > 0, "one is the best"


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([2.0, 4.0, 1.0], [0.5, 0.25, 1.0]),
        ([nan, 4.0, nan, 2.0], [0.0, 0.5, 0.0, 1.0]),
        ([4.0, nan], [1.0, 0.0]),
        ([0.0, 5.0, nan, 0.0], [1.0, 0.0, 0.0, 1.0]),
        ([nan, nan], None),
        ([], None),
    ],
)
def test_the_best_over_each(column: list[float], expected: list[float] | None, arrays: bool) -> None:
    given_ = column_of(list(column), arrays)
    told = best_over(given_)
    assert (None if told is None else list(told)) == expected
    assert str(list(map(float, given_))) == str(column), "the argument is not changed"
