import pytest

from pointsman.routing.scorers import NoHitLruScorer
from pointsman.selection import SchedulingResult
from tests.routing.fleets import Candidate, both_lengths, fleet_of, matched, result_of, scene, scores

COLD = Candidate()


def send(scorer: NoHitLruScorer, rows: list[Candidate], target: int, prefill: int | None = None) -> None:
    """One cycle that scores the rows and goes to one of them."""
    cycle, roster = scene(rows)
    scorer.scores(cycle, roster)
    results = {"default": result_of("default", roster, target)}
    if prefill is not None:
        results["prefill"] = result_of("prefill", roster, prefill)
    scorer.dispatched(cycle, SchedulingResult(results, "default"))


@both_lengths
@pytest.mark.parametrize(
    ("used", "rows", "expected"),
    [
        ([], [COLD], [1.0]),
        ([], [COLD] * 3, [1.0, 0.5, 0.0]),
        ([], [matched(0, 4)] * 3, [1.0, 0.5, 0.0]),
        ([0], [COLD] * 3, [0.0, 1.0, 0.5]),
        ([1, 0], [COLD] * 3, [0.0, 0.5, 1.0]),
        ([2, 0, 1], [COLD] * 3, [0.5, 0.0, 1.0]),
        ([2, 0, 1, 2], [COLD] * 3, [1.0, 0.5, 0.0]),
        ([2, 1, 0], [COLD] * 2, [0.0, 0.0]),  # 2 is no candidate, and keeps its place in the list
        ([0], [COLD], [1.0]),
        ([0], [matched(1, 4), matched(0, 4), matched(0, 4)], [0.5, 0.5, 0.5]),
        ([], [], []),
    ],
)
def test_scores(used: list[int], rows: list[Candidate], expected: list[float], long: bool) -> None:
    scorer = NoHitLruScorer()
    for place in used:
        send(scorer, [COLD] * 3, place)
    assert scores(scorer, *scene(rows, long=long)) == pytest.approx(expected)


def test_cached_prompts_do_not_change_the_order() -> None:
    scorer = NoHitLruScorer()
    send(scorer, [matched(1, 4), matched(0, 4)], 0)
    assert scores(scorer, *scene([COLD] * 2)) == [1.0, 0.0]


def test_a_request_that_was_not_scored_does_not_change_the_order() -> None:
    scorer = NoHitLruScorer()
    cycle, roster = scene([COLD] * 2)
    scorer.dispatched(cycle, SchedulingResult({"default": result_of("default", roster, 0)}, "default"))
    assert scores(scorer, *scene([COLD] * 2)) == [1.0, 0.0]


def test_the_prefill_target_is_used_after_the_primary() -> None:
    scorer = NoHitLruScorer()
    send(scorer, [COLD] * 3, 2, prefill=0)
    assert scores(scorer, *scene([COLD] * 3)) == [0.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, [1, 2 / 3, 0, 1 / 3]),  # only 2 is remembered
        (2, [1, 1 / 3, 0, 2 / 3]),
        (3, [2 / 3, 1 / 3, 0, 1]),
        (0, [2 / 3, 1 / 3, 0, 1]),
        (-4, [2 / 3, 1 / 3, 0, 1]),
    ],
)
def test_the_least_recently_used_are_forgotten(size: int, expected: list[float]) -> None:
    scorer = NoHitLruScorer(size)
    for place in range(3):
        send(scorer, [COLD] * 4, place)
    assert scores(scorer, *scene([COLD] * 4)) == pytest.approx(expected)


def test_a_departed_endpoint_is_forgotten() -> None:
    scorer, fleet = NoHitLruScorer(), fleet_of([COLD] * 2)
    send(scorer, [COLD] * 2, 0)
    scorer.departed(fleet["0"])
    scorer.departed(fleet["1"])
    assert scores(scorer, *scene([COLD] * 2)) == [1.0, 0.0]
