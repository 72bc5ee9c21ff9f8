import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.routing.endpoints import Metrics
from pointsman.routing.scorers import LatencyScorer
from tests.routing.fleets import Candidate, both_lengths, predicted, scene, scores

MOST = LatencyScorer(headroom_selection_strategy="most")
LEAST = LatencyScorer()


def unpredicted(queue: float, usage: float, match: float | None = None) -> Candidate:
    return Candidate(Metrics(waiting_queue_size=queue, kv_cache_usage=usage), match=match, total=4)


@both_lengths
@pytest.mark.parametrize(
    ("scorer", "candidates", "expected"),
    [
        # Without predictions: a third each for free KV cache, a short queue and the cached share.
        (LEAST, [unpredicted(0, 0.5, 2), unpredicted(4, 0.1, 0)], [0.67, 0.3]),
        (LEAST, [unpredicted(0, 0.2), unpredicted(0, 0.8)], [0.6, 0.4]),
        (LatencyScorer(composite_queue_weight=0, composite_prefix_weight=0), [unpredicted(9, 0.875)], [0.13]),
        (
            LatencyScorer(composite_kv_weight=0, composite_prefix_weight=0),
            [unpredicted(1, 1), unpredicted(4, 1)],
            [0.75, 0],
        ),
        (
            LatencyScorer(composite_kv_weight=0, composite_queue_weight=0, composite_prefix_weight=0),
            [unpredicted(9, 0.25, 4)],
            [0.75],
        ),
        (
            LatencyScorer(composite_kv_weight=2, composite_queue_weight=1, composite_prefix_weight=1),
            [unpredicted(0, 0, 4)],
            [1.0],
        ),
        (LEAST, [Candidate(), Candidate()], [0.67, 0.67]),
        (LEAST, [], []),
        # Some are in time: only those count.
        (LEAST, [predicted(0, 0), predicted(50, 5), predicted(100, 10)], [1.01, 0.51, 0.01]),
        (MOST, [predicted(0, 0), predicted(50, 5), predicted(100, 10)], [0.01, 0.51, 1.01]),
        (LEAST, [predicted(10, 10), predicted(-1, 10), predicted(10, -1)], [0.51, 0.0, 0.0]),
        (LEAST, [predicted(0, 10), predicted(100, 0)], [0.81, 0.20]),  # 1 - 0.8 is a little below 0.2, and truncated
        (MOST, [predicted(0, 10), predicted(100, 0)], [0.21, 0.81]),
        (LatencyScorer(4, 1), [predicted(0, 10), predicted(100, 0)], [0.81, 0.20]),
        (LatencyScorer(0, 0), [predicted(0, 10), predicted(100, 0)], [1.01, 0.01]),
        (LatencyScorer(-1, 0.5), [predicted(0, 10), predicted(100, 0)], [1.01, 0.01]),
        # One objective does not tell them apart: the other decides alone.
        (LEAST, [predicted(50, 0), predicted(50, 5), predicted(50, 10)], [1.01, 0.51, 0.01]),
        (LEAST, [predicted(0, 7), predicted(30, 7), predicted(120, 7 + 1e-10)], [1.01, 0.76, 0.01]),
        (LEAST, [predicted(50, 5), predicted(50, 5)], [0.51, 0.51]),
        # Not predicted is just in time.
        (LEAST, [Candidate(), predicted(100, 10), predicted(-5, 5)], [1.01, 0.01, 0.0]),
        (LEAST, [Candidate(), predicted(-5, 5)], [0.51, 0.0]),
        # All are late: the idle ones, then late by token, by first token, by both; always the least late.
        (LEAST, [predicted(-9, -9, 0), predicted(-5, 5), predicted(5, -5)], [0.51, 0.0, 0.0]),
        (MOST, [predicted(-10, -1, 0), predicted(-20, -2, 0), predicted(5, -5)], [1.01, 0.01, 0.0]),
        (LEAST, [predicted(-5, 5), predicted(5, -5), predicted(-5, -5)], [0.0, 0.51, 0.0]),
        (LEAST, [predicted(-5, 5), predicted(-15, 5), predicted(-5, -5)], [1.01, 0.01, 0.0]),
        (MOST, [predicted(-5, -1), predicted(-15, -2)], [1.01, 0.01]),
    ],
)
def test_scores(scorer: LatencyScorer, candidates: list[Candidate], expected: list[float], long: bool) -> None:
    assert scores(scorer, *scene(candidates, long=long)) == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(-1e4, 1e4), st.floats(-1e3, 1e3), st.integers(0, 2)), min_size=1, max_size=6))
def test_endpoints_in_time_score_above_late_ones(headrooms: list[tuple[float, float, int]]) -> None:
    given_scores = scores(LEAST, *scene([predicted(*headroom) for headroom in headrooms]))
    assert any(score > 0 for score in given_scores)
    in_time = [score for score, (ttft, tpot, _) in zip(given_scores, headrooms, strict=True) if min(ttft, tpot) >= 0]
    late = [score for score, (ttft, tpot, _) in zip(given_scores, headrooms, strict=True) if min(ttft, tpot) < 0]
    if in_time:
        assert min(in_time) > 0
        assert not any(late)


def test_an_unknown_strategy_is_an_error() -> None:
    with pytest.raises(ValueError, match='headroomSelectionStrategy is "some"; it must be least or most'):
        LatencyScorer(headroom_selection_strategy="some")  # type: ignore[arg-type]
