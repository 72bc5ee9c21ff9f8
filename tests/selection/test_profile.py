"""One profile run: filters, scorers, picker, and the reasons of a failure."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from pointsman.errors import ConfigError, PluginError
from pointsman.reasons import Reason
from pointsman.render.text import trace_table
from pointsman.selection import (
    Cycle,
    MaxScorePicker,
    Profile,
    ProfileFailure,
    ProfileResult,
    Ranked,
    Rejected,
    Roster,
    Trace,
)


class Without:
    """Rejects the named ones."""

    def __init__(self, *names: str, reason: str = "unwanted") -> None:
        self.names, self.reason = names, reason

    def rejections(self, cycle: Cycle[Any], candidates: Roster[str]) -> Iterable[tuple[str, str]]:
        return ((name, self.reason) for name in candidates if name in self.names)


class Scores:
    """Gives fixed scores by name."""

    def __init__(self, **scores: float) -> None:
        self.by_name = scores

    def scores(self, cycle: Cycle[Any], candidates: Roster[str]) -> Sequence[float]:
        return [self.by_name.get(name, 0.0) for name in candidates]


class Both(Without, Scores):
    """A plugin with two roles."""

    def __init__(self) -> None:
        Without.__init__(self, "a")
        Scores.__init__(self, b=1.0)


def run(
    profile: Profile[str], *names: str, trace: Trace | None = None, arrays: bool = False
) -> ProfileResult[str] | ProfileFailure[str]:
    return profile.run(Cycle("r", trace=trace), Roster(list(names), arrays=arrays))


@pytest.mark.parametrize("arrays", [False, True])
def test_weights_belong_to_the_profile_and_totals_are_not_divided(arrays: bool) -> None:
    profile = Profile[str]("p", (Scores(a=0.5, b=1.0), 2.0), (Scores(a=1.0), 3.0), MaxScorePicker())
    result = run(profile, "a", "b", arrays=arrays)
    assert isinstance(result, ProfileResult)
    assert result.targets[0] == "a"
    assert [(scored.candidate, scored.score) for scored in result.ranked] == [("a", 4.0), ("b", 2.0)]


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize(
    ("given", "counted"),
    [
        ({"a": 7.0, "b": 0.5}, [1.0, 0.5]),
        ({"a": -1.0, "b": 0.5}, [0.0, 0.5]),
        ({"a": 0.5, "b": float("nan")}, [0.5, 0.0]),
    ],
)
def test_scores_outside_the_bounds_are_clamped_and_recorded(
    given: dict[str, float], counted: list[float], arrays: bool
) -> None:
    trace = Trace()
    result = run(Profile("p", Scores(**given), MaxScorePicker()), "a", "b", trace=trace, arrays=arrays)
    assert isinstance(result, ProfileResult)
    assert list(result.ranked.totals) == counted
    assert trace.as_dict()["profiles"][0]["clamped"] == {"scores": 1}
    assert "1 scores outside [0, 1] were clamped" in trace_table(trace.as_dict())


def test_without_scorers_all_are_equal_and_without_filters_all_pass() -> None:
    result = run(Profile("p", MaxScorePicker(max_num_of_endpoints=5)), "a", "b")
    assert isinstance(result, ProfileResult)
    assert sorted(result.targets) == ["a", "b"]


def test_a_plugin_has_every_role_whose_method_it_has() -> None:
    profile = Profile[str]("p", Both(), MaxScorePicker())
    result = run(profile, "a", "b", "c")
    assert isinstance(result, ProfileResult)
    assert [scored.candidate for scored in result.ranked] == ["b", "c"]


@pytest.mark.parametrize("pickers", [[], [MaxScorePicker(), MaxScorePicker()]])
def test_exactly_one_picker_is_checked_when_the_profile_is_built(pickers: list[MaxScorePicker]) -> None:
    with pytest.raises(ConfigError, match=r'profile "p" needs exactly one picker, found: (none|max-score)'):
        Profile[str]("p", Without("a"), *pickers)


def test_an_object_without_a_role_is_an_error() -> None:
    with pytest.raises(ConfigError, match="neither a filter, a scorer nor a picker"):
        Profile[str]("p", object(), MaxScorePicker())


@pytest.mark.parametrize("arrays", [False, True])
def test_a_failure_says_how_many_each_filter_rejected_and_why(arrays: bool) -> None:
    profile = Profile[str]("p", Without("a", "b", reason="full: 3 of 3"), Without("c"), MaxScorePicker())
    failure = run(profile, "a", "b", "c", arrays=arrays)
    assert isinstance(failure, ProfileFailure)
    assert [(name, len(rejected)) for name, rejected in failure.stages] == [("without", 2), ("without", 1)]
    assert [(candidate, name, str(reason)) for candidate, name, reason in failure.reasons()] == [
        ("a", "without", "full: 3 of 3"),
        ("b", "without", "full: 3 of 3"),
        ("c", "without", "unwanted"),
    ]
    assert str(failure) == "3 candidates: 3 without (full: 3 of 3, ...)"


def test_an_empty_roster_is_a_failure() -> None:
    failure = run(Profile("p", Without("a"), MaxScorePicker()))
    assert isinstance(failure, ProfileFailure)
    assert str(failure) == "there are no candidates"


def test_reasons_are_made_when_read_from_facts_copied_before() -> None:
    load = [3.0, 1.0]
    rejected = Rejected(Roster(["a", "b"]), [0], "full", load=load, limit=3)
    load[0] = 99.0
    assert list(rejected) == [("a", Reason("full", {"load": 3.0, "limit": 3}))]


class PicksNone:
    def pick(self, cycle: Cycle[Any], ranked: Ranked[str]) -> Sequence[str]:
        return []


class ScoresTooFew:
    def scores(self, cycle: Cycle[Any], candidates: Roster[str]) -> Sequence[float]:
        return [1.0]


class RejectsAStranger:
    def rejections(self, cycle: Cycle[Any], candidates: Roster[str]) -> Iterable[tuple[str, str]]:
        return [("zorro", "masked")]


class Raises:
    def scores(self, cycle: Cycle[Any], candidates: Roster[str]) -> Sequence[float]:
        raise KeyError("metrics")


@pytest.mark.parametrize(
    ("plugins", "complaint"),
    [
        ([PicksNone()], "picks-none.* at least one"),
        ([ScoresTooFew(), MaxScorePicker()], "scores-too-few.* gave 1 scores for 2 candidates"),
        ([RejectsAStranger(), MaxScorePicker()], "rejects-a-stranger.* rejected zorro"),
        ([Raises(), MaxScorePicker()], 'plugin "raises" raised KeyError'),
    ],
)
def test_a_broken_contract_names_the_plugin_and_the_promise(plugins: list[object], complaint: str) -> None:
    with pytest.raises(PluginError, match=complaint):
        run(Profile("p", *plugins), "a", "b")


class NotDraining:
    """A user's filter: its text names the candidate."""

    def rejections(self, cycle: Cycle[Any], candidates: Roster[str]) -> Iterable[tuple[str, str]]:
        return [(candidate, f"{candidate} is draining") for candidate in candidates]


def test_the_texts_of_a_users_filter_are_one_reason() -> None:
    failure = run(Profile[str]("p", NotDraining(), MaxScorePicker()), "10.0.0.7:8000", "10.0.0.8:8000", "10.0.0.9:8000")
    assert isinstance(failure, ProfileFailure)
    assert str(failure) == "3 candidates: 3 not-draining (10.0.0.7:8000 is draining, ...)"
    [group] = failure.summary()["rejected"]
    assert (group.code, group.count, group.candidate) == ("not-draining", 3, "10.0.0.7:8000")
    _, name, reason = failure.reasons()[1]
    assert (name, reason) == ("not-draining", Reason("not-draining", {"text": "10.0.0.8:8000 is draining"}))
    assert str(reason) == "10.0.0.8:8000 is draining"


class TwoKinds:
    """A user's filter with reasons of its own, one under a code that the kernel's plugins use with other facts."""

    def rejections(self, cycle: Cycle[Any], candidates: Roster[str]) -> Iterable[tuple[str, Reason]]:
        return [
            (candidates[0], Reason("in-maintenance", {"until": "noon", "text": "in maintenance until noon"})),
            (candidates[1], Reason("in-maintenance", {"until": "one", "text": "in maintenance until one"})),
            (candidates[2], Reason("full", {"seats": 4})),
        ]


def test_a_users_filter_may_give_codes_and_facts() -> None:
    failure = run(Profile[str]("p", TwoKinds(), MaxScorePicker()), "a", "b", "c")
    assert isinstance(failure, ProfileFailure)
    assert str(failure) == "3 candidates: 2 in-maintenance (in maintenance until noon, ...), 1 full"
    assert [str(reason) for _, _, reason in failure.reasons()][2] == "full: seats 4"
    assert failure.all_of({"in-maintenance", "full"})
    assert not failure.all_of({"full"})
