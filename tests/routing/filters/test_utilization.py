import pytest

from pointsman.routing.endpoints import Metrics
from pointsman.routing.filters import UtilizationFilter
from pointsman.routing.filters.utilization import Condition
from tests.routing.fleets import Candidate, both_lengths, kept, kv, reasons, running, scene, waiting

QUEUE_2 = Condition("waiting-queue", 2)
KV_HALF = Condition("kv-cache-utilization", 0.5)


def both(queue: float, usage: float) -> Candidate:
    return Candidate(Metrics(waiting_queue_size=queue, kv_cache_usage=usage))


@both_lengths
@pytest.mark.parametrize(
    ("conditions", "candidates", "expected"),
    [
        ([QUEUE_2], [waiting(1), waiting(2), waiting(3)], [0, 1]),
        ([KV_HALF], [kv(0.5), kv(0.51)], [0]),
        ([Condition("running-requests", 0)], [running(0), running(1)], [0]),
        ([Condition("active-requests", 1)], [Candidate(requests=1), Candidate(requests=2)], [0]),
        ([QUEUE_2, KV_HALF], [both(2, 0.5), both(3, 0.1), both(0, 0.9), both(9, 0.9)], [0]),
        ([QUEUE_2], [Candidate(), waiting(3)], [0]),
        ([QUEUE_2], [waiting(3), waiting(4)], []),
    ],
)
def test_keeps_endpoints_within_all_limits(
    conditions: list[Condition], candidates: list[Candidate], expected: list[int], long: bool
) -> None:
    cycle, roster = scene(candidates, long=long)
    assert kept(UtilizationFilter(conditions), cycle, roster) == expected
    fallback = UtilizationFilter(conditions, fallback_on_empty=True)
    assert kept(fallback, cycle, roster) == (expected or list(range(len(candidates))))


@both_lengths
def test_says_why(long: bool) -> None:
    cycle, roster = scene([both(3, 0.25), both(0, 0)], long=long)
    assert reasons(UtilizationFilter([QUEUE_2, KV_HALF]), cycle, roster) == [
        "too busy: waiting-queue 3 (at most 2), kv-cache-utilization 0.25 (at most 0.5)"
    ]


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ([], "conditions is empty"),
        ([Condition("waiting-que", 1)], 'metric "waiting-que" is unknown; did you mean "waiting-queue"'),  # type: ignore[arg-type]
        ([Condition("waiting-queue", -1)], "maxValue of waiting-queue is -1; it must be 0 or more"),
        ([Condition("kv-cache-utilization", 1.5)], "maxValue of kv-cache-utilization is 1.5; it must be at most 1"),
    ],
)
def test_bad_parameters(conditions: list[Condition], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UtilizationFilter(conditions)
