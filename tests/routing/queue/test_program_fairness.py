"""Programs, such as the sessions of agents, share by what each was served lately."""

from typing import Any

import pytest

from pointsman.routing.queue import AgentIdentity, BandSettings, FlowControl, ProgramAwareFairness, Queued
from pointsman.types import RequestMetadata


def queue_with(policy: ProgramAwareFairness) -> FlowControl:
    return FlowControl(default_band=BandSettings(fairness=policy))


def offer(queue: FlowControl, program: str, name: str, now: float = 0.0, tokens: int = 0) -> Queued:
    headers = {"x-llm-d-inference-fairness-id": program}
    item = Queued(RequestMetadata(name, headers=headers, prompt_tokens=tokens))
    assert queue.offer(item, now, False).refusal is None
    return item


def pop(queue: FlowControl, now: float = 0.0) -> Queued:
    item = queue.pop(now, 0.0)
    assert item is not None
    queue.served(item)
    return item


def served(queue: FlowControl, program: str, *, input_tokens: int, output: int, at: float) -> None:
    """A request of a program is served from beginning to end."""
    offer(queue, program, f"{program}-{at}", at, input_tokens)
    queue.ended(pop(queue, at), output, at)


def test_the_program_that_was_served_least_goes_first() -> None:
    policy = ProgramAwareFairness(las_weight_head_wait=0.0)
    queue = queue_with(policy)
    served(queue, "greedy", input_tokens=100, output=200, at=0.0)
    served(queue, "modest", input_tokens=10, output=5, at=0.0)
    assert (policy.service("greedy", 0.0), policy.service("modest", 0.0)) == (500.0, 20.0), "output counts twice"
    for program in ("greedy", "modest", "new"):
        offer(queue, program, program, 1.0)
    assert [pop(queue, 1.0).flow for _ in range(3)] == ["new", "modest", "greedy"]


def test_service_halves_with_time() -> None:
    policy = ProgramAwareFairness(las_half_life_seconds=60.0)
    queue = queue_with(policy)
    served(queue, "a", input_tokens=80, output=0, at=0.0)
    assert policy.service("a", 60.0) == pytest.approx(40.0)
    assert policy.service("a", 180.0) == pytest.approx(10.0)
    served(queue, "a", input_tokens=30, output=0, at=180.0)
    assert policy.service("a", 180.0) == pytest.approx(40.0)
    late = 60.0 * 5000
    served(queue, "a", input_tokens=8, output=0, at=late)
    assert policy.service("a", late) == pytest.approx(8.0), "numbers stay finite over any time"


def test_without_a_half_life_a_factor_per_second_applies() -> None:
    policy = ProgramAwareFairness(las_half_life_seconds=0.0, las_decay_factor=0.5)
    served(queue_with(policy), "a", input_tokens=80, output=0, at=0.0)
    assert policy.service("a", 3.0) == pytest.approx(10.0)
    steady = ProgramAwareFairness(las_half_life_seconds=0.0, las_decay_factor=1.0)
    served(queue_with(steady), "a", input_tokens=80, output=0, at=0.0)
    assert steady.service("a", 1e6) == pytest.approx(80.0)


@pytest.mark.parametrize(("of_wait", "first"), [(0.0, "served less"), (0.79, "served less"), (0.81, "waits longer")])
def test_how_long_a_head_has_waited_counts_too(of_wait: float, first: str) -> None:
    queue = queue_with(ProgramAwareFairness(las_weight_service=0.8, las_weight_head_wait=of_wait))
    served(queue, "waits longer", input_tokens=50, output=0, at=0.0)
    offer(queue, "waits longer", "x", 1.0)
    offer(queue, "served less", "y", 2.0)
    assert pop(queue, 3.0).flow == first


def test_equal_programs_go_in_order_of_arrival() -> None:
    queue = queue_with(ProgramAwareFairness())
    for program in ("c", "a", "b"):
        offer(queue, program, program)
    assert [pop(queue).flow for _ in range(3)] == ["c", "a", "b"]


def test_requests_served_in_vain_do_not_count() -> None:
    policy = ProgramAwareFairness()
    queue = queue_with(policy)
    offer(queue, "a", "r", tokens=50)
    queue.ended(pop(queue), 0)
    assert policy.service("a", 0.0) == 0.0


def test_programs_that_have_ended_are_forgotten_unless_they_run() -> None:
    policy = ProgramAwareFairness(eviction_ttl_seconds=100.0, eviction_sweep_seconds=10.0)
    queue = queue_with(policy)
    served(queue, "gone", input_tokens=1, output=0, at=0.0)
    served(queue, "runs", input_tokens=1, output=0, at=0.0)
    offer(queue, "runs", "long", 1.0)
    running = pop(queue, 1.0)
    served(queue, "other", input_tokens=1, output=0, at=200.0)
    assert set(policy.programs) == {"runs", "other"}
    queue.ended(running, 7, 250.0)
    assert policy.service("runs", 250.0) > 0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"las_weight_service": -0.1}, "lasWeightService is -0.1; it must be 0 or more"),
        ({"las_decay_factor": 0.0}, "lasDecayFactor is 0; it must be above 0 and at most 1"),
        ({"las_decay_factor": 1.1}, "lasDecayFactor is 1.1"),
        ({"las_half_life_seconds": -1.0}, "lasHalfLifeSeconds is -1"),
        ({"eviction_sweep_seconds": 0.0}, "evictionSweepSeconds is 0; it must be above 0"),
    ],
)
def test_bad_parameters(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProgramAwareFairness(**parameters)


# Which program a request belongs to


@pytest.mark.parametrize(
    ("headers", "user", "flow"),
    [
        ({}, "", "default-flow"),
        ({}, "ann", "ann"),
        ({"x-claude-code-session-id": "c1"}, "", "c1"),
        ({"x-session-affinity": "o1"}, "", "o1"),
        ({"session-id": "d1", "session_id": "d2"}, "", "d1"),
        ({"session_id": "d2"}, "", "d2"),
        ({"session-id": "d1", "x-claude-code-session-id": "c1"}, "", "c1"),
        ({"x-mine": "m1", "x-claude-code-session-id": "c1"}, "", "m1"),
        ({"x-mine": "", "session-id": "d1"}, "", "d1"),
        ({"session-id": "d1"}, "ann", "ann/d1"),
        ({"session-id": "d1", "x-llm-d-inference-fairness-id": "explicit"}, "ann", "explicit"),
        ({"session-id": "d1", "x-gateway-inference-fairness-id": "older"}, "", "older"),
    ],
)
def test_the_session_of_an_agent_is_its_flow(headers: dict[str, str], user: str, flow: str) -> None:
    request = RequestMetadata("r", headers=headers, user_id=user)
    assert AgentIdentity(["X-Mine"]).name_flow(request) == flow


def test_a_queue_names_flows_by_it() -> None:
    queue = FlowControl(default_band=BandSettings(flow_of=AgentIdentity().name_flow))
    item = Queued(RequestMetadata("r", headers={"session-id": "d1"}))
    queue.offer(item, 0.0, False)
    assert item.flow == "d1"


def test_names_of_sessions_are_bounded() -> None:
    assert len(AgentIdentity().name_flow(RequestMetadata("r", headers={"session-id": "x" * 10_000}))) == 256


def test_an_empty_header_name_is_refused() -> None:
    with pytest.raises(ValueError, match="additionalSessionHeaders has an empty name"):
        AgentIdentity([""])
