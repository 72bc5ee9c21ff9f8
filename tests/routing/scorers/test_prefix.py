import pytest

from pointsman.routing.scorers import PrefixCacheScorer
from tests.routing.fleets import Candidate, both_lengths, matched, scene, scores


@both_lengths
@pytest.mark.parametrize(
    ("scorer", "candidates", "expected"),
    [
        (PrefixCacheScorer(), [matched(0, 4), matched(1, 4), matched(4, 4)], [0.0, 0.25, 1.0]),
        (PrefixCacheScorer(), [matched(2, 4), matched(1, 2, block_size=32)], [0.5, 0.5]),
        (PrefixCacheScorer(), [matched(0, 0)], [0.0]),
        (PrefixCacheScorer(), [Candidate(), Candidate()], [0.0, 0.0]),
        (PrefixCacheScorer(), [], []),
        # L = 128 * 16 / 8192 = 0.25
        (PrefixCacheScorer(1.0), [matched(128, 256), matched(512, 512), matched(1024, 1024)], [0.0625, 1.0, 1.0]),
        (PrefixCacheScorer(0.5), [matched(128, 256)], [0.5 * 0.0625 + 0.5 * 0.5]),
        (PrefixCacheScorer(0.5, 4096), [matched(128, 256)], [0.5 * 0.25 + 0.5 * 0.5]),
        (PrefixCacheScorer(0.5), [matched(128, 256, block_size=0), matched(1, 2, block_size=-1)], [0.25, 0.25]),
        (PrefixCacheScorer(1.0), [matched(3, 0)], [0.0]),
        (PrefixCacheScorer(0.0, 0), [matched(1, 2)], [0.5]),
    ],
)
def test_scores(scorer: PrefixCacheScorer, candidates: list[Candidate], expected: list[float], long: bool) -> None:
    assert scores(scorer, *scene(candidates, long=long)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (-0.1, 8192, "matchLengthWeight is -0.1; it must be from 0 to 1"),
        (1.1, 8192, "matchLengthWeight is 1.1"),
        (0.5, 0, "matchLengthScaleTokens is 0; it must be above 0"),
        (0.5, -1, "matchLengthScaleTokens is -1"),
    ],
)
def test_bad_parameters(weight: float, scale: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrefixCacheScorer(weight, scale)
