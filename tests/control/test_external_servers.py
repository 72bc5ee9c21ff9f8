"""Servers that were started elsewhere are probed, and never started or stopped."""

import pytest

from pointsman.control.events import (
    Admit,
    Answered,
    Applied,
    ControllerEvent,
    ControllerTimer,
    DrainAsked,
    Drained,
    Exited,
    LaunchFailed,
    PlaneStopping,
    Probe,
    RequestsFail,
    Silent,
)
from pointsman.reasons import Reason
from pointsman.types import ExecutionInstance
from tests.control.worlds import World, adopted, deployment, launched, said, server, servers, wish

Story = list[tuple[float, ControllerEvent, list[str]]]

LISTED = Applied(wish(servers(server())))
NOT_LISTED = Applied(wish(servers()))
TICK = ControllerTimer()
ANSWERS, WORKS = Answered("gpu", readiness=False), Answered("gpu", readiness=True)
REFUSED = Silent("gpu", "connection refused")

READY: Story = [(0, LISTED, ["Probe gpu, readiness"]), (1, WORKS, ["Admit gpu"])]
DRAINING: Story = [*READY, (2, NOT_LISTED, ["Update gpu, closed", "AwaitDrained gpu"])]
SILENT: Story = [
    *READY,
    (3, TICK, ["Probe gpu, health"]),
    (3, REFUSED, []),
    (5, TICK, ["Probe gpu, health"]),
    (5, REFUSED, ["Withdraw gpu"]),
]

STORIES: dict[str, Story] = {
    "it is probed with backoff without a limit": [
        (0, LISTED, ["Probe gpu, readiness"]),
        (0, ANSWERS, []),
        (0, REFUSED, []),
        (0.9, TICK, []),
        (1, TICK, ["Probe gpu, readiness"]),
        (1, REFUSED, []),
        (2.9, TICK, []),
        (3, TICK, ["Probe gpu, readiness"]),
        (500, REFUSED, []),
        (503.9, TICK, []),
        (504, TICK, ["Probe gpu, readiness"]),
        (505, WORKS, ["Admit gpu"]),
    ],
    "it is withdrawn when it is silent, and back when it does real work": [
        *SILENT,
        (5.9, TICK, []),
        (6, TICK, ["Probe gpu, readiness"]),
        (6, REFUSED, []),
        (8, TICK, ["Probe gpu, readiness"]),
        (9, WORKS, ["Admit gpu"]),
        (11, TICK, ["Probe gpu, health"]),
    ],
    "it is kept if it does real work although requests failed": [
        *READY,
        (2, RequestsFail("gpu", Reason("reset")), ["Update gpu, closed", "Probe gpu, readiness"]),
        (3, WORKS, ["Update gpu"]),
    ],
    "it is withdrawn if requests fail and it does no real work": [
        *READY,
        (2, RequestsFail("gpu", Reason("reset")), ["Update gpu, closed", "Probe gpu, readiness"]),
        (3, REFUSED, ["Withdraw gpu"]),
        (4, TICK, ["Probe gpu, readiness"]),
    ],
    "it is withdrawn if requests fail again as soon as a probe has spoken for it": [
        *READY,
        (2, RequestsFail("gpu", Reason("reset")), ["Update gpu, closed", "Probe gpu, readiness"]),
        (3, WORKS, ["Update gpu"]),
        (4, RequestsFail("gpu", Reason("reset")), ["Withdraw gpu"]),
        (5, TICK, ["Probe gpu, readiness"]),
    ],
    "it is drained and forgotten when it is no longer listed": [
        *DRAINING,
        (3, Drained("gpu"), ["Withdraw gpu"]),
        (99, TICK, []),
        (99, LISTED, ["Probe gpu, readiness"]),
    ],
    "it is forgotten after the time to drain": [*DRAINING, (62, TICK, ["Withdraw gpu"]), (63, Drained("gpu"), [])],
    "it is forgotten at once if it does not serve": [(0, LISTED, ["Probe gpu, readiness"]), (1, NOT_LISTED, [])],
    "it is forgotten at once if it was silent": [*SILENT, (6, NOT_LISTED, []), (99, TICK, [])],
    "an operator's drain keeps it out": [
        *READY,
        (2, DrainAsked("gpu"), ["Update gpu, closed", "AwaitDrained gpu"]),
        (3, Drained("gpu"), ["Withdraw gpu"]),
        (3, Drained("gpu"), []),
        (99, TICK, []),
        (99, LISTED, []),
        (99, NOT_LISTED, []),
        (99, LISTED, ["Probe gpu, readiness"]),
    ],
    "an operator's drain keeps it out before it was in": [
        (0, LISTED, ["Probe gpu, readiness"]),
        (1, DrainAsked("gpu"), []),
        (2, WORKS, []),
        (99, TICK, []),
        (99, NOT_LISTED, []),
    ],
    "it is no longer listed while an operator's drain lasts": [
        *READY,
        (2, DrainAsked("gpu"), ["Update gpu, closed", "AwaitDrained gpu"]),
        (3, NOT_LISTED, []),
        (4, Drained("gpu"), ["Withdraw gpu"]),
        (4, LISTED, ["Probe gpu, readiness"]),
    ],
    "shutting down drains it and leaves it running": [
        *READY,
        (2, PlaneStopping(), ["Update gpu, closed", "AwaitDrained gpu"]),
        (3, Drained("gpu"), ["Withdraw gpu"]),
    ],
    "events of a process are ignored": [
        *READY,
        (2, launched("gpu"), []),
        (2, LaunchFailed("gpu", "what?"), []),
        (2, Exited("gpu", "what?"), []),
        (3, TICK, ["Probe gpu, health"]),
    ],
    "one that has moved is another, and the old one serves until that is ready": [
        *READY,
        (2, Applied(wish(servers(server(port=2)))), ["Probe m-gpu, readiness"]),
        (3, Answered("m-gpu", readiness=True), ["Admit m-gpu", "Update gpu, closed", "AwaitDrained gpu"]),
        (4, Drained("gpu"), ["Withdraw gpu"]),
    ],
    "one that has moved and did not serve before is another at once": [
        *SILENT,
        (5, Applied(wish(servers(server(port=2)))), ["Probe m-gpu, readiness"]),
        (9, TICK, []),
    ],
    "settings that need no new server are updated": [
        *READY,
        (2, Applied(wish(servers(server(max_concurrency=3)))), ["Update gpu"]),
        (2, Applied(wish(servers(server(max_concurrency=3, labels={"zone": "a"})))), ["Update gpu"]),
    ],
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_the_controller_answers_each_event(story: Story) -> None:
    world = World()
    for at, event, expected in story:
        assert said(world.tell(event, at)) == expected, (at, event)


def test_what_dispatchers_are_told() -> None:
    world = World()
    endpoint = server(max_concurrency=4, labels={"zone": "b", "gpu": "yes"})
    world.apply(servers(endpoint, labels={"zone": "a", "team": "x"}, aliases=("chat",), engine_slots=99))
    [admit] = [c for c in world.tell(WORKS) if isinstance(c, Admit)]
    assert admit.instance == ExecutionInstance(
        instance_id="gpu",
        host="gpu",
        port=1,
        model_name="llama",
        adapters=frozenset({"chat"}),
        engine_names={"chat": "llama"},
        max_concurrency=4,
        labels={"zone": "b", "team": "x", "gpu": "yes"},
    )


def test_the_limit_of_a_server_comes_before_that_of_its_deployment() -> None:
    world = World()
    world.apply(servers(server("large", max_concurrency=9), server("plain"), max_concurrency=2))
    world.behave()
    assert {name: told.max_concurrency for name, told in world.in_service.items()} == {"large": 9, "plain": 2}


def test_an_https_server_is_reached_over_tls() -> None:
    world = World()
    endpoint = server()
    secure = type(endpoint)(name="gpu", url="https://[::1]:8443")
    [probe] = [c for c in world.tell(Applied(wish(servers(secure)))) if isinstance(c, Probe)]
    assert probe.endpoint == secure
    world.tell(WORKS)
    told = world.in_service["gpu"]
    assert (told.host, told.port, told.tls) == ("::1", 8443, True)
    assert world.status("gpu").endpoint == secure


def test_the_times_of_its_status() -> None:
    world = World()
    world.tell(LISTED, 7.0)
    status = world.status("gpu")
    assert (status.phase.value, status.since, status.until) == ("starting", 7.0, None)
    world.tell(REFUSED, 500.0)
    [probe] = [c for c in world.tell(TICK, 600.0) if isinstance(c, Probe)]
    assert probe.timeout_s == 5.0


def test_the_reason_of_a_silent_server() -> None:
    world = World()
    for at, event, _ in SILENT:
        world.tell(event, at)
    assert str(world.status("gpu").reason) == "did not answer 2 probes in a row: connection refused"
    world.tell(TICK, 6)
    world.tell(REFUSED, 6)
    assert str(world.status("gpu").reason) == "does not answer: connection refused"


def test_a_taken_name_is_prefixed_with_the_deployment() -> None:
    world = World()
    world.tell(adopted("x", deployment("m")))
    both = (server("x", 1), server("m-1", 2))
    specs = [deployment("m", 2, endpoints=both), deployment("n", 0, endpoints=both)]
    world.apply(*specs)
    assert {one.id: one.endpoint.url for one in world.controller.instances() if one.endpoint} == {
        "m-x": "http://x:1",
        "m-m-1": "http://m-1:2",
        "n-x": "http://x:1",
        "n-m-1": "http://m-1:2",
    }


def test_equal_names_in_one_desired_state() -> None:
    world = World()
    world.apply(*(deployment(name, 0, endpoints=(server(),)) for name in ("a", "b")))
    assert {one.id: one.deployment for one in world.controller.instances()} == {"gpu": "a", "b-gpu": "b"}


def test_an_existing_server_keeps_its_name() -> None:
    world = World()
    first, second = deployment("b", 0, endpoints=(server(),)), deployment("a", 0, endpoints=(server(),))
    world.apply(first)
    world.apply(second, first)
    assert {one.id: one.deployment for one in world.controller.instances()} == {"gpu": "b", "a-gpu": "a"}


def test_external_servers_beside_our_processes() -> None:
    world = World()
    world.apply(deployment(replicas=1, endpoints=(server(),), engine_slots=8))
    world.behave()
    assert {name: told.max_concurrency for name, told in world.in_service.items()} == {"m-1": 8, "gpu": None}
