from collections.abc import Sequence
from typing import Any

import pytest

from pointsman.routing.queue import PriorityHoldbackPolicy, SoftReflectiveCeilingPolicy, StaticUsageLimitPolicy


@pytest.mark.parametrize("saturation", [0.0, 0.9, 5.0])
def test_static(saturation: float) -> None:
    assert StaticUsageLimitPolicy().ceilings(saturation, [1, 0]) == [1.0, 1.0]
    assert StaticUsageLimitPolicy(threshold=0.7).ceilings(saturation, [1, 0, -1]) == [0.7] * 3


@pytest.mark.parametrize(
    ("parameters", "priorities", "expected"),
    [
        ({"min_ceiling": 0.5}, [0], [1.0]),
        ({"min_ceiling": 0.5}, [1, 0], [1.0, 0.5]),
        ({"min_ceiling": 0.5}, [9, 1, 0], [1.0, 0.75, 0.5]),
        ({"min_ceiling": 0.2, "max_ceiling": 0.8}, [3, 2, 1, 0], [0.8, 0.6, 0.4, 0.2]),
        ({"min_ceiling": 0.0, "domain": "value"}, [10, 5, 0], [1.0, 0.5, 0.0]),
        ({"min_ceiling": 0.5, "domain": "value"}, [10, 9, -10], [1.0, 0.975, 0.5]),
        ({"min_ceiling": 0.5, "domain": "value"}, [4, 4], [1.0, 1.0]),
        ({"min_ceiling": 0.5, "max_ceiling": 0.9, "domain": "value"}, [7], [0.9]),
    ],
)
def test_holdback(parameters: dict[str, Any], priorities: Sequence[int], expected: Sequence[float]) -> None:
    assert PriorityHoldbackPolicy(**parameters).ceilings(0.3, priorities) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"min_ceiling": -0.1}, "minCeiling is -0.1"),
        ({"min_ceiling": 1.0}, "minCeiling is 1; it must be at least 0 and below 1"),
        ({"min_ceiling": 0.5, "max_ceiling": 0.5}, "below maxCeiling, which is 0.5"),
        ({"min_ceiling": 0.5, "shape": "steep"}, "shape"),
        ({"min_ceiling": 0.5, "domain": "name"}, "domain"),
    ],
)
def test_holdback_parameters(parameters: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        PriorityHoldbackPolicy(**parameters)


def opened(saturation: float, calls: int, bands: int = 2) -> list[Sequence[float]]:
    policy = SoftReflectiveCeilingPolicy()
    return [policy.ceilings(saturation, range(bands, 0, -1)) for _ in range(calls)]


@pytest.mark.parametrize(
    ("saturation", "ceilings_of_the_lower_band"),
    [
        (0.0, [1.0, 1.0, 1.0]),
        (0.49, [1.0, 1.0, 1.0]),
        (0.5, [1.0, 1.0, 1.0]),  # every 1st call
        (0.75, [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]),  # every 3rd
        (0.6, [1.0, 1.0, 1.0]),  # 1.4999 rounds to every 1st
        (0.65, [0.0, 1.0, 0.0, 1.0]),  # 1.86 to every 2nd
        (0.8, [0.0, 0.0, 0.0, 1.0]),
        (1.0, [0.0, 0.0, 0.0]),
        (3.0, [0.0, 0.0, 0.0]),
    ],
)
def test_soft_reflective(saturation: float, ceilings_of_the_lower_band: list[float]) -> None:
    calls = opened(saturation, len(ceilings_of_the_lower_band))
    assert [ceilings[1] for ceilings in calls] == ceilings_of_the_lower_band
    assert all(ceilings[0] == 1.0 for ceilings in calls)


def test_soft_reflective_spares_the_middle_longer() -> None:
    # 0.65 < 1 - 0.65 * 1/2, so the middle band is open; 0.65 >= 1 - 0.65, so the last one is reflected
    assert opened(0.65, 2, bands=3) == [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]


def test_soft_reflective_counts_only_calls_between_half_full_and_full() -> None:
    policy = SoftReflectiveCeilingPolicy()
    lower = [policy.ceilings(saturation, [1, 0])[1] for saturation in (0.75, 0.2, 1.5, 0.75, 0.2, 0.75)]
    assert lower == [0.0, 1.0, 0.0, 0.0, 1.0, 1.0]


def test_soft_reflective_never_holds_back_a_single_band() -> None:
    assert opened(7.0, 2, bands=1) == [[1.0], [1.0]]
