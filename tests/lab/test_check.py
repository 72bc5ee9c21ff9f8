"""Each promise is broken once, and found with a small example; what keeps them all is let through."""

import itertools
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from math import nan
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pointsman.cli.main import main
from pointsman.lab.check import Broken, check, policies
from pointsman.lab.check.situations import crowd
from pointsman.selection import SchedulingFailure
from pointsman.strategies import (
    AdaptiveStrategy,
    CostOptimizedStrategy,
    FifoStrategy,
    PriorityStrategy,
    SchedulingPolicy,
    SloAwareStrategy,
)
from pointsman.types import ExecutionInstance, Priority, RequestMetadata, SchedulingDecision

Requests = list[RequestMetadata]
Instances = list[ExecutionInstance]
Decisions = list[SchedulingDecision]


def found(build: Any, promise: str, examples: int = 60) -> Broken:
    """What was found about this promise; of the others only the cheap ones are tried, to save time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "PROMISES", {name: one for name, one in policies.PROMISES.items() if name == promise})
        report = check(build, examples)
    told = {broken.promise: broken for broken in report.broken}
    assert promise in told, str(report)
    assert promise not in report.kept
    assert not report.ok
    assert told[promise].what in str(report)
    return told[promise]


def lines(broken: Broken) -> list[str]:
    """The rows of the tables of its example: no heads, no rules."""
    rows = [line.split() for line in broken.example.splitlines()]
    return [row[0] for row in rows if row[0].startswith(("r", "i")) and not row[0].endswith("_id")]


# Policies


class FirstFit(SchedulingPolicy):
    """A decent policy to spoil: the least loaded instance that may take the request, arrivals in order."""

    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        load = {one.instance_id: one.current_load for one in instances}
        decisions: dict[str, SchedulingDecision] = {}
        for request in self.prioritize(requests):
            able = [one for one in instances if self.takes(one, request, load[one.instance_id])]
            if able and request.request_id not in decisions:
                best = min(able, key=lambda one: load[one.instance_id])
                load[best.instance_id] += 1
                decisions[request.request_id] = SchedulingDecision(request.request_id, best.instance_id)
        return list(decisions.values())

    def takes(self, one: ExecutionInstance, request: RequestMetadata, load: int) -> bool:
        return (
            one.can_accept_request
            and request.model_name == one.model_name
            and (one.max_concurrency is None or load < one.max_concurrency)
            and self.affordable(one, request)
        )

    def affordable(self, one: ExecutionInstance, request: RequestMetadata) -> bool:
        if request.cost_budget is None:
            return True
        if not one.throughput_tokens_per_sec:
            return False
        tokens = request.input_tokens + (256 if request.max_tokens is None else request.max_tokens)
        cost = self.price_per_gpu_hour * tokens / 3600 * (one.gpu_count / one.throughput_tokens_per_sec)
        return cost <= request.cost_budget


def test_a_decent_policy_of_ones_own_keeps_every_promise() -> None:
    report = check(FirstFit, 25)
    assert report.ok, str(report)
    assert report.roles == ["scheduling policy"]
    assert len(report.kept) == 8
    assert str(report).splitlines()[-1] == "this scheduling policy keeps all its promises"


class Sorts(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        requests.sort(key=lambda request: -request.priority)
        return super().schedule(requests, instances)


def test_sorting_the_list_that_was_given() -> None:
    broken = found(Sorts, "leaves its inputs alone")
    assert broken.what.startswith("the list of requests was changed")
    assert len(lines(broken)) == 2, "two requests, and not even an instance"


class Counts(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        decisions = super().schedule(requests, instances)
        for made in decisions:
            next(one for one in instances if one.instance_id == made.target_instance_id).current_load += 1
        return decisions


def test_counting_load_in_the_instances_that_were_given() -> None:
    broken = found(Counts, "leaves its inputs alone")
    assert "current_load from 0 to 1; count load in a copy" in broken.what
    assert len(lines(broken)) == 2


class Tags(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        for request in requests:
            request.headers["x-seen"] = "yes"
        return super().schedule(requests, instances)


def test_writing_into_the_headers_of_a_request() -> None:
    broken = found(Tags, "leaves its inputs alone")
    assert "a request was changed" in broken.what
    assert "headers" in broken.what
    assert len(lines(broken)) == 1


class AnyModel(FirstFit):
    def takes(self, one: ExecutionInstance, request: RequestMetadata, load: int) -> bool:
        return super().takes(one, msgspec.structs.replace(request, model_name=one.model_name), load)


class AnyLoad(FirstFit):
    def takes(self, one: ExecutionInstance, request: RequestMetadata, load: int) -> bool:
        return super().takes(msgspec.structs.replace(one, max_concurrency=None), request, load)


class AnyHealth(FirstFit):
    def takes(self, one: ExecutionInstance, request: RequestMetadata, load: int) -> bool:
        return super().takes(msgspec.structs.replace(one, can_accept_request=True), request, load)


class AnyPrice(FirstFit):
    def affordable(self, one: ExecutionInstance, request: RequestMetadata) -> bool:
        return True


class Twice(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return super().schedule(requests, instances) * 2


class Ghosts(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return [*super().schedule(requests, instances), SchedulingDecision("ghost", "i0")]


class Nowhere(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return [SchedulingDecision(request.request_id, "nowhere") for request in requests]


@pytest.mark.parametrize(
    ("policy", "what", "rows"),
    [
        (AnyModel, "serving another model", 2),
        (AnyLoad, "may not be chosen: full", 2),
        (AnyHealth, "not accepting requests", 2),
        (AnyPrice, "over budget", 2),
        (Twice, "was not waiting, or was decided before", 2),
        (Ghosts, 'request "ghost" was not waiting', 0),
        (Nowhere, 'there is no instance "nowhere"', 1),
    ],
)
def test_decisions_that_may_not_be_carried_out(policy: type[SchedulingPolicy], what: str, rows: int) -> None:
    broken = found(policy, "decides only what may be done", examples=100)
    assert what in broken.what
    assert len(lines(broken)) == rows, broken.example


class Herds(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        load = {one.instance_id: one.current_load for one in instances}
        decisions: dict[str, SchedulingDecision] = {}
        for request in requests:
            for one in instances:  # the first that may, whatever it has already
                if request.request_id not in decisions and self.takes(one, request, load[one.instance_id]):
                    decisions[request.request_id] = SchedulingDecision(request.request_id, one.instance_id)
                    load[one.instance_id] += 1
        return list(decisions.values())


def test_herding() -> None:
    broken = found(Herds, "spreads a batch over equal instances")
    assert broken.what.startswith("12 of 12 requests went to i0 while 2 of 3 equal instances stayed idle")


class NeverLow(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return super().schedule([request for request in requests if request.priority != Priority.LOW], instances)


def test_starving() -> None:
    broken = found(NeverLow, "starves nobody", examples=150)
    assert "waited through 2 rounds although an idle instance could take it each time" in broken.what
    assert len(lines(broken)) == 2


class NeedsSomebody(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        instances[0].instance_id  # noqa: B018
        return super().schedule(requests, instances)


class NeedsWork(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        max(request.priority for request in requests)
        return super().schedule(requests, instances)


class Silent(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return None  # type: ignore[return-value]


class Pairs(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return [(request.request_id, "i0") for request in requests]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        (NeedsSomebody, "schedule() raised IndexError: list index out of range"),
        (NeedsWork, "schedule() raised ValueError: max()"),
        (Silent, "schedule() returned a NoneType, not a list of SchedulingDecision"),
        (Pairs, "among its decisions"),
    ],
)
def test_what_cannot_answer_is_told_that_and_nothing_else(policy: type[SchedulingPolicy], what: str) -> None:
    broken = found(policy, "answers in every situation")
    assert what in broken.what
    assert len(check(policy, 10).broken) == 1
    assert len(lines(broken)) <= 1


class Loses(FirstFit):
    def prioritize(self, requests: Requests) -> Requests:
        return super().prioritize(requests)[:3]


class Doubles(FirstFit):
    def prioritize(self, requests: Requests) -> Requests:
        return requests * 2


class SortsInPlace(FirstFit):
    def prioritize(self, requests: Requests) -> Requests:
        requests.sort(key=lambda request: -request.priority)
        return requests

    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return super().schedule(list(requests), instances)


class CannotOrder(FirstFit):
    """Only its own queue calls prioritize(), so that nobody notices in schedule()."""

    def prioritize(self, requests: Requests) -> Requests:
        return sorted(requests, key=lambda request: request.arrival_time)  # type: ignore[arg-type,return-value]

    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return FifoStrategy().schedule(requests, instances)


@pytest.mark.parametrize(
    ("policy", "what", "rows"),
    [
        (Loses, "prioritize() lost", 4),
        (Doubles, "and added", 1),
        (SortsInPlace, "prioritize() changed the list it was given", 2),
        (CannotOrder, "prioritize() raised TypeError: '<' not supported", 2),
    ],
)
def test_prioritize(policy: type[SchedulingPolicy], what: str, rows: int) -> None:
    broken = found(policy, "prioritize() keeps every request")
    assert what in broken.what
    assert len(lines(broken)) == rows


class ByChance(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        return super().schedule(requests, random.sample(instances, len(instances)))


class BySystemChance(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        dice = random.SystemRandom()
        return super().schedule(requests, dice.sample(instances, len(instances)))


class ByTurns(FirstFit):
    turns = itertools.count()

    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        start = next(self.turns) % max(1, len(instances))
        return super().schedule(requests, instances[start:] + instances[:start])


@pytest.mark.parametrize("policy", [ByChance, BySystemChance, ByTurns])
def test_decisions_that_cannot_be_repeated(policy: type[SchedulingPolicy]) -> None:
    broken = found(policy, "decides the same with the same seed", examples=200)
    assert broken.what.startswith("two fresh policies with the same seed decided differently")


class OnlyOnce(FirstFit):
    """Its second call finds what the first one left behind."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        again = self.seen & {request.request_id for request in requests}
        if again:
            raise KeyError(min(again))
        self.seen |= {request.request_id for request in requests}
        return super().schedule(requests, instances)


def test_raising_when_it_is_called_again() -> None:
    broken = found(OnlyOnce, "starves nobody")
    assert broken.what == "schedule() raised KeyError when it was called again: 'r0'"


class Burns(FirstFit):
    def schedule(self, requests: Requests, instances: Instances) -> Decisions:
        if len(requests) == 100:  # only where it is timed: the other situations would take as long
            sum(number * number for number in range(4_000_000))
        return super().schedule(requests, instances)


def test_burning_processor_time() -> None:
    broken = found(Burns, "takes at most 1 ms per decision", examples=1)
    assert "ms per decision; a request waits for every one of them" in broken.what


@pytest.mark.parametrize(
    "strategy", [FifoStrategy, PriorityStrategy, SloAwareStrategy, CostOptimizedStrategy, AdaptiveStrategy]
)
def test_the_built_in_strategies_keep_all(strategy: type[SchedulingPolicy]) -> None:
    report = check(strategy, 15)
    assert report.ok, str(report)


def test_the_crowd_that_is_timed_is_equal_idle_and_measured() -> None:
    situation = crowd(100, 50)
    assert (len(situation.requests), len(situation.instances)) == (100, 50)
    assert all(one.current_load == 0 for one in situation.instances)
    assert all(metrics is not None for metrics in situation.metrics)


# Plugins


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
        return [cycle.chance.random() for _ in candidates]


class Slow(Scores):
    def scores(self, cycle: Any, candidates: Sequence[Any]) -> Sequence[Any]:
        if len(candidates) == 100:
            sum(number * number for number in range(40_000))
        return super().scores(cycle, candidates)


def test_more_of_scorers() -> None:
    assert check(Scores, 10).ok
    assert check(OwnDice, 10).ok
    assert "draw from cycle.chance" in found(Dice, "scorer: repeats with the same seed").what
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
        return [("somebody", "I do not know them")]


class Raises(Filters):
    def rejections(self, cycle: Any, candidates: Sequence[Any]) -> Iterable[Any]:
        return [(candidates[0], "the first is the worst")]


@pytest.mark.parametrize(
    ("filtering", "what"),
    [
        (WithoutReason, "away without a reason"),
        (WithoutPairs, "not a pair of a candidate and a reason"),
        (Stranger, "rejections() named 'somebody', who is not a candidate"),
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


class Nobody(Picks):
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
        (Nobody, "pick() chose nobody of 1 candidates"),
        (Scored, "who is not a candidate"),
        (SameTwice, "pick() chose somebody twice"),
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


def test_decent_plugins_keep_their_promises() -> None:
    for plugin in (Filters, Picks):
        report = check(plugin, 10)
        assert report.ok, str(report)
        assert report.kept


def test_a_plugin_of_which_nothing_is_promised_is_not_said_to_keep_it() -> None:
    class Orders:
        def key(self, item: Any) -> float:
            return 0.0

    report = check(Orders, 5)
    assert (report.kept, report.broken) == ([], [])
    assert "was not checked" in str(report)


# The command

OWN = """
from pointsman.strategies import FifoStrategy, SchedulingPolicy
from pointsman.types import SchedulingDecision


class Good(FifoStrategy):
    pass


class Bad(SchedulingPolicy):
    def __init__(self, target: str = "i0") -> None:
        self.target = target

    def schedule(self, requests, instances):
        return [SchedulingDecision(request.request_id, self.target) for request in requests]
"""


@pytest.fixture
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the current directory, as a user has one."""
    (tmp_path / "my_checked_policies.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield "my_checked_policies"
    sys.modules.pop("my_checked_policies", None)


def test_the_command_finds_a_module_in_the_current_directory(
    own_directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "policy", f"{own_directory}:Good", "--examples", "5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "this scheduling policy keeps all its promises"
    bad = ["check", "policy", f"{own_directory}:Bad", "--examples", "20"]
    assert main([*bad, "--parameters", '{"target": "moon"}']) == 1
    out = capsys.readouterr().out
    assert "BROKEN  decides only what may be done" in out
    assert 'there is no instance "moon"' in out


def test_the_command_speaks_json(own_directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "policy", f"{own_directory}:Bad", "--json", "--examples", "20"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["roles"] == ["scheduling policy"]
    assert "answers in every situation" in report["kept"]
    broken = {one["promise"]: one for one in report["broken"]}
    assert broken["decides only what may be done"].keys() == {"promise", "what", "example"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fifa"], 'unknown policy or plugin "fifa"; did you mean "fifo"?'),
        (["no_such_module:Policy"], 'there is no module "no_such_module"'),
        (["pointsman.strategies:Fifi"], 'has no "Fifi"'),
        (["fifo", "--parameters", '{"prise": 3}'], "prise"),
        (["cost-optimized", "--parameters", '{"pricePerGpuHour": -1}'], "pricePerGpuHour must be positive, found -1"),
    ],
)
def test_what_cannot_be_built_is_a_message(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["check", "policy", *args]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--parameters", "{"], "'{' is not JSON"),
        (["--parameters", "limit=3"], "'limit=3' is not JSON"),
        (["--parameters", "[1]"], "'[1]' is not a JSON object"),
        (["--parameters", "3"], "'3' is not a JSON object"),
        (["--examples", "0"], "'0' is not a number from 1 on"),
        (["--examples", "-5"], "'-5' is not a number from 1 on"),
        (["--examples", "many"], "'many' is not a number from 1 on"),
    ],
)
def test_wrong_usage_is_a_message_and_exits_with_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["check", "policy", "fifo", *args])
    assert exited.value.code == 2
    assert message in capsys.readouterr().err
