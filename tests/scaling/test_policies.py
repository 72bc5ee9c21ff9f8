"""What each policy wants, and its reason."""

import re
from typing import Any

import pytest

from pointsman.scaling import (
    Budget,
    DeploymentView,
    Guard,
    MaxOf,
    MinOf,
    Panic,
    QueueDepth,
    ScalingLimits,
    Scheduled,
    ScheduleEntry,
    SloAttainment,
    Stay,
    TargetOngoing,
    TokenThroughput,
    Window,
    Wish,
    invoke,
    policy_name,
)
from tests.scaling.views import NOON, flat, view

HOUR = 3600.0


def wish(policy: Any, **facts: Any) -> Wish:
    made = policy.desired_replicas(view(**facts))
    assert isinstance(made, Wish)
    return made


@pytest.mark.parametrize(
    ("facts", "replicas"),
    [
        ({"ongoing": 3.0, "queued": 9.4}, 7),
        ({"ongoing_windows": {30.0: flat(10.0)}, "queued_windows": {30.0: flat(2.4)}}, 7),
        ({"ongoing": 8.0}, 4),
        ({"ongoing": 0.01, "replicas": 0, "target": 0}, 1),
        ({}, 0),
        ({"ongoing": 6.0, "target": 4}, 4),  # 3 would be full to the last
        ({"ongoing": 5.4, "target": 4}, 3),
        ({"ongoing": 6.0, "target": 2}, 3),
    ],
)
def test_target_ongoing(facts: dict[str, Any], replicas: int) -> None:
    assert wish(TargetOngoing(target=2.0), **facts).replicas == replicas


def test_target_ongoing_gives_its_reason() -> None:
    windows = {"ongoing_windows": {30.0: flat(10.0, 30.0)}, "queued_windows": {30.0: flat(2.4, 30.0)}}
    assert wish(TargetOngoing(), **windows).why == "12.4 requests (mean of 30 s), 2 per replica: 7"
    assert wish(TargetOngoing(look_back_s=5), ongoing=3.0).why == "3.0 requests (now), 2 per replica: 2"


@pytest.mark.parametrize(
    ("ongoing", "target", "words"),
    [
        (2.04, 1, "2.04 requests (now), 2 per replica: 2"),
        (2.0004, 1, "2.0004 requests (now), 2 per replica: 2"),
        (2.0, 1, "2.0 requests (now), 2 per replica: 1"),
        (1.96, 1, "2.0 requests (now), 2 per replica: 1"),
        (3.96, 3, "4.0 requests (now), 2 per replica: 3, with a margin of a tenth"),
        (0.0004, 0, "0.0004 requests (now), 2 per replica: 1"),
        (12_345.6, 1, "12345.6 requests (now), 2 per replica: 6173"),
    ],
)
def test_figures_show_why_it_is_not_one_fewer(ongoing: float, target: int, words: str) -> None:
    assert wish(TargetOngoing(), ongoing=ongoing, target=target).why == words


@pytest.mark.parametrize(
    ("facts", "replicas"),
    [
        ({"queued": 9.0}, 5),
        ({"queued": 1.0, "ongoing": 8.0, "max_concurrency": 4}, 2),
        ({"queued": 0.0, "ongoing": 8.0, "max_concurrency": 4, "target": 6}, 3),  # with a tenth to spare
        ({"queued": 0.0, "ongoing": 1.5, "target": 6}, 2),
        ({"queued": 0.0, "ongoing": 9.0, "target": 6}, 6),
        ({"queued": 0.2, "target": 0, "replicas": 0}, 1),
        # Of those that run, the more of now and of late.
        ({"ongoing": 8.0, "ongoing_windows": {30.0: flat(2.0)}, "max_concurrency": 4}, 2),
        ({"ongoing": 2.0, "ongoing_windows": {30.0: flat(8.0)}, "max_concurrency": 4}, 2),
        ({}, 0),
    ],
)
def test_queue_depth(facts: dict[str, Any], replicas: int) -> None:
    assert wish(QueueDepth(target_queued_per_replica=2.0), **facts).replicas == replicas


def test_queue_depth_gives_its_reason() -> None:
    assert wish(QueueDepth(), queued=9.0).why == "9.0 requests wait (now), 2 per replica: 5"
    running = {"queued": 1.0, "ongoing": 8.0, "max_concurrency": 4}
    assert wish(QueueDepth(), **running).why == "1.0 requests wait (now), and 8.0 run: 2"


@pytest.mark.parametrize(
    ("tokens", "kv", "facts", "replicas"),
    [
        (1000.0, None, {"tokens_per_s": 3500.0}, 4),
        (1000.0, 0.8, {"tokens_per_s": 3500.0, "kv_usage": flat(0.2)}, 4),
        (1000.0, 0.8, {"tokens_per_s": 500.0, "kv_usage": flat(1.0), "replicas": 4, "target": 4}, 5),
        (None, 0.8, {"kv_usage": flat(0.1), "target": 2}, 1),
        (None, 0.8, {"kv_usage": flat(0.1), "target": 2, "queued": 3.0}, 2),  # what waits is in no cache yet
        (None, 0.8, {"queued": 3.0, "target": 0, "replicas": 0}, 1),
        (None, 0.8, {"tokens_per_s": 9000.0, "kv_usage": flat(0.1)}, 1),
        # Neither is measured.
        (1000.0, 0.8, {"target": 3, "ongoing": 1.0}, 3),
        (1000.0, 0.8, {"target": 3}, 1),
        (1000.0, 0.8, {"target": 0, "replicas": 0}, 0),
        (None, 0.8, {"kv_usage": flat(1.0), "target": 3, "replicas": 0}, 1),
        # A served request needs a replica, however small it is.
        (None, 0.8, {"kv_usage": flat(0.0), "ongoing": 1.0}, 1),
        (None, 0.8, {"kv_usage": flat(0.0), "queued": 1.0, "target": 1, "replicas": 1}, 1),
        (None, 1.0, {"kv_usage": flat(0.0)}, 0),
    ],
)
def test_token_throughput(tokens: float | None, kv: float | None, facts: dict[str, Any], replicas: int) -> None:
    made = wish(TokenThroughput(tokens, kv), **facts)
    assert made.replicas == replicas
    assert made.why.endswith(f": {replicas}")


def test_token_throughput_gives_its_reason() -> None:
    made = wish(TokenThroughput(1000.0), tokens_per_s=3500.0, kv_usage=flat(0.1))
    assert made.why == "3500 tokens/s, 1000 per replica: 4"
    made = wish(TokenThroughput(), kv_usage=flat(0.1), queued=3.0)
    assert made.why == "KV caches of 2 are 10% full, 80% wanted, and 3 requests wait: 2"


@pytest.mark.parametrize(
    ("parameters", "facts", "replicas"),
    [
        ({"ttft_ms": 200.0}, {"ttft_ms": flat(300.0)}, 6),
        ({"ttft_ms": 200.0}, {"ttft_ms": flat(5000.0)}, 8),  # never more than twice as many
        ({"ttft_ms": 200.0}, {"ttft_ms": flat(220.0)}, 4),  # within the dead band
        ({"ttft_ms": 200.0, "dead_band": 0.0}, {"ttft_ms": flat(220.0)}, 5),
        ({"ttft_ms": 200.0}, {"ttft_ms": flat(150.0)}, 4),  # 3 are predicted to take 200
        ({"ttft_ms": 200.0}, {"ttft_ms": flat(100.0)}, 3),
        ({"ttft_ms": 200.0, "tpot_ms": 20.0}, {"ttft_ms": flat(100.0), "tpot_ms": flat(30.0)}, 6),
        ({}, {"slo_attainment": 0.8}, 5),
        ({}, {"slo_attainment": 0.4}, 8),
        ({}, {"slo_attainment": 0.985}, 5),
        ({}, {"slo_attainment": 0.99}, 4),  # just as many as wanted
        ({}, {"slo_attainment": 0.992}, 4),
        ({}, {"slo_attainment": 1.0}, 3),
        ({}, {}, 4),  # nothing has a target
        ({}, {"latency_ms": Window(300.0), "ongoing": 0.0}, 0),
        ({}, {"latency_ms": Window(300.0), "replicas": 0, "target": 0}, 1),
        ({}, {"slo_attainment": 0.4, "starting": 2}, 4),
        ({}, {"slo_attainment": 0.4, "since_up_s": 200.0, "since_down_s": 9000.0}, 4),
        ({}, {"slo_attainment": 0.4, "since_up_s": 300.0}, 8),
        ({}, {"slo_attainment": 0.4, "since_up_s": 330.0, "start_up_s": 60.0}, 4),
        ({}, {"slo_attainment": 0.4, "since_up_s": 400.0, "since_down_s": 9000.0, "start_up_s": 60.0}, 8),
    ],
)
def test_slo_attainment(parameters: dict[str, Any], facts: dict[str, Any], replicas: int) -> None:
    usual = {"replicas": 4, "target": 4, "ongoing": 9.0, "latency_ms": flat(500.0), "arrivals_per_s": {30.0: 12.0}}
    assert wish(SloAttainment(**parameters), **usual | facts).replicas == replicas


def test_slo_attainment_does_not_return_to_a_number_that_missed() -> None:
    policy, state = SloAttainment(), dict[str, Any]()
    usual: dict[str, Any] = {"ongoing": 9.0, "latency_ms": flat(500.0), "state": state}
    early = {30.0: 6.0, 300.0: 12.0, 3600.0: 90.0}  # an hour says nothing about latencies of five minutes
    assert wish(policy, replicas=2, target=2, slo_attainment=0.9, arrivals_per_s=early, **usual).replicas == 3

    def fewer(now: float, **rates: float) -> int:
        seen = {"now": now, "arrivals_per_s": {30.0: rates["short"], 300.0: rates["long"]}}
        return wish(policy, replicas=3, target=3, slo_attainment=1.0, **usual, **seen).replicas

    assert fewer(NOON, short=2.0, long=12.0) == 3
    assert fewer(NOON, short=12.0, long=2.0) == 3
    assert fewer(NOON, short=6.0, long=6.0) == 2
    assert fewer(NOON + 24 * HOUR - 1, short=12.0, long=12.0) == 3
    assert fewer(NOON + 24 * HOUR, short=12.0, long=12.0) == 2, "it may be faster now"


def test_slo_attainment_gives_its_reason() -> None:
    facts = {"replicas": 4, "target": 4, "ongoing": 9.0, "latency_ms": flat(500.0)}
    made = wish(SloAttainment(ttft_ms=200.0), ttft_ms=flat(300.0), **facts)
    assert made.why == "first token after 300 ms (p90 of 300 s), 200 wanted: 6"
    assert wish(SloAttainment(), slo_attainment=0.8, **facts).why == "80.0% met their deadline, 99.0% wanted: 5"
    assert wish(SloAttainment(), slo_attainment=0.8, starting=1, **facts).why == (
        "80.0% met their deadline, 99.0% wanted; 4 until the last change shows in the measurements"
    )
    assert wish(SloAttainment(), **facts).why == "no quantity with a target has been measured"


def loads(long: float, short: float) -> dict[str, Any]:
    return {"ongoing_windows": {6.0: flat(short, 6.0), 60.0: flat(long, 60.0)}, "queued_windows": {}}


def test_panic_follows_the_stable_window() -> None:
    assert wish(Panic(), **loads(5.0, 7.0)).replicas == 3
    assert wish(Panic(), **loads(1.0, 1.0)).replicas == 1
    assert wish(Panic(stable_s=6.0), **loads(5.0, 7.0)).replicas == 4


def test_panic_does_not_scale_down_during_a_burst() -> None:
    state: dict[str, Any] = {}
    made = wish(Panic(), **loads(3.0, 16.0), state=state)
    assert made.replicas == 8
    assert made.why.startswith("burst: 16.0 requests (mean of 6 s), 2 per replica: 8")
    later = {"replicas": 8, "target": 8, "state": state}
    assert wish(Panic(), now=NOON + 30, **loads(6.0, 2.0), **later).replicas == 8
    assert wish(Panic(), now=NOON + 59, **loads(6.0, 2.0), **later).replicas == 8
    assert wish(Panic(), now=NOON + 60, **loads(6.0, 2.0), **later).replicas == 4
    assert state == {}


@pytest.mark.parametrize(
    ("replicas", "short", "panics"),
    [(2, 8.0, True), (2, 7.9, False), (1, 4.0, True), (0, 4.0, True), (0, 3.9, False), (0, 0.0, False)],
)
def test_panic_begins_at_the_threshold(replicas: int, short: float, panics: bool) -> None:
    made = wish(Panic(), **loads(0.0, short), replicas=replicas, target=0)
    assert made.why.startswith("burst") == panics


def test_panic_without_its_windows_uses_the_present_load() -> None:
    assert wish(Panic(), ongoing=16.0, ongoing_windows={30.0: flat(3.0)}).replicas == 8


DAYS = [ScheduleEntry("0 9 * * mon-fri", 4, 8 * HOUR), ScheduleEntry("0 11 * * *", 6, 2 * HOUR)]
TURNS = [ScheduleEntry("0 8 * * *", 5), ScheduleEntry("0 18 * * *", 1), ScheduleEntry("0 0 1 1 *", 9, HOUR)]
NIGHTS = [ScheduleEntry("0 8 * * *", 5), ScheduleEntry("0 18 * * *", 0)]


@pytest.mark.parametrize(
    ("entries", "hours", "zone", "replicas"),
    [
        (DAYS, 0.0, "UTC", 6),
        (DAYS, 1.0, "UTC", 4),
        (DAYS, 4.999, "UTC", 4),
        (DAYS, 5.0, "UTC", 0),
        (DAYS, 3 * 24.0, "UTC", 6),
        (DAYS, 3 * 24.0 - 1.5, "UTC", 0),  # a Saturday
        (DAYS, 0.0, "America/New_York", 0),  # seven in the morning there
        (TURNS, 0.0, "UTC", 5),
        (TURNS, 6.0, "UTC", 1),
        (TURNS, 19.0, "UTC", 1),
        (TURNS, 20.0, "UTC", 5),
        (NIGHTS, 6.0, "UTC", 0),
        ([*DAYS, ScheduleEntry("30 11 * * *", 2, HOUR)], 0.0, "UTC", 6),  # the largest, not the latest
        ([*TURNS, ScheduleEntry("0 8 * * *", 3)], 0.0, "UTC", 3),  # of two at the same time, the last
    ],
)
def test_scheduled(entries: list[ScheduleEntry], hours: float, zone: str, replicas: int) -> None:
    assert wish(Scheduled(entries, zone), now=NOON + hours * HOUR).replicas == replicas


def test_scheduled_gives_its_reason() -> None:
    assert wish(Scheduled(DAYS)).why == 'scheduled "0 11 * * *" since 2025-03-05 11:00: 6'
    assert wish(Scheduled(DAYS), now=NOON + 10 * HOUR).why == "the schedule has nothing for 2025-03-05 22:00"
    assert wish(Scheduled(DAYS, "Asia/Tokyo")).why == "the schedule has nothing for 2025-03-05 21:00"
    assert wish(Scheduled(DAYS, "Europe/Berlin")).why == 'scheduled "0 9 * * mon-fri" since 2025-03-05 09:00: 4'


def wants(replicas: int, why: str = "they are needed", refused: str = "") -> Any:
    class Fixed:
        def desired_replicas(self, view: DeploymentView) -> Wish:
            view.state["asked"] = view.state.get("asked", 0) + 1
            return Wish(replicas, why, refused)

    return Fixed()


@pytest.mark.parametrize(
    ("money", "facts", "replicas"),
    [
        ({"per_hour": 10.0}, {"cost_per_replica_hour": 2.0}, 5),
        ({"per_hour": 10.0}, {"cost_per_replica_hour": 1.0}, 8),
        ({"per_hour": 10.0, "cost_per_replica_hour": 3.0}, {}, 3),
        ({"per_hour": 1.0}, {"cost_per_replica_hour": 2.0}, 0),
        ({"per_month": 10_000.0}, {"cost_per_replica_hour": 1.0}, 8),
        ({"per_month": 700.0}, {"cost_per_replica_hour": 1.0, "min_replicas": 1}, 8),  # 636 hours are left
        ({"per_month": 640.0}, {"cost_per_replica_hour": 1.0, "min_replicas": 1}, 5),
        ({"per_month": 600.0}, {"cost_per_replica_hour": 1.0, "min_replicas": 1}, 1),
        ({"per_month": 1280.0}, {"cost_per_replica_hour": 2.0, "min_replicas": 1}, 5),
        ({"per_month": 4.5}, {"cost_per_replica_hour": 1.0}, 4),
        # The last half hour of the month: nothing need be put aside, and each costs half.
        ({"per_month": 6.0}, {"cost_per_replica_hour": 2.0, "min_replicas": 1, "now": NOON + 635.5 * HOUR}, 6),
        # Of two limits, the lower one.
        ({"per_hour": 3.0, "per_month": 10_000.0}, {"cost_per_replica_hour": 1.0}, 3),
        ({"per_hour": 100.0, "per_month": 4.5}, {"cost_per_replica_hour": 1.0}, 4),
    ],
)
def test_budget(money: dict[str, float], facts: dict[str, Any], replicas: int) -> None:
    assert wish(Budget(wants(8), **money), **facts).replicas == replicas


def test_budget_reports_what_it_refuses() -> None:
    made = wish(Budget(wants(8), per_hour=10.0), cost_per_replica_hour=2.0)
    assert made.why == "they are needed; 10 per hour pays for 5"
    assert made.refused == "3 of 8: 10 per hour pays for 5 at 2 per replica-hour"
    assert wish(Budget(wants(5), per_hour=10.0), cost_per_replica_hour=2.0) == Wish(5, "they are needed")


def test_a_budget_may_refuse_the_first_replica() -> None:
    poor = Budget(wants(0), per_hour=5.0)
    waits = wish(poor, replicas=0, target=0, queued=1.0, cost_per_replica_hour=20.0)
    assert (waits.replicas, waits.refused) == (0, "1 of 1: 5 per hour pays for 0 at 20 per replica-hour")
    guard = Guard("m", ScalingLimits(min_replicas=0, max_replicas=4), "budget")
    guard.decide(view(replicas=0, target=0, queued=1.0), waits)
    assert guard.target == 0
    assert wish(poor, replicas=0, target=0, cost_per_replica_hour=20.0).refused == "", "no request waits"


def test_a_monthly_budget_is_spent_and_renewed() -> None:
    policy, state = Budget(wants(8), per_month=200.0, cost_per_replica_hour=2.0), dict[str, Any]()
    running = {"replicas": 6, "starting": 2, "state": state}
    seen = [wish(policy, now=NOON + hour * HOUR, **running).replicas for hour in range(15)]
    assert seen == [8] * 12 + [4, 0, 0], "16 an hour, of 200"
    assert state["spent"] == pytest.approx(14 * 16.0)
    april = NOON + 27 * 24 * HOUR
    assert wish(policy, now=april, replicas=0, state=state).replicas == 8
    assert state["spent"] == 0.0


def test_a_budget_without_a_cost_is_a_problem() -> None:
    answer = invoke(Budget(wants(8), per_hour=10.0), view())
    assert isinstance(answer, ValueError)
    assert "the cost of a replica per hour is unknown; set costPerReplicaHour" in str(answer)


def test_the_largest_and_smallest_of_several() -> None:
    policies = [TargetOngoing(), wants(5), wants(2, refused="1 of 3: too dear")]
    made = wish(MaxOf(policies), ongoing=12.0)
    assert made.replicas == 6
    assert made.why == (
        "most of target-ongoing 6, fixed 5, fixed 2; target-ongoing: 12.0 requests (now), 2 per replica: 6"
    )
    made = wish(MinOf(policies), ongoing=12.0)
    assert (made.replicas, made.refused) == (2, "1 of 3: too dear")
    assert made.why == "least of target-ongoing 6, fixed 5, fixed 2; fixed: they are needed"


def test_each_inner_policy_has_its_own_state() -> None:
    state: dict[str, Any] = {}
    policy = MaxOf([wants(3), Budget(wants(4), per_hour=5.0, cost_per_replica_hour=1.0)])
    for _ in range(2):
        wish(policy, state=state)
    assert state == {"0": {"asked": 2}, "1": {"policy": {"asked": 2}}}


def test_a_failing_inner_policy_fails_the_whole() -> None:
    class Broken:
        def desired_replicas(self, view: DeploymentView) -> Any:
            return "many"

    answer = invoke(MaxOf([wants(3), Broken()]), view())
    assert str(answer).startswith("plugin \"broken\" returned 'many'")
    answer = invoke(MaxOf([wants(3), lambda view: Stay()]), view())  # type: ignore[list-item]
    assert str(answer) == 'plugin "<lambda>" gave no answer'


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TargetOngoing(target=0), "target must be above 0, found 0"),
        (lambda: TargetOngoing(look_back_s=-1), "lookBack must be above 0"),
        (lambda: QueueDepth(0), "targetQueuedPerReplica must be above 0"),
        (lambda: QueueDepth(look_back_s=0), "lookBack must be above 0"),
        (lambda: TokenThroughput(None, None), "tokensPerSPerReplica or kvTarget must be given"),
        (lambda: TokenThroughput(0), "tokensPerSPerReplica must be above 0"),
        (lambda: TokenThroughput(None, 0), "kvTarget must be above 0"),
        (lambda: TokenThroughput(None, 1.5), "kvTarget is a share of the KV cache, from 0 to 1, found 1.5"),
        (lambda: SloAttainment(0), "target is a share of requests, between 0 and 1, found 0"),
        (lambda: SloAttainment(1), "target is a share of requests, between 0 and 1, found 1"),
        (lambda: SloAttainment(dead_band=1), "deadBand must be from 0 to below 1"),
        (lambda: SloAttainment(ttft_ms=0), "ttftMs must be above 0"),
        (lambda: Panic(0), "target must be above 0"),
        (lambda: Panic(panic_s=0), "panicWindow must be above 0"),
        (lambda: Panic(stable_s=5), "stableWindow must not be shorter than panicWindow, found 5 s and 6 s"),
        (lambda: Panic(threshold=1), "threshold must be above 1"),
        (lambda: Scheduled([]), "entries is empty; write for example {cron:"),
        (lambda: Scheduled([ScheduleEntry("0 9 * * *", -1)]), 'replicas of "0 9 * * *" must be 0 or more, found -1'),
        (lambda: Scheduled([ScheduleEntry("0 9 * * *", 1, 0.0)]), 'duration of "0 9 * * *" must be above 0'),
        (lambda: Scheduled([ScheduleEntry("nine", 1)]), '"nine" has 1 fields'),
        (lambda: Budget(wants(1)), "perHour or perMonth must be given"),
        (lambda: Budget(wants(1), per_hour=0), "perHour must be above 0"),
        (lambda: Budget(wants(1), per_month=0), "perMonth must be above 0"),
        (lambda: Budget(wants(1), 1.0, cost_per_replica_hour=0), "costPerReplicaHour must be above 0"),
        (lambda: MaxOf([]), "policies is empty; name at least one"),
    ],
)
def test_invalid_parameters_are_errors(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def test_policies_have_their_configured_names() -> None:
    assert policy_name(TargetOngoing()) == "target-ongoing"
    assert policy_name(wish) == "wish"
