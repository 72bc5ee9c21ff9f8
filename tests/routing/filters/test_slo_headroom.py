import pytest

from pointsman.routing.filters import SloHeadroomTierFilter
from tests.routing.fleets import Candidate, both_lengths, kept, predicted, reasons, scene

NEVER, ALWAYS = SloHeadroomTierFilter(0.0), SloHeadroomTierFilter(1.0)


@both_lengths
@pytest.mark.parametrize(
    ("plugin", "candidates", "expected"),
    [
        (NEVER, [predicted(1, 1), predicted(0, 0), predicted(-1, 1), predicted(1, -1)], [0, 1]),
        (ALWAYS, [predicted(1, 1), predicted(0, 0), predicted(-1, 1), predicted(1, -1)], [2, 3]),
        (NEVER, [predicted(1, 1), Candidate()], [0]),
        (ALWAYS, [predicted(1, 1), Candidate()], [1]),
        (NEVER, [predicted(-1, 1), Candidate()], [0, 1]),
        (ALWAYS, [predicted(1, 1), predicted(2, 2)], [0, 1]),
        (NEVER, [Candidate(), Candidate()], [0, 1]),
        (NEVER, [predicted(-1, -1)], [0]),
        (NEVER, [], []),
    ],
)
def test_keeps_one_tier(
    plugin: SloHeadroomTierFilter, candidates: list[Candidate], expected: list[int], long: bool
) -> None:
    assert kept(plugin, *scene(candidates, long=long)) == expected


def test_explores_with_the_given_probability() -> None:
    candidates, plugin = [predicted(1, 1), predicted(-1, 1)], SloHeadroomTierFilter(0.25)
    explored = sum(kept(plugin, *scene(candidates, seed=seed)) == [1] for seed in range(400))
    assert 60 < explored < 140


def test_says_why() -> None:
    candidates = [predicted(1, 1), predicted(-20, 1.5), Candidate()]
    assert reasons(NEVER, *scene(candidates)) == [
        "may be late: headroom -20 ms to the first token, 1.5 ms per token",
        "may be late: headroom not predicted to the first token, not predicted per token",
    ]
    assert reasons(ALWAYS, *scene(candidates)) == ["exploring endpoints that may be late"]


@pytest.mark.parametrize("epsilon", [-0.01, 1.01])
def test_bad_parameters(epsilon: float) -> None:
    with pytest.raises(ValueError, match=f"epsilonExploreNeg is {epsilon}; it must be from 0 to 1"):
        SloHeadroomTierFilter(epsilon)
