"""The guard: limits hold for every policy, and invalid answers change nothing."""

import json
import re
from collections.abc import Iterable
from math import inf, nan
from typing import Any

import msgspec
import pytest

from pointsman.reasons import Reason
from pointsman.scaling import Guard, ScalingLimits, ScalingRecord, Stay, TooSlow, Wish
from tests.scaling.views import NOON, flat, view

FREE = {"min_replicas": 1, "max_replicas": 20, "down_delay_s": 0.0}


def guard(target: int = 4, **limits: Any) -> Guard:
    return Guard("chat", ScalingLimits(**FREE | {"initial_replicas": target} | limits), "mine")


def run(guard: Guard, answers: Iterable[object], step_s: float = 10.0, **facts: Any) -> list[int]:
    """The targets after each answer, at fixed intervals."""
    targets = []
    for number, answer in enumerate(answers):
        seen = view(now=NOON + number * step_s, target=guard.target, **facts)
        guard.decide(seen, answer)
        targets.append(guard.target)
    return targets


def record(guard: Guard, answer: object, **facts: Any) -> ScalingRecord:
    made = guard.decide(view(**{"target": guard.target} | facts), answer)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("limits", "answers", "targets"),
    [
        ({}, [7, 2, 5], [7, 2, 5]),
        ({"max_replicas": 6}, [7, 100, 2], [6, 6, 2]),
        ({"min_replicas": 3}, [0, 1, 5], [3, 3, 5]),
        # More is wanted for the whole delay, and the least of it is taken.
        ({"up_delay_s": 30.0}, [9, 7, 8, 9, 9, 9], [4, 4, 4, 7, 7, 8]),
        ({"up_delay_s": 30.0}, [9, 9, 3, 9, 9, 9, 9], [4, 4, 3, 3, 3, 3, 9]),
        # The most that was wanted in the delay is kept.
        ({"down_delay_s": 30.0}, [2, 3, 2, 2, 2, 2, 2], [4, 4, 4, 3, 3, 2, 2]),
        ({"down_delay_s": 30.0}, [2, 2, 6, 2, 2, 2, 2], [4, 4, 6, 6, 6, 6, 2]),
        ({"max_step": 2}, [9, 9, 9, 1, 1], [6, 8, 9, 7, 5]),
        ({"max_step": 1}, [9, 9, 1], [5, 6, 5]),
        ({"up_factor": 0.5}, [12, 12, 12, 12, 12], [8, 10, 11, 12, 12]),
        ({"down_factor": 0.25}, [1, 1, 1, 1], [3, 2, 1, 1]),
        ({"up_factor": 0.5, "max_step": 3}, [12, 12], [7, 10]),
        ({"cooldown_s": 25.0}, [5, 6, 7, 8, 2, 2, 1], [5, 5, 5, 8, 8, 8, 1]),
        ({"min_replicas": 0, "idle_timeout_s": 20.0}, [0, 0, 0, 0], [1, 1, 0, 0]),
        # A wanted replica stays without requests.
        ({"min_replicas": 0, "idle_timeout_s": 0.0}, [1, 1], [1, 1]),
    ],
)
def test_targets_after_answers_every_ten_seconds(limits: Any, answers: list[int], targets: list[int]) -> None:
    assert run(guard(**limits), answers) == targets


def test_delays_hold_with_rare_calls() -> None:
    assert run(guard(down_delay_s=90.0), [5, 2, 2, 2, 2], step_s=60.0) == [5, 5, 5, 2, 2]


def test_a_cooldown_survives_a_clock_that_is_set_back() -> None:
    assert run(guard(cooldown_s=1.0), [5, 6, 7, 8], step_s=0.5) == [5, 5, 7, 7]
    assert run(guard(cooldown_s=1.0), [5, 6], step_s=0.0) == [5, 5]
    assert run(guard(cooldown_s=1.0), [5, 6], step_s=-3600.0) == [5, 6]


def test_the_first_replica_has_no_delay_and_no_cooldown() -> None:
    limits = {"min_replicas": 0, "up_delay_s": 60.0, "cooldown_s": 600.0, "idle_timeout_s": 0.0}
    one = guard(1, **limits)
    assert run(one, [0]) == [0]
    made = record(one, 5, now=NOON + 1, queued=9.0, replicas=0)
    assert (made.before, made.after, made.wanted) == (0, 1, 5)
    assert made.bounded == ("5 after 60 s (upDelay)",)


def test_the_last_replica_stays_while_there_are_requests() -> None:
    one = guard(1, min_replicas=0, idle_timeout_s=300.0)
    assert run(one, [0] * 50, ongoing=0.4) == [1] * 50
    assert run(one, [0], idle_s=299.0) == [1]
    assert run(one, [0], idle_s=300.0) == [0]
    at_once = guard(1, min_replicas=0, idle_timeout_s=0.0)
    assert run(at_once, [0], ongoing=1.0) == [1], "no request is cut"
    assert run(at_once, [0]) == [0]


def test_idle_time_begins_with_the_last_request() -> None:
    one = guard(1, min_replicas=0, idle_timeout_s=30.0)
    for seconds, load in enumerate([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]):
        one.decide(view(now=NOON + 10 * seconds, target=one.target, ongoing=load), 0)
        assert one.target == (0 if seconds == 6 else 1), seconds


def test_the_last_replica_goes_by_its_idle_timeout() -> None:
    one = guard(1, min_replicas=0, idle_timeout_s=10.0, down_delay_s=1000.0)
    assert run(one, [1, 0, 0], idle_s=60.0) == [1, 0, 0]


def test_two_idle_replicas_go_one_after_the_other() -> None:
    one = guard(3, min_replicas=0, idle_timeout_s=60.0, down_delay_s=20.0)
    assert run(one, [0] * 8) == [3, 3, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("answer", [0, ValueError("broken"), Stay()])
def test_a_waiting_request_starts_the_first_replica(answer: object) -> None:
    one = guard(0, min_replicas=0)
    made = record(one, answer, queued=1.0, replicas=0)
    assert made.after == 1
    assert "a request waits, and there is no instance" in made.why
    assert made.by == "pointsman", "the policy wants none"


def test_a_policy_may_refuse_the_first_replica() -> None:
    one = guard(0, min_replicas=0)
    record(one, Wish(0, "", "3 of 3: nothing is left"), queued=1.0, replicas=0)
    assert one.target == 0


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (-3, "returned -3; it must be a whole number of replicas from 0 to 1,000,000, or a Wish for one"),
        ("many", "returned 'many'; it must be a whole number"),
        (None, "returned None;"),
        (True, "returned True;"),
        (2.5, "returned 2.5;"),
        (nan, "returned nan;"),
        (inf, "returned inf;"),
        (1_000_001, "returned 1000001;"),
        ([3], "returned [3];"),
        (Wish("3", "why"), "returned a Wish for '3';"),  # type: ignore[arg-type]
        (Wish(-1, "x" * 100, "y" * 100), "returned a Wish for -1;"),
        (ZeroDivisionError("division by zero"), "raised ZeroDivisionError: division by zero"),
        (KeyError(), "raised KeyError"),
        (SystemExit(1), "raised SystemExit: 1"),
        (RuntimeError("no idea:\n  line 2\x1b[31m\n"), "raised RuntimeError: no idea: line 2 [31m"),
        (RuntimeError("\n"), "raised RuntimeError"),
        (TooSlow(1.25), "took 1.25 s; it may take 0.5 s (timeLimit)"),
        (TooSlow(0.5), "took more than 0.5 s (timeLimit)"),
        (TooSlow(0.50004), "took more than 0.5 s (timeLimit)"),
    ],
)
def test_an_invalid_answer_keeps_the_last_target(answer: object, problem: str) -> None:
    one = guard()
    assert run(one, [6]) == [6]
    made = record(one, answer, now=NOON + 10)
    assert (made.before, made.after, made.wanted) == (6, 6, None)
    assert made.problem.startswith(problem)
    assert str(one.problem) == made.problem
    assert str(made) == f"chat: stays at 6: problem: {made.problem}"
    assert "\n" not in made.problem
    assert made.by == ""


class Nasty:
    """Raises whatever is done with it."""

    def __index__(self) -> int:
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Nasty(), "returned <Nasty instance at .*; it must be"),
        (10**5000, "returned .*int.*; it must be"),
        (Unspeakable(), r"raised Unspeakable: \(its message cannot be shown\)"),
        (ValueError("x" * 10_000), "raised ValueError: x{478}[.]{3}$"),
    ],
    ids=["nasty", "huge", "unspeakable", "long"],
)
def test_answers_that_cannot_be_shown_are_reported(answer: object, problem: str) -> None:
    assert re.match(problem, record(guard(), answer).problem)


@pytest.mark.parametrize("answer", [6, 6.0, Wish(6), Wish(6.0)])  # type: ignore[arg-type]
def test_whole_numbers_of_every_type_are_accepted(answer: object) -> None:
    one = guard()
    assert record(one, answer).after == 6
    assert one.problem is None
    assert record(guard(max_replicas=2_000_000), 1_000_000).after == 1_000_000


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("x" * 500, "x" * 500),
        ("x" * 501, "x" * 497 + "..."),
        ("more\nfor\tall ", "more for all"),
        (None, "6 wanted"),
        (3, "6 wanted"),
    ],
)
def test_long_texts_are_cut_and_other_values_dropped(said: Any, told: str) -> None:
    made = record(guard(), Wish(6, said, said))
    assert made.why == told
    assert made.refused == (told if isinstance(said, str) else "")


def test_a_problem_is_reported_when_it_begins_and_ends() -> None:
    one, told = guard(), []
    answers = [4, *(ValueError(f"attempt {number}") for number in range(30)), 4, 4]
    for number, answer in enumerate(answers):
        made = one.decide(view(now=NOON + number, target=4), answer)
        if made is not None:
            told.append((number, made.problem, made.why))
    assert told == [
        (1, "raised ValueError: attempt 0", ""),
        (31, "", "4 wanted; mine answers again after it raised ValueError: attempt 0"),
    ]


def test_a_changing_problem_is_reported_at_intervals() -> None:
    one = guard()
    record(one, TooSlow(0.7))
    for seconds in (0.0, 0.5, 59.9):
        assert one.decide(view(now=NOON + seconds, target=4), TooSlow(1.0)) is None
    assert str(one.problem).startswith("took 1 s")
    assert record(one, TooSlow(2.0), now=NOON + 60).problem.startswith("took 2 s")
    assert record(one, TooSlow(3.0), now=NOON).problem.startswith("took 3 s"), "the clock was put back"


def test_a_problem_of_another_kind_is_reported_at_once() -> None:
    one = guard()
    record(one, ValueError("a"))
    assert record(one, TooSlow(1.0), now=NOON + 1).problem.startswith("took 1 s")
    assert record(one, 4, now=NOON + 2).why.endswith("answers again after it took 1 s; it may take 0.5 s (timeLimit)")
    assert one.decide(view(now=NOON + 3, target=4), TooSlow(1.0)) is None, "this kind was reported a moment ago"
    assert one.decide(view(now=NOON + 4, target=4), ValueError("b")) is None


def test_a_refusal_is_reported_when_it_begins_and_ends() -> None:
    one = guard()
    assert record(one, Wish(4, "enough", "3 of 7: too dear")).refused == "3 of 7: too dear"
    assert one.decide(view(now=NOON + 1, target=4), Wish(4, "enough", "4 of 8: too dear")) is None
    made = record(one, Wish(4, "enough"), now=NOON + 2)
    assert (made.refused, made.why) == ("", "enough")
    assert str(record(guard(), Wish(4, "enough", "all"))) == "chat: stays at 4: enough; refused: all"


def test_an_unchanged_target_has_no_record() -> None:
    one = guard(max_replicas=8)
    assert one.decide(view(target=4), 4) is None
    assert record(one, 100).bounded == ("at most 8 (max)",)
    assert one.decide(view(now=NOON + 1, target=8), 120) is None


@pytest.mark.parametrize(
    ("limits", "answer", "bounded"),
    [
        ({"max_replicas": 8}, 100, ["at most 8 (max)"]),
        ({"min_replicas": 2}, 0, ["at least 2 (min)"]),
        ({"max_step": 3}, 12, ["3 at a time (maxStep)"]),
        ({"up_factor": 0.5}, 12, ["4 of 8 more at once (upFactor 0.5)"]),
        ({"down_factor": 0.5}, 1, ["2 of 3 fewer at once (downFactor 0.5)"]),
        ({"max_replicas": 8, "max_step": 3}, 12, ["at most 8 (max)", "3 at a time (maxStep)"]),
        ({"min_replicas": 0}, 0, ["the last replica goes after 300 s without a request (idleTimeout)"]),
        ({}, 12, []),
        # A wish for what is allowed is not bounded.
        ({"max_replicas": 8}, 8, []),
        ({"min_replicas": 2}, 2, []),
        ({"max_step": 3}, 7, []),
        ({"up_factor": 0.9}, 6, []),
    ],
)
def test_limits_that_took_effect_are_recorded(limits: Any, answer: int, bounded: list[str]) -> None:
    made = record(guard(**limits), answer)
    assert list(made.bounded) == bounded
    assert made.wanted == answer


def test_a_record_names_pending_delays() -> None:
    one = guard(down_delay_s=30.0)
    run(one, [2, 3, 2])
    assert record(one, 2, now=NOON + 30).bounded == ("fewer after 30 s (downDelay)",)
    one = guard(cooldown_s=25.0)
    run(one, [5])
    refusal = record(one, Wish(9, refused="1 of 10: too dear"), now=NOON + 10)
    assert refusal.bounded == ("no change for 25 s after the last one (cooldown)",)


def test_a_record_has_its_numbers_and_its_text() -> None:
    wish = Wish(7, "12.4 requests (mean of 30 s), 2 per replica: 7")
    made = record(guard(max_replicas=6), wish, ongoing=8.0, queued=4.0, arrivals_per_s={30.0: 10 / 3, 300.0: 2.0})
    assert made.numbers == {"replicas": 2, "starting": 0, "ongoing": 8, "queued": 4, "arrivals_per_s": 3.3333}
    assert str(made) == ("chat: 4 -> 6: 12.4 requests (mean of 30 s), 2 per replica: 7; at most 6 (max)")


def test_a_record_has_a_few_custom_metrics() -> None:
    own = {"queued": flat(99.0)} | {f"own{number}": flat(float(number)) for number in range(20)}
    numbers = record(guard(), 6, queued=4.0, metrics=own).numbers
    assert numbers["queued"] == 4.0
    assert [name for name in numbers if name.startswith("own")] == [f"own{number}" for number in range(9)]


@pytest.mark.parametrize(("limits", "first"), [({}, 3), ({"initial_replicas": 5}, 5), ({"initial_replicas": 99}, 8)])
def test_the_first_target(limits: Any, first: int) -> None:
    assert Guard("chat", ScalingLimits(min_replicas=3, max_replicas=8, **limits), "mine").target == first


def test_new_limits_take_effect_at_once() -> None:
    one = guard(cooldown_s=600.0, down_delay_s=600.0)
    run(one, [10])
    one.limits = ScalingLimits(min_replicas=1, max_replicas=6, cooldown_s=600.0, down_delay_s=600.0)
    made = record(one, 10, now=NOON + 1)
    assert (made.after, made.bounded) == (6, ("at most 6 (max)",))
    one.limits = ScalingLimits(min_replicas=8, max_replicas=9, up_delay_s=600.0)
    assert record(one, ValueError(), now=NOON + 2).after == 8, "whatever the policy says"


def test_an_override_holds_until_it_ends() -> None:
    one = guard()
    made = one.set_override(9, NOON + 3600, "alice", NOON)
    assert (made.before, made.after, made.wanted) == (4, 9, None)
    assert made.why == "9 ordered by alice until 2025-03-05T13:00:00Z"
    assert made.by == "alice", "and not the policy"
    assert run(one, [2, 3, 1]) == [9, 9, 9]
    assert one.override is not None
    made = record(one, 3, now=NOON + 3600)
    assert (made.before, made.after) == (9, 3)
    assert made.why == "3 wanted; ended: 9 ordered by alice until 2025-03-05T13:00:00Z"
    assert made.by == "", "the policy decides again"
    assert one.override is None


def test_an_override_is_released() -> None:
    one = guard()
    assert one.release(NOON) is None
    one.set_override(9, None, "", NOON)
    made = one.release(NOON + 5)
    assert made is not None
    assert (made.before, made.after, made.at) == (9, 9, NOON + 5)
    assert made.why == "released: 9 ordered by an operator until it is released"
    assert made.by == "pointsman"
    assert run(one, [3]) == [3]


def test_an_override_stays_within_changing_bounds() -> None:
    one = guard(max_replicas=6)
    made = one.set_override(9, None, "alice", NOON)
    assert (made.after, made.bounded) == (6, ("at most 6 (max)",))
    one.limits = ScalingLimits(max_replicas=12)
    assert record(one, 3, now=NOON + 1).after == 9


def test_giving_way_scales_to_zero_at_once() -> None:
    one = guard(2, min_replicas=0, cooldown_s=600.0, down_delay_s=600.0)
    made = one.give_way(Reason("gave-way"), NOON)
    assert (made.before, made.after, made.at, made.why) == (
        2,
        0,
        NOON,
        "it made room for another deployment, and has no requests",
    )
    assert made.by == "pointsman"
    assert one.target == 0


def test_times_of_the_last_changes_survive_a_restart() -> None:
    one = guard()
    assert (one.since_up_s(NOON), one.since_down_s(NOON)) == (None, None)
    run(one, [6, 6, 5, 5])
    for same in (one, Guard("chat", one.limits, "mine", one.state())):
        assert (same.since_up_s(NOON + 30), same.since_down_s(NOON + 30)) == (30.0, 10.0)


def test_plain_policy_state_is_saved() -> None:
    one = guard()
    one.decide(view(target=4, state={"seen": [1, 2], "open": object()}), 4)
    state = json.loads(json.dumps(one.state()))
    assert state["policy_state"] == {"seen": [1, 2]}
    assert Guard("chat", one.limits, "mine", state).policy_state == {"seen": [1, 2]}


@pytest.mark.parametrize("state", [{}, {"target": "many"}, {"target": 3, "stabilization": 7}])
def test_state_that_is_not_of_a_guard_is_ignored(state: dict[str, Any]) -> None:
    assert Guard("chat", ScalingLimits(min_replicas=2, max_replicas=5), "mine", state).target == 2


def test_a_saved_target_is_brought_within_new_limits() -> None:
    one = Guard("chat", ScalingLimits(max_replicas=5), "mine", guard(9).state())
    assert record(one, 9).after == 5


def test_records_are_plain_data() -> None:
    made = record(guard(), Wish(7, "more"))
    assert msgspec.json.decode(msgspec.json.encode(made), type=ScalingRecord) == made
