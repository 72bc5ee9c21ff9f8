"""Dispatchers as documents describe them: with and without the gate of flow control."""

from typing import Any

import pytest

from pointsman.config import load_picker
from pointsman.errors import ConfigError, UnknownName
from pointsman.reasons import Reason
from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.endpoints import IN_FLIGHT_REQUESTS, IN_FLIGHT_TOKENS, Metrics
from pointsman.routing.events import (
    Arrived,
    Cancelled,
    DispatcherCommand,
    DispatcherEvent,
    Ended,
    Failed,
    FirstToken,
    Joined,
    Left,
    Measured,
    Outcome,
    Refuse,
    Revoke,
    Send,
    TimerFired,
    WakeAt,
)
from pointsman.routing.routes import DispatcherSettings
from pointsman.types import ExecutionInstance, RequestMetadata

ONE_EACH = """
plugins:
- {type: queue-scorer}
- {type: concurrency-detector, parameters: {maxConcurrency: 1}}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: queue-scorer}]}
saturationDetector: {pluginRef: concurrency-detector}
"""
"""Saturated when each instance has one request; the profile itself knows no limit."""

GATE = "featureGates: [flowControl]\n"


class Desk:
    """A dispatcher built from a document, and short ways to talk to it."""

    def __init__(self, document: str, *instances: ExecutionInstance | str, **settings: Any) -> None:
        self.now = 0.0
        self.dispatcher = Dispatcher(load_picker(document).dispatch_plan(), DispatcherSettings(**settings))
        for one in instances:
            self.tell(Joined(instance(one) if isinstance(one, str) else one))

    def tell(self, event: DispatcherEvent, now: float | None = None) -> list[DispatcherCommand]:
        self.now = self.now if now is None else now
        return self.dispatcher.handle(event, self.now)

    def arrive(self, *names: str, **facts: Any) -> list[DispatcherCommand]:
        return self.tell(Arrived(tuple(request(name, **facts) for name in names)))

    def waiting(self) -> list[str]:
        return [one.request_id for one in self.dispatcher.waiting()]


def instance(name: str, **facts: Any) -> ExecutionInstance:
    return ExecutionInstance(**{"instance_id": name, "model_name": "m"} | facts)


def request(name: str, **facts: Any) -> RequestMetadata:
    fields: dict[str, Any] = {"request_id": name, "prompt": "hello", "model_name": "m"} | facts
    return RequestMetadata(**fields)


def sent(commands: list[DispatcherCommand]) -> dict[str, str]:
    return {c.request.request_id: c.decision.target_instance_id for c in commands if isinstance(c, Send)}


def refused(commands: list[DispatcherCommand]) -> dict[str, tuple[Outcome, int]]:
    return {c.request.request_id: (c.refusal.outcome, c.refusal.status) for c in commands if isinstance(c, Refuse)}


def revoked(commands: list[DispatcherCommand]) -> list[str]:
    return [c.request.request_id for c in commands if isinstance(c, Revoke)]


# With the gate


def test_requests_wait_while_the_pool_is_saturated() -> None:
    desk = Desk(GATE + ONE_EACH, "i", "j")
    assert sent(desk.arrive("a", "b", "c", "d")).keys() == {"a", "b"}
    assert desk.waiting() == ["c", "d"]
    assert list(sent(desk.tell(Ended("a"), 1.0))) == ["c"]
    assert list(sent(desk.tell(Failed("c", Reason("reset"), retry=False), 2.0))) == ["d"]
    record = desk.dispatcher.explain("d", 2.0)
    assert record is not None
    assert record.state == "running"


def test_waiting_requests_show_that_the_pool_is_saturated() -> None:
    desk = Desk(GATE + ONE_EACH, "i")
    desk.arrive("a", "b")
    record = desk.dispatcher.explain("b", 0.0)
    assert record is not None
    assert record.state == "waiting"
    assert "saturated" in str(record)


def test_a_new_instance_takes_waiting_requests() -> None:
    desk = Desk(GATE + ONE_EACH)
    assert desk.arrive("a", "b")[:-1] == []
    assert sent(desk.tell(Joined(instance("i")))) == {"a": "i"}
    assert sent(desk.tell(Joined(instance("j")))).keys() == {"b"}, "the target is random: the profile knows no limit"


def test_no_model_waits_for_the_saturation_of_another() -> None:
    desk = Desk(GATE + ONE_EACH, instance("i"), instance("x", model_name="x"))
    assert sent(desk.arrive("a", "b")) == {"a": "i"}
    assert sent(desk.arrive("c", model_name="x")) == {"c": "x"}


def test_the_times_to_live_of_the_document() -> None:
    desk = Desk(GATE + ONE_EACH + "flowControl: {defaultRequestTTL: 30s, noEndpointRequestTTL: 2m}", "i")
    desk.arrive("a", "b")
    assert refused(desk.tell(TimerFired(), 29.9)) == {}
    assert refused(desk.tell(TimerFired(), 30.0)) == {"b": (Outcome.EVICTED_TTL, 429)}
    desk.arrive("unserved", model_name="x")
    assert refused(desk.tell(TimerFired(), 149.9)) == {}
    assert refused(desk.tell(TimerFired(), 150.0)) == {"unserved": (Outcome.EVICTED_NO_ENDPOINTS, 503)}


BANDS = """
flowControl:
  maxRequests: 4
  priorityBands:
  - {priority: 5, maxRequests: 2}
  - {priority: 0}
  - {priority: -1}
"""


def test_the_highest_band_goes_first() -> None:
    desk = Desk(GATE + ONE_EACH + BANDS, "i")
    desk.arrive("running")
    for name, priority in (("low", -1), ("normal", 0), ("high", 5), ("high too", 5)):
        desk.arrive(name, priority=priority)
    order = []
    name = "running"
    while name:
        [name] = list(sent(desk.tell(Ended(name)))) or [""]
        order.append(name)
    assert order == ["high", "high too", "normal", "low", ""]


def test_a_full_band_refuses_and_a_full_queue_sheds_what_is_negative() -> None:
    desk = Desk(GATE + ONE_EACH + BANDS, "i")
    desk.arrive("running")
    assert refused(desk.arrive("h1", "h2", "h3", priority=5)) == {"h3": (Outcome.REJECTED_CAPACITY, 429)}
    desk.arrive("low", priority=-1)
    desk.arrive("n1")
    assert refused(desk.arrive("n2")) == {"low": (Outcome.REJECTED_CAPACITY, 429)}, "it made room"
    assert refused(desk.arrive("n3")) == {"n3": (Outcome.REJECTED_CAPACITY, 429)}, "no request is left to evict"
    assert desk.waiting() == ["h1", "h2", "n1", "n2"]
    record = desk.dispatcher.explain("low", 0.0)
    assert record is not None
    assert record.refusal is not None
    assert "displaced by higher-priority work" in str(record.refusal.reason)


def test_lower_bands_are_held_back_earlier() -> None:
    holding = """
plugins:
- {type: queue-scorer}
- {type: concurrency-detector, parameters: {maxConcurrency: 4}}
- {type: priority-holdback-policy, parameters: {minCeiling: 0.5}}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: queue-scorer}]}
flowControl:
  saturationDetector: {pluginRef: concurrency-detector}
  usageLimitPolicyPluginRef: priority-holdback-policy
  priorityBands: [{priority: 1}, {priority: 0}]
"""
    desk = Desk(GATE + holding, "i")
    assert sent(desk.arrive("n1", "n2", "n3")).keys() == {"n1", "n2"}, "half of the room is not for them"
    assert sent(desk.arrive("h1", "h2", "h3", priority=1)).keys() == {"h1", "h2"}
    assert desk.waiting() == ["h3", "n3"]


EVICTION = ONE_EACH + "flowControl: {enableEviction: true, priorityBands: [{priority: 5}, {priority: -1}]}\n"


def test_running_work_of_negative_priority_is_stopped_for_more_important_work() -> None:
    desk = Desk(GATE + EVICTION, "i")
    desk.arrive("low", priority=-1)
    commands = desk.arrive("high", priority=5)
    assert revoked(commands) == ["low"]
    assert sent(commands) == {}
    [stop] = [c for c in commands if isinstance(c, Revoke)]
    assert (stop.refusal.outcome, stop.refusal.status, stop.refusal.drop_reason) == (
        Outcome.EVICTED_IN_FLIGHT,
        429,
        "evicted",
    )
    assert revoked(desk.tell(TimerFired(), 1.0)) == [], "it is stopped once"
    assert sent(desk.tell(Cancelled("low"), 1.0)) == {"high": "i"}
    assert desk.dispatcher.counters.outcomes == {"EvictedInFlight": 1}


def test_work_that_is_not_negative_is_never_stopped() -> None:
    desk = Desk(GATE + EVICTION, "i")
    desk.arrive("normal")
    assert revoked(desk.arrive("high", priority=5)) == []


def test_the_work_of_another_model_is_not_stopped_as_that_would_not_help() -> None:
    desk = Desk(GATE + EVICTION, instance("i"), instance("x", model_name="x"))
    desk.arrive("other", model_name="x", priority=-1)
    desk.arrive("mine")
    assert revoked(desk.arrive("high", priority=5)) == []
    assert revoked(desk.arrive("high x", model_name="x", priority=5)) == ["other"]


def test_evicted_requests_are_not_retried() -> None:
    desk = Desk(GATE + EVICTION, "i")
    desk.arrive("low", priority=-1)
    desk.arrive("high", priority=5)
    commands = desk.tell(Left("i", Reason("it crashed")), 1.0)
    assert (sent(commands), refused(commands)) == ({}, {}), "the refusal went out with the stop"
    assert desk.waiting() == ["high"]


# Without the gate


def test_without_the_gate_requests_do_not_wait() -> None:
    desk = Desk(ONE_EACH, instance("i", max_concurrency=2))
    assert sent(desk.arrive("a", "b")) == {"a": "i", "b": "i"}
    commands = desk.arrive("c")
    assert refused(commands) == {"c": (Outcome.REJECTED_CAPACITY, 429)}
    [gone] = [c for c in commands if isinstance(c, Refuse)]
    assert gone.refusal.drop_reason == "rejected-saturated"
    assert str(gone.refusal.reason) == 'no instance can take "m": 1 instance: 1 full'
    assert desk.waiting() == []


def test_without_the_gate_an_unserved_model_is_refused_at_once() -> None:
    for desk in (Desk(ONE_EACH), Desk(ONE_EACH, instance("x", model_name="x"))):
        [gone] = desk.arrive("a")
        assert isinstance(gone, Refuse)
        assert (gone.refusal.status, gone.refusal.drop_reason) == (503, "rejected-no-endpoints")


def test_without_the_gate_negative_priorities_are_shed_while_the_pool_is_saturated() -> None:
    desk = Desk(ONE_EACH, "i")
    assert sent(desk.arrive("a", priority=-1)) == {"a": "i"}
    commands = desk.arrive("b", priority=-1)
    assert refused(commands) == {"b": (Outcome.REJECTED_ADMISSION, 429)}
    [gone] = [c for c in commands if isinstance(c, Refuse)]
    assert str(gone.refusal.reason).startswith("shed by priority -1: saturation is 1.00")
    assert sent(desk.arrive("c", priority=0)) == {"c": "i"}


def test_without_the_gate_a_failed_try_goes_elsewhere_or_is_refused() -> None:
    desk = Desk(ONE_EACH, instance("i", max_concurrency=1), instance("j", max_concurrency=1))
    [(_, first)] = sent(desk.arrive("a")).items()
    [(_, second)] = sent(desk.tell(Failed("a", Reason("reset")))).items()
    assert first != second
    assert sent(desk.arrive("b")) == {"b": first}
    assert refused(desk.tell(Failed("b", Reason("reset")))) == {"b": (Outcome.REJECTED_CAPACITY, 429)}, (
        "the other is taken"
    )
    assert len(desk.dispatcher) == 1


# Plugins at work


def test_the_same_prompt_goes_to_the_same_instance() -> None:
    """An empty document is the default one: queues, caches and prefixes."""
    desk = Desk("", *(f"i{n}" for n in range(6)))
    stories = {name: f"{name}: " + "once upon a time " * 100 for name in "abc"}
    home = {name: sent(desk.arrive(f"{name}0", prompt=story))[f"{name}0"] for name, story in stories.items()}
    for turn in range(1, 6):
        for name, story in stories.items():
            again = f"{name}{turn}"
            assert sent(desk.arrive(again, prompt=story + " the end" * turn))[again] == home[name]
    desk.tell(Left(home["a"]))
    elsewhere = sent(desk.arrive("a9", prompt=stories["a"]))["a9"]
    assert elsewhere != home["a"]
    desk.tell(Joined(instance(home["a"])))
    assert sent(desk.arrive("a10", prompt=stories["a"]))["a10"] == elsewhere, "an instance that returns has no cache"


DISAGG = """
plugins:
- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
- {type: always-disagg-pd-decider}
- {type: prefill-filter}
- {type: decode-filter}
- {type: inflight-load-producer}
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}]}
- {name: decode, plugins: [{pluginRef: decode-filter}]}
"""


def role(name: str, what: str, port: int) -> ExecutionInstance:
    return instance(name, host="10.0.0.1", port=port, labels={"llm-d.ai/role": what})


def in_flight(desk: Desk) -> dict[str, tuple[float, float]]:
    roster = desk.dispatcher.fleet.roster
    requests, tokens = roster.column(IN_FLIGHT_REQUESTS), roster.column(IN_FLIGHT_TOKENS)
    return {str(one): (float(requests[one.row]), float(tokens[one.row])) for one in roster}


def test_the_prefill_instance_is_in_a_header_and_freed_at_the_first_token() -> None:
    desk = Desk(DISAGG, role("p", "prefill", 81), role("d", "decode", 82))
    [send] = desk.arrive("a", prompt="x" * 40)
    assert isinstance(send, Send)
    assert send.decision.target_instance_id == "d"
    assert send.headers == {"x-prefiller-host-port": "10.0.0.1:81", "x-encoder-hosts-ports": None}
    assert in_flight(desk) == {"p": (1, 10), "d": (1, 10)}
    desk.tell(FirstToken("a"))
    assert in_flight(desk) == {"p": (0, 0), "d": (1, 0)}
    desk.tell(Ended("a", 5))
    assert in_flight(desk) == {"p": (0, 0), "d": (0, 0)}


def test_without_a_prefill_instance_a_clients_header_is_removed() -> None:
    desk = Desk(DISAGG, role("d", "decode", 82))
    [send] = desk.arrive("a", headers={"x-prefiller-host-port": "evil:1"})
    assert isinstance(send, Send)
    assert send.headers["x-prefiller-host-port"] is None


def test_requests_of_a_lost_prefill_instance_are_retried() -> None:
    desk = Desk(DISAGG, role("p", "prefill", 81), role("d", "decode", 82))
    desk.arrive("a")
    desk.arrive("b")
    desk.tell(FirstToken("b"))
    commands = desk.tell(Left("p", Reason("it crashed")), 1.0)
    assert sent(commands) == {"a": "d"}
    assert in_flight(desk)["d"][0] == 2


def test_a_profile_named_prefill_need_not_prefill() -> None:
    desk = Desk("plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: prefill}]", "i")
    desk.arrive("a", "b")
    desk.tell(FirstToken("a"))
    assert in_flight(desk)["i"][0] == 2, "it still answers"
    for name in "ab":
        desk.tell(Ended(name))
    assert in_flight(desk)["i"] == (0, 0)


@pytest.mark.parametrize("document", ["", GATE + ONE_EACH, ONE_EACH, DISAGG])
def test_the_same_seed_gives_the_same_decisions(document: str) -> None:
    def log(seed: int) -> list[dict[str, str]]:
        desk = Desk(document, *(role(f"i{n}", "both", n) for n in range(8)), seed=seed)
        return [sent(desk.arrive(f"r{n}", prompt=f"{n}" * 400)) for n in range(6)]

    assert log(1) == log(1)
    assert any(log(1) != log(seed) for seed in range(2, 6)), "ties are broken by the dice"


# Time, and events that are wrong


def test_a_timer_that_fires_a_little_early_is_set_again() -> None:
    desk = Desk(GATE + ONE_EACH + "flowControl: {defaultRequestTTL: 10s}", "i")
    [wake] = [c for c in desk.arrive("a", "b") if isinstance(c, WakeAt)]
    assert wake.at == 10.0
    assert [c for c in desk.tell(TimerFired(), 9.999) if isinstance(c, WakeAt)] == [WakeAt(10.0)]
    assert refused(desk.tell(TimerFired(), 10.0)).keys() == {"b"}


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (Left("typo"), UnknownName),
        (Measured("typo", Metrics()), UnknownName),
        (Joined(instance("i")), ConfigError),
    ],
)
def test_an_invalid_event_loses_no_refusal(event: DispatcherEvent, error: type[Exception]) -> None:
    desk = Desk(GATE + ONE_EACH + "flowControl: {defaultRequestTTL: 10s}", "i")
    desk.arrive("a", "b")
    with pytest.raises(error):
        desk.tell(event, 11.0)
    assert refused(desk.tell(TimerFired(), 12.0)) == {"b": (Outcome.EVICTED_TTL, 429)}
    assert refused(desk.tell(TimerFired(), 13.0)) == {}
    assert len(desk.dispatcher) == 1


def test_a_session_comes_back_to_its_instance_by_the_header_of_the_answer() -> None:
    plan = load_picker(
        "featureGates: [flowControl]\nplugins:\n- type: session-affinity-filter\n- type: random-picker\n"
    )
    dispatcher = Dispatcher(plan.dispatch_plan())
    for name in "abcdefgh":
        dispatcher.handle(Joined(ExecutionInstance(instance_id=name)), 0.0)
        dispatcher.handle(Measured(name, Metrics()), 0.0)
    [first] = [c for c in dispatcher.handle(Arrived((RequestMetadata("r0"),)), 0.0) if isinstance(c, Send)]
    token = first.response_headers["x-session-token"]
    for number in range(1, 6):
        again = RequestMetadata(f"r{number}", headers={"x-session-token": token})
        [sent] = [c for c in dispatcher.handle(Arrived((again,)), 0.0) if isinstance(c, Send)]
        assert sent.endpoint is first.endpoint


def test_each_stage_of_a_session_comes_back_to_its_own_instance() -> None:
    plan = load_picker("""\
plugins:
- type: disagg-profile-handler
  parameters: {deciders: {prefill: always-disagg-pd-decider}}
- type: always-disagg-pd-decider
- type: prefill-filter
- type: decode-filter
- type: session-affinity-filter
  name: decode-session
- type: session-affinity-filter
  name: prefill-session
  parameters: {profileName: prefill, encodedEndpointHeaderConfig: {header: x-prefill-token}}
- type: random-picker
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: prefill-filter}, {pluginRef: prefill-session}]
- name: decode
  plugins: [{pluginRef: decode-filter}, {pluginRef: decode-session}]
""")
    dispatcher = Dispatcher(plan.dispatch_plan())
    for number in range(8):
        for role in ("prefill", "decode"):
            labels = {"llm-d.ai/role": role}
            one = ExecutionInstance(instance_id=f"{role}-{number}", host=f"{role}-{number}", port=80, labels=labels)
            dispatcher.handle(Joined(one), 0.0)

    def turn(name: str, headers: dict[str, str]) -> Send:
        [sent] = dispatcher.handle(Arrived((RequestMetadata(name, headers=headers),)), 0.0)
        assert isinstance(sent, Send)
        return sent

    first = turn("r0", {})
    for number in range(1, 9):
        again = turn(f"r{number}", dict(first.response_headers))
        assert again.endpoint is first.endpoint
        assert again.headers["x-prefiller-host-port"] == first.headers["x-prefiller-host-port"]


def test_the_expected_answer_is_in_flight_until_it_ends() -> None:
    parameters = "{addEstimatedOutputTokens: true, maxEstimatedOutputTokens: 200}"
    desk = Desk(f"plugins:\n- {{type: inflight-load-producer, parameters: {parameters}}}\n", "i")
    desk.arrive("a", prompt_tokens=50)
    tokens = desk.dispatcher.fleet.roster.column(IN_FLIGHT_TOKENS)
    assert list(tokens) == [250]
    desk.tell(FirstToken("a"))
    assert list(tokens) == [200]
    desk.tell(Ended("a"))
    assert list(tokens) == [0]
