"""The cycle: producers, the rounds of the handler, and the result."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pointsman.errors import ConfigError, PluginError, UnknownName
from pointsman.reasons import Reason
from pointsman.selection import (
    Cycle,
    FallbackProfileHandler,
    Key,
    MaxScorePicker,
    Profile,
    ProfileFailure,
    ProfileResult,
    Roster,
    Scheduler,
    SchedulingFailure,
    SchedulingResult,
    Trace,
)

Results = Mapping[str, ProfileResult[str] | ProfileFailure[str]]
SEEN: Key[list[str]] = Key("seen")


class Closed:
    def rejections(self, cycle: Cycle[Any], candidates: Roster[str]) -> list[tuple[str, str]]:
        return [(candidate, "not good enough") for candidate in candidates]


class Scripted:
    """Picks the given profiles round by round, and records the results that it saw."""

    def __init__(self, *rounds: Sequence[str]) -> None:
        self.rounds = rounds
        self.seen: list[dict[str, bool]] = []

    def pick_profiles(self, cycle: Cycle[Any], profiles: Sequence[str], results: Results) -> Sequence[str]:
        self.seen.append({name: isinstance(result, ProfileResult) for name, result in results.items()})
        turn = len(self.seen) - 1
        return self.rounds[turn] if turn < len(self.rounds) else ()

    def process_results(self, cycle: Cycle[Any], results: Results) -> SchedulingResult[str] | SchedulingFailure[str]:
        good = {name: result for name, result in results.items() if isinstance(result, ProfileResult)}
        return SchedulingResult(good, next(iter(good)))


def profile(name: str, *plugins: object) -> Profile[str]:
    return Profile(name, *plugins, MaxScorePicker())


def test_the_handler_picks_profiles_until_it_picks_none_and_sees_failures() -> None:
    handler = Scripted(["strict"], ["loose", "other"])
    scheduler = Scheduler([profile("strict", Closed()), profile("loose"), profile("other")], handler)
    result = scheduler.run(Cycle("r"), Roster(["a"]))
    assert handler.seen == [{}, {"strict": False}, {"strict": False, "loose": True, "other": True}]
    assert isinstance(result, SchedulingResult)
    assert (result.primary, result.target) == ("loose", "a")


def test_fallback_runs_profiles_until_one_chooses() -> None:
    scheduler = Scheduler([profile("strict", Closed()), profile("loose"), profile("never")], FallbackProfileHandler())
    trace = Trace()
    result = scheduler.run(Cycle("r", trace=trace), Roster(["a"]))
    assert isinstance(result, SchedulingResult)
    assert result.primary == "loose"
    assert [run.profile for run in trace.profiles] == ["strict", "loose"]


def test_fallback_fails_with_the_last_reason() -> None:
    scheduler = Scheduler([profile("strict", Closed()), profile("loose", Closed())], FallbackProfileHandler())
    failure = scheduler.run(Cycle("r"), Roster(["a"]))
    assert isinstance(failure, SchedulingFailure)
    assert failure.reasons() == [("a", "closed", Reason("closed", {"text": "not good enough"}))]


def test_one_profile_needs_no_handler_and_several_do() -> None:
    assert isinstance(Scheduler([profile("only")]).run(Cycle("r"), Roster(["a"])), SchedulingResult)
    with pytest.raises(ConfigError, match="2 profiles need a profile handler"):
        Scheduler([profile("one"), profile("two")])
    with pytest.raises(ConfigError, match="same name"):
        Scheduler([profile("one"), profile("one")], FallbackProfileHandler())


def test_nothing_run_is_a_failure_value() -> None:
    failure = Scheduler([profile("only")], Scripted()).run(Cycle("r"), Roster(["a"]))
    assert isinstance(failure, SchedulingFailure)
    assert str(failure) == "no profile was run"


def test_a_handler_that_never_stops_or_invents_profiles_is_named() -> None:
    with pytest.raises(PluginError, match='"scripted" still asks for profiles'):
        Scheduler([profile("only")], Scripted(*[["only"]] * 100)).run(Cycle("r"), Roster(["a"]))
    with pytest.raises(UnknownName, match='unknown profile "onyl"; did you mean "only"'):
        Scheduler([profile("only")], Scripted(["onyl"])).run(Cycle("r"), Roster(["a"]))


class Tells:
    def produce(self, cycle: Cycle[Any], candidates: Roster[str]) -> None:
        cycle[SEEN] = list(candidates)


class Stumbles:
    def produce(self, cycle: Cycle[Any], candidates: Roster[str]) -> None:
        raise OSError("index is gone")


def test_producers_prepare_and_their_failure_does_not_stop_the_cycle() -> None:
    scheduler = Scheduler([profile("only")], producers=[Stumbles(), Tells()])
    cycle = Cycle("r", trace=(trace := Trace()))
    assert isinstance(scheduler.run(cycle, Roster(["a", "b"])), SchedulingResult)
    assert cycle[SEEN] == ["a", "b"]
    assert list(map(str, trace.notes)) == ["stumbles failed: OSError: index is gone"]
    assert scheduler.producer_failures == {"stumbles": 1}


def test_cycle_state_has_typed_keys_that_never_collide() -> None:
    cycle = Cycle("r")
    other: Key[int] = Key("seen")
    assert cycle.get(SEEN) is None
    cycle[SEEN] = ["a"]
    assert cycle.get(other) is None
    with pytest.raises(KeyError):
        cycle[other]
