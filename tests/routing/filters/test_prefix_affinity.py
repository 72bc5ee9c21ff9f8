from typing import Any

import pytest

from pointsman.routing.filters import PrefixCacheAffinityFilter
from pointsman.routing.plugins import LatencyPrediction
from tests.routing.fleets import Candidate, both_lengths, kept, matched, reasons, scene


def row(match: float, tokens: float = 0.0, ttft: float | None = None) -> Candidate:
    """Match out of 10 blocks; what is in flight; what is predicted."""
    told = None if ttft is None else LatencyPrediction(ttft=ttft, tpot=1.0, ttft_headroom=0.0, tpot_headroom=0.0)
    return Candidate(match=match, total=10, tokens=tokens, prediction=told)


BY_PREDICTION: dict[str, Any] = {"ttft_source": "latencyPredictor"}


@both_lengths
@pytest.mark.parametrize(
    ("parameters", "candidates", "expected"),
    [
        ({}, [row(9), row(8), row(7)], [0, 1]),
        ({}, [row(7), row(0)], [0, 1]),
        ({}, [row(9), row(10)], [0, 1]),
        ({}, [row(10)], [0]),
        ({}, [Candidate(), Candidate()], [0, 1]),
        ({}, [matched(0, 0), row(9)], [1]),
        ({"affinity_threshold": 1.0}, [row(9), row(10)], [1]),
        ({"affinity_threshold": 0.0}, [row(9), row(0)], [0, 1]),
        ({"affinity_threshold": -1.0}, [row(9), row(0)], [0, 1]),
        ({"exploration_probability": 1.0}, [row(9), row(0)], [0, 1]),
        # 15928 tokens are a second of prefill.
        ({}, [row(9, 18 * 15928), row(0)], [0]),
        ({}, [row(9, 18.01 * 15928), row(0)], [0, 1]),
        ({}, [row(9, 20 * 15928), row(9, 10 * 15928), row(0)], [0, 1]),
        ({"max_ttft_penalty_ms": 1000}, [row(9, 15928), row(0)], [0]),
        ({"max_ttft_penalty_ms": 1000}, [row(9, 3 * 15928), row(0, 15928)], [0, 1]),
        ({"max_ttft_penalty_ms": 0}, [row(9, 1e9), row(0)], [0]),
        ({"max_ttft_penalty_ms": 1000, "peak_prefill_throughput": 100}, [row(9, 101), row(0)], [0, 1]),
        ({"max_ttft_penalty_ms": 0, "peak_prefill_throughput": 0}, [row(9, 1e9), row(0)], [0]),
        (BY_PREDICTION, [row(9, ttft=18100), row(0, ttft=100)], [0]),
        (BY_PREDICTION, [row(9, ttft=18101), row(0, ttft=100)], [0, 1]),
        (BY_PREDICTION, [row(9), row(0, ttft=100)], [0, 1]),
        (BY_PREDICTION, [row(9, ttft=1e9), row(0)], [0]),
        (BY_PREDICTION, [row(9), row(0)], [0]),
        (BY_PREDICTION | {"peak_prefill_throughput": 0}, [row(9, 1e9, ttft=1), row(0, ttft=1)], [0]),
    ],
)
def test_keeps_endpoints_that_hold_the_prompt(
    parameters: dict[str, Any], candidates: list[Candidate], expected: list[int], long: bool
) -> None:
    assert kept(PrefixCacheAffinityFilter(**parameters), *scene(candidates, long=long)) == expected


def test_explores_with_the_given_probability() -> None:
    plugin = PrefixCacheAffinityFilter(exploration_probability=0.25)
    explored = sum(len(kept(plugin, *scene([row(9), row(0)], seed=seed))) == 2 for seed in range(400))
    assert 60 < explored < 140


def test_says_why() -> None:
    assert reasons(PrefixCacheAffinityFilter(), *scene([row(9), row(3)])) == ["little of the prompt cached: 30%"]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"affinity_threshold": 1.1}, "affinityThreshold is 1.1; it must be at most 1"),
        ({"exploration_probability": -0.1}, "explorationProbability is -0.1; it must be from 0 to 1"),
        ({"exploration_probability": 1.1}, "explorationProbability is 1.1"),
        ({"max_ttft_penalty_ms": -1}, "maxTTFTPenaltyMs is -1; it must be 0 or more"),
        ({"peak_prefill_throughput": -1}, "peakPrefillThroughput is -1; it must be above 0"),
        ({"peak_prefill_throughput": 0}, "peakPrefillThroughput is 0"),
        ({"ttft_source": "guess"}, 'ttftSource is "guess"; it must be prefillThroughput or latencyPredictor'),
    ],
)
def test_bad_parameters(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrefixCacheAffinityFilter(**parameters)
