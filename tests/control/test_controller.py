"""The lifecycle of one instance: each case lists times, events and the commands that follow."""

import pytest

from pointsman.control.events import (
    Answered,
    Applied,
    ControllerEvent,
    ControllerTimer,
    DrainAsked,
    Drained,
    Exited,
    LaunchFailed,
    OutOfReach,
    PlaneStopping,
    ProbeNotMade,
    RequestsFail,
    Silent,
)
from pointsman.control.instances import Phase
from pointsman.reasons import Reason
from tests.control.worlds import HOST, PORT, World, adopted, deployment, launched, said, wish, with_lifecycle

Story = list[tuple[float, ControllerEvent, list[str]]]

ONE = deployment()
TICK = ControllerTimer()
ANSWERS, WORKS = Answered("m-1", readiness=False), Answered("m-1", readiness=True)
REFUSED = Silent("m-1", "connection refused")
UNASKED = ProbeNotMade("m-1", "too many open files")
CRASH = Exited("m-1", "exit code 1")
UNLAUNCHED = LaunchFailed("m-1", "too many open files", local="files")
NO_MORE = Applied(wish())

LAUNCHED: Story = [
    (0, Applied(wish(ONE)), ["Launch m-1"]),
    (0, launched("m-1"), ["Probe m-1, readiness"]),
]
READY: Story = [*LAUNCHED, (1, WORKS, ["Admit m-1"])]
DRAINING: Story = [*READY, (2, NO_MORE, ["Update m-1, closed", "AwaitDrained m-1"])]
STOPPED: Story = [*DRAINING, (3, Drained("m-1"), ["Withdraw m-1", "Terminate m-1"])]
HUNG: Story = [
    *READY,
    (3, TICK, ["Probe m-1, health"]),
    (4, Silent("m-1", "no answer in 5 s"), []),
    (6, TICK, ["Probe m-1, health"]),
    (7, Silent("m-1", "no answer in 5 s"), ["Withdraw m-1", "Terminate m-1"]),
]
DOUBTED: Story = [
    *READY,
    (2, RequestsFail("m-1", Reason("status 500")), ["Update m-1, closed", "Probe m-1, readiness"]),
]

STORIES: dict[str, Story] = {
    "it is in service after real work, not when it only says that it is healthy": [
        *LAUNCHED,
        (1, ANSWERS, []),
        (2, WORKS, ["Admit m-1"]),
    ],
    "it is probed until it does real work, at growing intervals": [
        *LAUNCHED,
        (0, REFUSED, []),
        (0.04, TICK, []),
        (0.05, TICK, ["Probe m-1, readiness"]),
        (10, REFUSED, []),
        (10.9, TICK, []),
        (11, TICK, ["Probe m-1, readiness"]),
        (50, REFUSED, []),
        (52, TICK, ["Probe m-1, readiness"]),
    ],
    "one that cannot be launched is tried again after the backoff": [
        (0, Applied(wish(ONE)), ["Launch m-1"]),
        (0, LaunchFailed("m-1", "no such file"), []),
        (0.9, TICK, []),
        (1, TICK, ["Launch m-1"]),
        (1, LaunchFailed("m-1", "no such file"), []),
        (2.9, TICK, []),
        (3, TICK, ["Launch m-1"]),
    ],
    "one that is not ready in time is killed and tried again": [
        *LAUNCHED,
        (1, REFUSED, []),
        (100, TICK, ["Kill m-1"]),
        (101, CRASH, []),
        (102, TICK, ["Launch m-1"]),
    ],
    "one that takes too long even to be launched is killed, and again when it is there": [
        (0, Applied(wish(ONE)), ["Launch m-1"]),
        (100, TICK, ["Kill m-1"]),
        (105, launched("m-1"), ["Kill m-1"]),
        (106, CRASH, []),
        (107, TICK, ["Launch m-1"]),
    ],
    "its health is probed at intervals": [
        *READY,
        (2.9, TICK, []),
        (3, TICK, ["Probe m-1, health"]),
        (4, TICK, []),
        (4.5, ANSWERS, []),
        (6.4, TICK, []),
        (6.5, TICK, ["Probe m-1, health"]),
    ],
    "one probe that fails is forgiven": [
        *READY,
        (3, TICK, ["Probe m-1, health"]),
        (3, REFUSED, []),
        (5, TICK, ["Probe m-1, health"]),
        (5, ANSWERS, []),
        (7, TICK, ["Probe m-1, health"]),
        (7, REFUSED, []),
    ],
    "one that cannot be probed for a reason of the plane stays in service, and is probed later": [
        *READY,
        (3, TICK, ["Probe m-1, health"]),
        (3, UNASKED, []),
        (5, TICK, ["Probe m-1, health"]),
        (5, UNASKED, []),
        (7, TICK, ["Probe m-1, health"]),
        (7, REFUSED, []),
        (9, TICK, ["Probe m-1, health"]),
        (9, UNASKED, []),
        (11, TICK, ["Probe m-1, health"]),
        (11, REFUSED, ["Withdraw m-1", "Terminate m-1"]),
    ],
    "one that starts is not killed for time in which it could not be probed": [
        *LAUNCHED,
        (60, UNASKED, []),
        (62, TICK, ["Probe m-1, readiness"]),
        (99, UNASKED, []),
        (101, TICK, ["Probe m-1, readiness"]),
        (102, REFUSED, []),
        (104, TICK, ["Probe m-1, readiness"]),
        (199, TICK, ["Kill m-1"]),
    ],
    "one that answers requests is probed an interval after the last of them": [
        *READY,
        (3, TICK, ["Probe m-1, health"]),
        (3, Answered("m-1", readiness=False, ago_s=0.5), []),
        (4.4, TICK, []),
        (4.5, TICK, ["Probe m-1, health"]),
    ],
    "one that fails requests and cannot be probed is probed again": [
        *DOUBTED,
        (2, UNASKED, []),
        (4, TICK, ["Probe m-1, readiness"]),
        (5, WORKS, ["Update m-1"]),
    ],
    "one that the plane has not the means to launch is tried again soon, however often": [
        (0, Applied(wish(ONE)), ["Launch m-1"]),
        *(
            (2.0 * step, event, said)
            for step in range(8)
            for event, said in ((TICK, ["Launch m-1"] if step else []), (UNLAUNCHED, []))
        ),
        (16, TICK, ["Launch m-1"]),
        (16, CRASH, []),
        (17, TICK, ["Launch m-1"]),
    ],
    "one that hangs is taken out of service, ended, killed, and started again": [
        *HUNG,
        (16.9, TICK, []),
        (17, TICK, ["Kill m-1"]),
        (18, CRASH, []),
        (19, TICK, ["Launch m-1"]),
    ],
    "one that was killed once is killed again": [
        *LAUNCHED,
        (100, TICK, ["Kill m-1"]),
        (100, CRASH, []),
        (101, TICK, ["Launch m-1"]),
        (101, launched("m-1"), ["Probe m-1, readiness"]),
        (102, NO_MORE, ["Terminate m-1"]),
        (112, TICK, ["Kill m-1"]),
    ],
    "a hung instance that ends on request is not killed": [*HUNG, (8, CRASH, []), (9, TICK, ["Launch m-1"])],
    "one that crashes is taken out of service and started again after the backoff": [
        *READY,
        (5, CRASH, ["Withdraw m-1"]),
        (5.9, TICK, []),
        (6, TICK, ["Launch m-1"]),
        (6, launched("m-1"), ["Probe m-1, readiness"]),
        (6, WORKS, ["Admit m-1"]),
        (8, CRASH, ["Withdraw m-1"]),
        (9.9, TICK, []),
        (10, TICK, ["Launch m-1"]),
    ],
    "one that fails requests gets no new ones until it does real work": [
        *DOUBTED,
        (2, RequestsFail("m-1", Reason("status 500")), []),
        (2.5, ANSWERS, []),
        (3, WORKS, ["Update m-1"]),
        (5, TICK, ["Probe m-1, health"]),
    ],
    "one whose worker does not answer gets no requests until it does, as often as that happens": [
        *READY,
        (2, OutOfReach("m-1", "its worker w does not answer"), ["Update m-1, closed", "Probe m-1, readiness"]),
        (2, UNASKED, []),
        (7, TICK, ["Probe m-1, readiness"]),
        (7, WORKS, ["Update m-1"]),
        (7.1, OutOfReach("m-1", "its worker w does not answer"), ["Update m-1, closed", "Probe m-1, readiness"]),
        (7.2, WORKS, ["Update m-1"]),
    ],
    "one that fails requests and does no real work is restarted": [
        *DOUBTED,
        (3, Silent("m-1", "status 500"), ["Withdraw m-1", "Terminate m-1"]),
        (4, CRASH, []),
        (5, TICK, ["Launch m-1"]),
    ],
    "one that fails requests again as soon as a probe has spoken for it is restarted": [
        *DOUBTED,
        (3, WORKS, ["Update m-1"]),
        (4.9, RequestsFail("m-1", Reason("status 500")), ["Withdraw m-1", "Terminate m-1"]),
        (5, CRASH, []),
        (6, TICK, ["Launch m-1"]),
        (6, launched("m-1"), ["Probe m-1, readiness"]),
        (7, WORKS, ["Admit m-1"]),
        (7, RequestsFail("m-1", Reason("status 500")), ["Update m-1, closed", "Probe m-1, readiness"]),
    ],
    "one that fails requests again much later gets another chance": [
        *DOUBTED,
        (3, WORKS, ["Update m-1"]),
        (5, RequestsFail("m-1", Reason("status 500")), ["Update m-1, closed", "Probe m-1, readiness"]),
    ],
    "one that fails requests and crashes is restarted": [*DOUBTED, (3, CRASH, ["Withdraw m-1"])],
    "one that fails requests and is not wanted is drained": [*DOUBTED, (3, NO_MORE, ["AwaitDrained m-1"])],
    "one that is not wanted is drained, ended and gone": [*STOPPED, (4, CRASH, []), (99, TICK, [])],
    "one that does not end is killed": [*STOPPED, (12.9, TICK, []), (13, TICK, ["Kill m-1"]), (99, TICK, [])],
    "one that does not become idle is stopped in the end": [
        *DRAINING,
        (61.9, TICK, []),
        (62, TICK, ["Withdraw m-1", "Terminate m-1"]),
        (63, Drained("m-1"), []),
    ],
    "one that crashes while it is drained is gone": [*DRAINING, (3, CRASH, ["Withdraw m-1"]), (99, TICK, [])],
    "a draining instance is not probed, and late answers do not count": [
        *READY,
        (3, TICK, ["Probe m-1, health"]),
        (4, NO_MORE, ["Update m-1, closed", "AwaitDrained m-1"]),
        (5, REFUSED, []),
        (5, WORKS, []),
        (5, RequestsFail("m-1", Reason("status 500")), []),
        (9, TICK, []),
    ],
    "one that starts and is not wanted is ended": [*LAUNCHED, (1, NO_MORE, ["Terminate m-1"]), (2, WORKS, [])],
    "one that is not wanted before it is launched is ended, and again when it is there": [
        (0, Applied(wish(ONE)), ["Launch m-1"]),
        (1, NO_MORE, ["Terminate m-1"]),
        (2, launched("m-1"), ["Terminate m-1"]),
        (3, CRASH, []),
    ],
    "one that is not wanted and never launched is gone": [
        (0, Applied(wish(ONE)), ["Launch m-1"]),
        (1, NO_MORE, ["Terminate m-1"]),
        (2, LaunchFailed("m-1", "no such file"), []),
        (99, TICK, []),
    ],
    "one that waits for its restart and is not wanted is gone": [
        *READY,
        (5, CRASH, ["Withdraw m-1"]),
        (5.5, NO_MORE, []),
        (99, TICK, []),
    ],
    "one that is stopped because it hung, and then is not wanted, is gone": [
        *HUNG,
        (8, NO_MORE, []),
        (9, CRASH, []),
        (99, TICK, []),
    ],
    "shutting down drains and ends everything, and nothing is started": [
        *READY,
        (2, PlaneStopping(), ["Update m-1, closed", "AwaitDrained m-1"]),
        (3, Drained("m-1"), ["Withdraw m-1", "Terminate m-1"]),
        (4, Applied(wish(deployment(replicas=5))), []),
        (5, CRASH, []),
        (6, Applied(wish(deployment(replicas=6))), []),
    ],
    "shutting down does not wait for restarts": [*READY, (5, CRASH, ["Withdraw m-1"]), (5, PlaneStopping(), [])],
    "an adopted instance that is wanted is probed, not started": [
        (0, adopted("m-1", ONE), []),
        (1, Applied(wish(ONE)), ["Probe m-1, readiness"]),
        (2, WORKS, ["Admit m-1"]),
    ],
    "an adopted instance that is not wanted is stopped": [
        (0, adopted("m-1", ONE), []),
        (1, NO_MORE, ["Terminate m-1"]),
        (2, CRASH, []),
    ],
    "what an earlier plane left is ended if it is too many": [
        (0, adopted("m-3", ONE), []),
        (0, adopted("m-1", ONE), []),
        (1, Applied(wish(ONE)), ["Terminate m-3", "Probe m-1, readiness"]),
    ],
    "what an earlier plane started from another recipe is started anew": [
        (0, adopted("m-1", deployment(version=7)), []),
        (1, Applied(wish(ONE)), ["Terminate m-1"]),
        (2, WORKS, []),
        (3, CRASH, ["Launch m-1"]),
    ],
    "an adopted instance is stopped on shutdown before anything was applied": [
        (0, adopted("m-1", ONE), []),
        (1, PlaneStopping(), ["Terminate m-1"]),
    ],
    "what is adopted late is taken in if there is room for it": [
        (0, Applied(wish(ONE)), ["Launch m-1"]),
        (0, LaunchFailed("m-1", "it is there already"), []),
        (0.5, adopted("m-1", ONE), ["Probe m-1, readiness"]),
        (1, adopted("m-1", ONE), []),
        (1, adopted("m-2", ONE), ["Terminate m-2"]),
    ],
    "late news changes nothing": [
        (0, Exited("m-1", "long ago"), []),
        (0, launched("m-1"), []),
        (0, WORKS, []),
        *READY,
        (1, launched("m-1"), []),
        (1, LaunchFailed("m-1", "no such file"), []),
        (1, WORKS, []),
        (1, REFUSED, []),
        (1, Drained("m-1"), []),
        (2, CRASH, ["Withdraw m-1"]),
        (2, CRASH, []),
        (2, launched("m-1"), []),
        (2, WORKS, []),
        (2, RequestsFail("m-1", Reason("reset")), []),
    ],
    "an operator's drain starts another first": [
        *READY,
        (2, DrainAsked("m-1"), ["Launch m-2"]),
        (2, DrainAsked("m-1"), []),
        (2, launched("m-2"), ["Probe m-2, readiness"]),
        (3, Answered("m-2", readiness=True), ["Admit m-2", "Update m-1, closed", "AwaitDrained m-1"]),
        (3, DrainAsked("m-1"), []),
        (3, Drained("m-1"), ["Withdraw m-1", "Terminate m-1"]),
        (3, CRASH, []),
    ],
    "an operator's drain of one that does not serve ends it at once": [
        *LAUNCHED,
        (2, DrainAsked("m-1"), ["Terminate m-1", "Launch m-2"]),
        (3, CRASH, []),
    ],
    "an operator's drain of one that fails before another is ready lets it go": [
        *READY,
        (2, DrainAsked("m-1"), ["Launch m-2"]),
        (3, CRASH, ["Withdraw m-1"]),
        (9, TICK, []),
    ],
    "draining an unknown instance does nothing": [(0, DrainAsked("m-9"), [])],
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_the_controller_answers_each_event(story: Story) -> None:
    world = World()
    for at, event, expected in story:
        assert said(world.tell(event, at)) == expected, (at, event)


@pytest.mark.parametrize(
    ("story", "reason"),
    [
        (READY, ""),
        ([*LAUNCHED, (0, REFUSED, [])], "not ready yet: connection refused"),
        (HUNG, "did not answer 2 probes in a row: no answer in 5 s"),
        ([*HUNG, (18, CRASH, [])], "did not answer 2 probes in a row: no answer in 5 s"),
        ([*READY, (2, CRASH, []), (3, TICK, []), (3, launched("m-1"), []), (3, REFUSED, [])], "exit code 1"),
        ([*LAUNCHED, (0, REFUSED, []), (100, TICK, [])], "not ready 100 s after its launch: connection refused"),
        ([*LAUNCHED, (100, TICK, [])], "not ready 100 s after its launch"),
        (
            [(0, Applied(wish(ONE)), []), (0, LaunchFailed("m-1", "no such file"), [])],
            "could not be started: no such file",
        ),
        (
            [(0, Applied(wish(ONE)), []), (0, UNLAUNCHED, [])],
            "could not be started, for a reason of the plane: too many open files; raise the limit of open files of "
            "the plane (ulimit -n, LimitNOFILE)",
        ),
        ([(0, Applied(wish(ONE)), []), (0, UNLAUNCHED, []), (2, TICK, [])], ""),
        ([*LAUNCHED, (0, UNASKED, [])], "not ready yet: too many open files"),
        (DOUBTED, "requests fail on it: status 500"),
        ([*DOUBTED, (3, REFUSED, [])], "requests fail on it: status 500; and a probe failed: connection refused"),
        (DRAINING, 'deployment "m" was removed'),
        ([*READY, (2, DrainAsked("m-1"), [])], "to be replaced: an operator asked for it to be drained"),
        ([*READY, (2, PlaneStopping(), [])], "the plane is stopping"),
    ],
)
def test_the_status_has_the_reason(story: Story, reason: str) -> None:
    world = World()
    for at, event, _ in story:
        world.tell(event, at)
    assert str(world.status("m-1").reason or "") == reason


def test_the_reason_when_a_single_probe_may_not_fail() -> None:
    world = World()
    world.apply(with_lifecycle(ONE, failures_until_unhealthy=1))
    world.behave(1.0)
    world.tell(TICK, 3.0)
    assert said(world.tell(REFUSED)) == ["Withdraw m-1", "Terminate m-1"]
    assert str(world.status("m-1").reason) == "did not answer a probe: connection refused"


def test_the_status_of_an_instance() -> None:
    world = World()
    world.apply(ONE)
    status = world.status("m-1")
    assert (status.phase, status.host, status.process, status.in_service) == (Phase.STARTING, "", None, False)
    assert (status.since, status.until) == (0.0, 100.0)
    world.tell(launched("m-1"), 1.0)
    world.tell(WORKS, 2.0)
    status = world.status("m-1")
    assert (status.phase, status.host, status.port, status.in_service) == (Phase.READY, HOST, PORT, True)
    assert (status.since, status.until, status.restarts) == (2.0, None, 0)
    world.tell(CRASH, 5.0)
    status = world.status("m-1")
    assert (status.phase, status.process, status.since, status.until) == (Phase.BACKING_OFF, None, 5.0, 6.0)
    world.tell(TICK, 6.0)
    status = world.status("m-1")
    assert (status.restarts, status.host, status.port) == (1, "", 0)
