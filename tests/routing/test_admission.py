from typing import Any

import pytest

from pointsman.routing.admission import LatencySloAdmitter, ProbabilisticAdmitter
from pointsman.routing.endpoints import Metrics
from pointsman.routing.plugins import Admitter, LatencyPrediction
from pointsman.types import RequestMetadata
from tests.routing.fleets import Candidate, both_lengths, kv, scene, waiting

LOW = RequestMetadata("r", priority=-1)


def denied(admitter: Admitter, candidates: list[Candidate], request: RequestMetadata, **given: Any) -> bool:
    return admitter.denial(*scene(candidates, request=request, **given)) is not None


@both_lengths
@pytest.mark.parametrize(
    ("admitter", "candidates", "saturation"),
    [
        (ProbabilisticAdmitter(), [waiting(0)], 0.0),
        (ProbabilisticAdmitter(), [waiting(5), kv(0.4)], 0.75),
        (ProbabilisticAdmitter(), [Candidate(Metrics(waiting_queue_size=1, kv_cache_usage=0.8))], 1.0),
        (ProbabilisticAdmitter(), [Candidate(), waiting(15)], 2.0),
        (ProbabilisticAdmitter(queue_depth_threshold=10), [waiting(5)], 0.5),
        (ProbabilisticAdmitter(kv_cache_util_threshold=0.5), [kv(0.25)], 0.5),
    ],
)
def test_saturation(
    admitter: ProbabilisticAdmitter, candidates: list[Candidate], saturation: float, long: bool
) -> None:
    _, roster = scene(candidates, long=long)
    assert admitter.pressure(roster) == pytest.approx(saturation)


@pytest.mark.parametrize(
    ("admitter", "saturation", "odds"),
    [
        (ProbabilisticAdmitter(), 0.0, 0.0),
        (ProbabilisticAdmitter(), 0.2, 0.2**5 * 300),
        (ProbabilisticAdmitter(), 0.5, 1.0),
        (ProbabilisticAdmitter(power=1, k=0.5), 1.0, 0.5),
        (ProbabilisticAdmitter(power=400), 1e6, 1.0),
    ],
)
def test_odds(admitter: ProbabilisticAdmitter, saturation: float, odds: float) -> None:
    assert admitter.odds(saturation) == pytest.approx(odds)


@both_lengths
def test_only_low_priorities_are_shed(long: bool) -> None:
    full, admitter = [waiting(50), waiting(50)], ProbabilisticAdmitter()
    assert denied(admitter, full, LOW, long=long)
    assert not denied(admitter, full, RequestMetadata("r", priority=0), long=long)
    assert not denied(admitter, [waiting(0)], LOW, long=long)
    assert not denied(admitter, [], LOW)


def test_sheds_as_often_as_told() -> None:
    admitter = ProbabilisticAdmitter(power=1, k=0.25)
    assert 60 < sum(denied(admitter, [waiting(5)], LOW, seed=seed) for seed in range(400)) < 140


def test_says_why() -> None:
    cycle, roster = scene([waiting(10)], request=LOW)
    assert str(ProbabilisticAdmitter().denial(cycle, roster)) == (
        "shed by priority -1: saturation is 2.00, so 100% of such requests are denied"
    )


@pytest.mark.parametrize("value", [0.0, -1.0])
@pytest.mark.parametrize(
    ("argument", "parameter"),
    [
        ("queue_depth_threshold", "queueDepthThreshold"),
        ("kv_cache_util_threshold", "kvCacheUtilThreshold"),
        ("power", "power"),
        ("k", "k"),
    ],
)
def test_parameters_must_be_positive(argument: str, parameter: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{parameter} is {value:g}; it must be above 0"):
        ProbabilisticAdmitter(**{argument: value})


def row(ttft_valid: bool | None, tpot_valid: bool = False, running: float = 1, usage: float = 0.5) -> Candidate:
    """Whether a prediction is in time (None: there is none), and how busy the endpoint is."""
    told = None if ttft_valid is None else LatencyPrediction(9, 9, 0, 0, ttft_valid, tpot_valid)
    return Candidate(Metrics(running_requests_size=running, kv_cache_usage=usage), prediction=told)


TTFT = {"x-llm-d-slo-ttft-ms": "200"}
LATE = row(False)


@both_lengths
@pytest.mark.parametrize(
    ("priority", "headers", "candidates", "expected"),
    [
        (-1, TTFT, [LATE, LATE], True),
        (-1, {"x-llm-d-slo-tpot-ms": "20"}, [LATE], True),
        (-1, {"x-slo-ttft-ms": "200"}, [LATE], True),
        (-1, {"x-slo-tpot-ms": "20"}, [LATE], True),
        (-1, {"x-llm-d-slo-ttft-ms": "0", "x-slo-ttft-ms": "200"}, [LATE], False),  # the canonical header wins
        (-1, {"x-llm-d-slo-ttft-ms": "-5"}, [LATE], False),
        (-1, {"x-llm-d-slo-ttft-ms": "soon"}, [LATE], False),
        (-1, {}, [LATE], False),
        (0, TTFT, [LATE], False),
        (-1, TTFT, [row(None)], False),
        (-1, TTFT, [row(None), LATE], True),
        (-1, TTFT, [row(True, True), LATE], False),
        (-1, TTFT, [row(True, False), row(False, True)], True),
        (-1, TTFT, [row(False, running=0), LATE], False),
        (-1, TTFT, [row(None, running=0), LATE], False),
        (-1, TTFT, [row(False, usage=0.019), LATE], False),
        (-1, TTFT, [row(False, usage=0.02), LATE], True),
        (-1, TTFT, [], False),
    ],
)
def test_latency_objectives(
    priority: int, headers: dict[str, str], candidates: list[Candidate], expected: bool, long: bool
) -> None:
    request = RequestMetadata("r", priority=priority, headers=headers)
    assert denied(LatencySloAdmitter(), candidates, request, long=long) is expected
