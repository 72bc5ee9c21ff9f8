from collections.abc import Sequence
from typing import Any

import pytest

from pointsman.routing.endpoints import EndpointTable, Metrics
from pointsman.routing.plugins import Endpoints
from pointsman.routing.queue import ConcurrencyDetector, PoolSaturation, UtilizationDetector
from pointsman.routing.queue.saturation import LegacyAdmission
from pointsman.selection import Cycle, Filter
from pointsman.types import RequestMetadata
from tests.routing.fleets import Candidate, both_lengths, fleet_of, kept, labelled, reasons, scene, waiting

ROLE = "llm-d.ai/role"


def load(queue: float = 0.0, kv: float = 0.0) -> Candidate:
    return Candidate(Metrics(waiting_queue_size=queue, kv_cache_usage=kv))


NEVER = Candidate()


@both_lengths
@pytest.mark.parametrize(
    ("parameters", "candidates", "now", "saturation"),
    [
        ({}, [], 0.0, 1.0),
        ({}, [load()], 0.0, 0.0),
        ({}, [load(queue=5)], 0.0, 1.0),
        ({}, [load(queue=20)], 0.0, 4.0),  # not clamped
        ({}, [load(kv=0.8)], 0.0, 1.0),
        ({}, [load(kv=1.0)], 0.0, 1.25),
        ({}, [load(queue=1, kv=0.4)], 0.0, 0.5),
        ({}, [load(queue=4, kv=0.4)], 0.0, 0.8),
        ({}, [load(queue=5), load()], 0.0, 0.5),
        ({}, [load(), NEVER], 0.0, 0.5),
        ({}, [load()], 0.2, 0.0),
        ({}, [load()], 0.21, 1.0),
        ({}, [load(queue=20)], 0.21, 1.0),  # stale measurements count as full, not more
        ({"queue_depth_threshold": 49}, [load(queue=49)], 0.0, 1.0),
        ({"kv_cache_util_threshold": 0.5}, [load(kv=0.5)], 0.0, 1.0),
        ({"metrics_staleness_threshold": 3.0}, [load()], 3.0, 0.0),
        ({"headroom": 5.0}, [load(queue=5)], 0.0, 1.0),  # for the filter only
    ],
)
def test_utilization(
    parameters: dict[str, float], candidates: Sequence[Candidate], now: float, saturation: float, long: bool
) -> None:
    _, roster = scene(candidates, long=long)
    found = UtilizationDetector(**parameters).saturation(roster, now)
    assert found == pytest.approx(saturation, abs=1e-12)
    assert (found >= 1.0) is (saturation >= 1.0)  # exactly 1.0


@both_lengths
def test_measurements_of_an_idle_engine_hold_until_the_next_is_due_or_a_request_is_sent(long: bool) -> None:
    fleet = fleet_of([load()] * 100 if long else [load(), load()])
    detector, roster = UtilizationDetector(metrics_staleness_threshold=3.0), fleet.roster
    rested = list(roster)
    for endpoint in rested:
        fleet.load.rest(endpoint, until=10.0)

    def stale(now: float) -> int:
        return round(detector.saturation(roster, now) * len(roster))

    assert [stale(now) for now in (0.0, 9.0, 13.0)] == [0, 0, 0]
    assert stale(13.1) == len(roster), "the next measurement is overdue"
    fleet.load.reserve(rested[0], 10.0)
    assert fleet.load.wake(5.0) == rested[:1]
    assert fleet.load.wake(5.0) == []
    assert [stale(now) for now in (5.0, 8.0, 8.1)] == [0, 0, 1], "as old as the request, not as the measurement"
    fleet.measure(str(rested[0]), Metrics(running_requests_size=1.0), 8.2)
    assert stale(9.0) == 0
    fleet.load.rest(rested[0], until=20.0)
    assert not rested[0].rests, "a request is on it"
    [(rejected, _)] = detector.rejections(Cycle(RequestMetadata("r"), 12.0), roster)
    assert rejected is rested[0]


@both_lengths
def test_resting_does_not_make_up_for_a_measurement_that_never_was(long: bool) -> None:
    fleet = fleet_of([NEVER] * 100 if long else [NEVER])
    for endpoint in fleet.roster:
        fleet.load.rest(endpoint, until=None)
    assert UtilizationDetector().saturation(fleet.roster, 0.0) == 1.0


@both_lengths
def test_requests_sent_since_the_last_measurement_count_as_waiting(long: bool) -> None:
    fleet = fleet_of([load(queue=1)] * 100 if long else [load(queue=1)])
    detector = UtilizationDetector()
    for endpoint in fleet.roster:
        fleet.load.sent_from_backlog(endpoint)
        fleet.load.sent_from_backlog(endpoint)
    assert detector.saturation(fleet.roster, 0.0) == pytest.approx(0.6)
    for endpoint in fleet.roster:
        fleet.measure(str(endpoint), Metrics(waiting_queue_size=1.0), now=0.1)
    assert detector.saturation(fleet.roster, 0.1) == pytest.approx(0.2)


@both_lengths
@pytest.mark.parametrize(
    ("parameters", "candidates", "now", "left"),
    [
        ({}, [load(queue=4), load(queue=5), load(kv=0.79), load(kv=0.8)], 0.0, [0, 2]),
        ({"headroom": 0.2}, [load(queue=5), load(queue=6), load(kv=0.9), load(kv=0.97)], 0.0, [0, 2]),
        ({}, [load(), NEVER], 0.0, [0]),
        ({}, [load(queue=9), load(queue=8)], 0.0, [0, 1]),  # it would reject all: it rejects none
        ({}, [load(), load()], 0.3, [0, 1]),  # also if all measurements are stale
        ({}, [load(queue=9, kv=0.9)], 0.0, [0]),
    ],
)
def test_utilization_as_a_filter(
    parameters: dict[str, float], candidates: Sequence[Candidate], now: float, left: list[int], long: bool
) -> None:
    assert kept(UtilizationDetector(**parameters), *scene(candidates, long=long, now=now)) == left


def test_a_utilization_filter_gives_its_reasons() -> None:
    cycle, roster = scene([load(queue=7, kv=0.5), load()], now=0.1)
    assert reasons(UtilizationDetector(), cycle, roster) == [
        "saturated or not measured lately: 7 waiting (must be below 5), KV cache 50% full (below 80%), "
        "measured 0.1 s ago (at most 0.2)"
    ]


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"queue_depth_threshold": 0}, "queueDepthThreshold is 0; it must be above 0"),
        ({"kv_cache_util_threshold": 0.0}, "kvCacheUtilThreshold is 0; it must be above 0"),
        ({"kv_cache_util_threshold": 1.01}, "kvCacheUtilThreshold is 1.01; it must be at most 1"),
        ({"metrics_staleness_threshold": 0.0}, "metricsStalenessThreshold is 0; it must be above 0"),
        ({"headroom": -0.1}, "headroom is -0.1"),
    ],
)
def test_utilization_parameters(parameters: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        UtilizationDetector(**parameters)


def flying(requests: int, tokens: float = 0.0) -> Candidate:
    return Candidate(requests=requests, tokens=tokens)


BOTH = {"concurrency_mode": "hybrid", "max_concurrency": 10, "max_token_concurrency": 1000}


@both_lengths
@pytest.mark.parametrize(
    ("parameters", "candidates", "saturation"),
    [
        ({}, [], 1.0),
        ({}, [flying(50)], 0.5),
        ({}, [flying(100), flying(0)], 0.5),
        ({}, [flying(300)], 3.0),
        ({"max_concurrency": 3}, [flying(2), flying(4), flying(3)], 1.0),
        ({"concurrency_mode": "tokens"}, [flying(1, 500_000.0)], 0.5),
        ({"concurrency_mode": "tokens", "max_token_concurrency": 100}, [flying(9, 50.0), flying(9)], 0.25),
        (BOTH, [flying(5, 100.0), flying(1, 900.0)], 0.7),
        (BOTH, [flying(10), flying(1, 1000.0)], 1.0),
    ],
)
def test_concurrency(
    parameters: dict[str, Any], candidates: Sequence[Candidate], saturation: float, long: bool
) -> None:
    _, roster = scene(candidates, long=long)
    assert ConcurrencyDetector(**parameters).saturation(roster, 0.0) == pytest.approx(saturation)


@both_lengths
@pytest.mark.parametrize(
    ("parameters", "candidates", "left"),
    [
        ({"max_concurrency": 3}, [flying(2), flying(3), flying(4)], [0]),
        ({"max_concurrency": 3, "headroom": 0.5}, [flying(3), flying(4)], [0]),  # trunc(4.5) = 4
        ({"max_concurrency": 3}, [flying(3), flying(4)], []),  # all are rejected
        ({"max_token_concurrency": 10, "concurrency_mode": "tokens"}, [flying(1, 9.0), flying(1, 10.0)], [0]),
        (BOTH, [flying(9, 999.0), flying(10, 0.0), flying(1, 1000.0)], [0]),
    ],
)
def test_concurrency_as_a_filter(
    parameters: dict[str, Any], candidates: Sequence[Candidate], left: list[int], long: bool
) -> None:
    assert kept(ConcurrencyDetector(**parameters), *scene(candidates, long=long)) == left


def test_a_concurrency_filter_gives_its_reasons() -> None:
    detector = ConcurrencyDetector(10, 1000, concurrency_mode="hybrid")
    assert reasons(detector, *scene([flying(10, 70.0)])) == [
        "full: 10 of 10 requests in flight, 70 of 1000 tokens in flight"
    ]


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"max_concurrency": 0}, "maxConcurrency is 0"),
        ({"max_token_concurrency": -5}, "maxTokenConcurrency is -5"),
        ({"headroom": -1.0}, "headroom is -1"),
        ({"concurrency_mode": "both"}, 'concurrencyMode is "both"; it must be requests, tokens or hybrid'),
    ],
)
def test_concurrency_parameters(parameters: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ConcurrencyDetector(**parameters)


@pytest.mark.parametrize("detector", [UtilizationDetector(), ConcurrencyDetector()])
def test_a_detector_is_a_filter_too(detector: object) -> None:
    assert isinstance(detector, Filter)


class Members:
    """A detector whose saturation is the number of members, and that records its calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def saturation(self, endpoints: Endpoints, now: float) -> float:
        self.calls.append([str(endpoint) for endpoint in endpoints])
        return float(len(endpoints)) if len(endpoints) else 1.0


def role(name: str) -> Candidate:
    return labelled(**{ROLE: name})


@pytest.mark.parametrize(
    ("candidates", "calls", "saturation"),
    [
        ([], [[]], 1.0),
        ([NEVER, NEVER], [["0", "1"]], 2.0),  # no roles: no sub-pools
        ([role("prefill"), role("decode"), NEVER], [["0"], ["1", "2"]], 2.0),
        ([role("prefill-decode"), role("both"), role("encode-prefill-decode")], [["0", "1", "2"]] * 2, 3.0),
        ([role("encode-prefill"), role("encode"), role("decode")], [["0"], ["2"]], 1.0),
        ([role("decode"), role("decode")], [["0", "1"]], 2.0),  # a sub-pool without members does not count
        ([role("encode")], [[], []], 1.0),
    ],
)
def test_the_fuller_sub_pool_counts(candidates: Sequence[Candidate], calls: list[list[str]], saturation: float) -> None:
    detector = Members()
    _, roster = scene(candidates)
    assert PoolSaturation(detector).of(roster, 0.0) == saturation
    assert detector.calls == calls


def test_sub_pools_follow_the_members_and_their_metrics() -> None:
    fleet: EndpointTable = fleet_of([role("prefill"), role("decode")])
    pool = PoolSaturation(ConcurrencyDetector(max_concurrency=2))
    prefill, decode = fleet.roster
    fleet.load.reserve(prefill, 0.0)
    assert pool.of(fleet.roster, 0.0) == 0.5
    fleet.load.reserve(decode, 0.0)
    fleet.load.reserve(decode, 0.0)
    assert pool.of(fleet.roster, 0.0) == 1.0
    fleet.remove("1")
    assert pool.of(fleet.roster, 0.0) == 0.5


@pytest.mark.parametrize(
    ("priority", "queue", "is_refused"), [(-1, 4, False), (-1, 5, True), (-5, 9, True), (0, 9, False), (2, 9, False)]
)
def test_without_flow_control_only_negative_priorities_are_shed(priority: int, queue: float, is_refused: bool) -> None:
    _, roster = scene([waiting(queue)])
    cycle = Cycle(RequestMetadata("r", priority=priority))
    assert (LegacyAdmission(UtilizationDetector()).denial(cycle, roster) is not None) is is_refused


def test_an_empty_pool_sheds_too() -> None:
    roster: Endpoints = fleet_of([]).roster
    cycle = Cycle(RequestMetadata("r", priority=-1))
    assert LegacyAdmission(UtilizationDetector()).denial(cycle, roster) is not None
