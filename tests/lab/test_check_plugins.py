"""Each promise of a plugin is broken once, and found; what keeps them all is let through."""

import random
import re
from collections.abc import Iterable, Sequence
from math import nan
from typing import Any

import pytest

from pointsman.lab.check import check
from pointsman.selection import SchedulingFailure
from tests.lab.findings import found, lines


class Scores:
    """A decent scorer to spoil."""

    def scores(self, cycle: Any, candidates: Sequence[Any]) -> Sequence[Any]:
        return [0.5] * len(candidates)


class TooHigh(Scores):
    def scores(self, cycle: Any, candidates: Sequence[Any]) -> Sequence[Any]:
        return [float(one.instance.gpu_count) for one in candidates]


class NotANumber(Scores):
    def scores(self, cycle: Any, candidates: Sequence[Any]) -> Sequence[Any]:
        return [nan if one.metrics is None else 0.5 for one in candidates]


class Nothing(Scores):
    def scores(self, cycle: Any, candidates: Sequence[Any]) -> Sequence[Any]:
        return [None] * len(candidates)


class Unmeasured(Scores):
    def scores(self, cycle: Any, candidates: Sequence[Any]) -> Sequence[Any]:
        return [1 - one.metrics.kv_cache_usage for one in candidates]


class TooFew(Scores):
    def scores(self, cycle: Any, candidates: Sequence[Any]) -> Sequence[Any]:
        return [0.5] * (len(candidates) - 1)


@pytest.mark.parametrize(
    ("scorer", "what"),
    [
        (TooHigh, "it must be from 0 to 1"),
        (NotANumber, "gave nan to i., which was never measured; it must be from 0 to 1"),
        (Nothing, "gave None to i."),
        (Unmeasured, "raised AttributeError: 'NoneType' object has no attribute 'kv_cache_usage'"),
        (TooFew, "scores for"),
    ],
)
def test_scorers(scorer: type[Scores], what: str) -> None:
    broken = found(scorer, "scorer: gives each candidate 0 to 1")
    assert re.search(what, broken.what)
    assert len(lines(broken)) <= 1, broken.example


class Dice(Scores):
    def scores(self, cycle: Any, candidates: Sequence[Any]) -> Sequence[Any]:
        return [random.random() for _ in candidates]


class OwnDice(Scores):
    def scores(self, cycle: Any, candidates: Sequence[Any]) -> Sequence[Any]:
        return [cycle.rng.random() for _ in candidates]


class Slow(Scores):
    def scores(self, cycle: Any, candidates: Sequence[Any]) -> Sequence[Any]:
        if len(candidates) == 100:
            sum(number * number for number in range(40_000))
        return super().scores(cycle, candidates)


def test_more_of_scorers() -> None:
    assert check(Scores, 10).ok
    assert check(OwnDice, 10).ok
    assert "draw from cycle.rng" in found(Dice, "scorer: repeats with the same seed").what
    assert "ms per decision" in found(Slow, "scorer: takes at most 1 ms", examples=1).what


class Filters:
    """A decent filter to spoil."""

    def rejections(self, cycle: Any, candidates: Sequence[Any]) -> Iterable[Any]:
        return [(one, "too old") for one in candidates if one.metrics is None]


class WithoutReason(Filters):
    def rejections(self, cycle: Any, candidates: Sequence[Any]) -> Iterable[Any]:
        return [(one, " ") for one in candidates]


class WithoutPairs(Filters):
    def rejections(self, cycle: Any, candidates: Sequence[Any]) -> Iterable[Any]:
        return list(candidates)


class Stranger(Filters):
    def rejections(self, cycle: Any, candidates: Sequence[Any]) -> Iterable[Any]:
        return [("stranger", "unknown")]


class Raises(Filters):
    def rejections(self, cycle: Any, candidates: Sequence[Any]) -> Iterable[Any]:
        return [(candidates[0], "the first is the worst")]


@pytest.mark.parametrize(
    ("filtering", "what"),
    [
        (WithoutReason, "away without a reason"),
        (WithoutPairs, "not a pair of a candidate and a reason"),
        (Stranger, "rejections() named 'stranger', which is not a candidate"),
        (Raises, "rejections() raised IndexError"),
    ],
)
def test_filters(filtering: type[Filters], what: str) -> None:
    broken = found(filtering, "filter: names candidates with reasons")
    assert what in broken.what
    assert len(lines(broken)) <= 1


class Picks:
    """A decent picker to spoil."""

    def pick(self, cycle: Any, ranked: Sequence[Any]) -> Sequence[Any]:
        return [ranked[0].candidate]


class PicksNone(Picks):
    def pick(self, cycle: Any, ranked: Sequence[Any]) -> Sequence[Any]:
        return [scored.candidate for scored in ranked if scored.score > 5]


class Scored(Picks):
    def pick(self, cycle: Any, ranked: Sequence[Any]) -> Sequence[Any]:
        return [ranked[0]]


class SameTwice(Picks):
    def pick(self, cycle: Any, ranked: Sequence[Any]) -> Sequence[Any]:
        return [ranked[0].candidate, ranked[0].candidate]


class SecondBest(Picks):
    def pick(self, cycle: Any, ranked: Sequence[Any]) -> Sequence[Any]:
        return [ranked[1].candidate]


@pytest.mark.parametrize(
    ("picker", "what"),
    [
        (PicksNone, "pick() chose none of 1 candidates"),
        (Scored, "which is not a candidate"),
        (SameTwice, "pick() chose a candidate twice"),
        (SecondBest, "pick() raised IndexError"),
    ],
)
def test_pickers(picker: type[Picks], what: str) -> None:
    broken = found(picker, "picker: picks from those it is given")
    assert what in broken.what
    assert len(lines(broken)) == 1


class Handles:
    """Never stops; the others differ in one method."""

    def pick_profiles(self, cycle: Any, profiles: Sequence[str], results: Any) -> Sequence[str]:
        return profiles

    def process_results(self, cycle: Any, results: Any) -> Any:
        return SchedulingFailure("no", {})


class AsksForMore(Handles):
    def pick_profiles(self, cycle: Any, profiles: Sequence[str], results: Any) -> Sequence[str]:
        return () if results else ("imaginary",)


class SaysNothing(Handles):
    def pick_profiles(self, cycle: Any, profiles: Sequence[str], results: Any) -> Sequence[str]:
        return () if results else profiles

    def process_results(self, cycle: Any, results: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("handler", "what"),
    [
        (Handles, "still asks for profiles after 64 rounds"),
        (AsksForMore, 'unknown profile "imaginary"'),
        (SaysNothing, "process_results() returned a NoneType"),
    ],
)
def test_profile_handlers(handler: type[Handles], what: str) -> None:
    broken = found(handler, "profile handler: runs profiles to an end")
    assert what in broken.what
    assert len(lines(broken)) <= 1


def test_valid_plugins_keep_their_promises() -> None:
    for plugin in (Filters, Picks):
        report = check(plugin, 10)
        assert report.ok, str(report)
        assert report.kept


def test_a_plugin_without_promises_is_reported_as_unchecked() -> None:
    class Orders:
        def key(self, item: Any) -> float:
            return 0.0

    report = check(Orders, 5)
    assert (report.kept, report.broken) == ([], [])
    assert "was not checked" in str(report)
