"""Why no instance takes requests, for clients that waited for one."""

import msgspec
import pytest

from pointsman.control import Desired, DesiredDeployment, DesiredEngine, InstanceStatus, Phase
from pointsman.control.status import NO_PROSPECTS, Prospects, given_up, nothing_can_start, unavailability
from pointsman.placement.asks import Place, Tier
from pointsman.reasons import Reason
from tests.control.worlds import server
from tests.scaling.test_deployment import instance

STARTING = instance("m-1", Phase.STARTING, since=90.0)
FAILED = instance(
    "m-2",
    Phase.BACKING_OFF,
    since=90.0,
    until=105.0,
    restarts=2,
    reason=Reason("exited", {"why": "exit code 7: no weights at /x"}),
)
ONCE = instance("m-2", Phase.BACKING_OFF, until=105.0)
UNPLACED = instance("m-3", Phase.BACKING_OFF, since=90.0, until=105.0, unplaced=True)


@pytest.mark.parametrize(
    ("instances", "start_up_s", "expected"),
    [
        ([], 30.0, ("its deployment has no instances and no endpoints now; an operator may add one", None)),
        ([STARTING], 30.0, ("m-1 has been starting for 10 s", 20.0)),
        ([STARTING], 5.0, ("m-1 has been starting for 10 s", 0.0)),  # any moment
        ([STARTING], None, ("m-1 has been starting for 10 s", None)),
        ([FAILED], 30.0, ("m-2 has failed 3 times, and restarts in 5 s", 35.0)),
        ([ONCE], None, ("m-2 has failed once, and restarts in 5 s", 5.0)),
        ([UNPLACED], 30.0, ("there is no place for m-3 yet", None)),
        ([UNPLACED, FAILED, STARTING], 30.0, ("m-1 has been starting for 10 s", 20.0)),
        ([instance("m-4", Phase.STOPPING)], 30.0, ("m-4 is stopping", None)),
    ],
)  # fmt: skip
def test_the_instance_that_will_be_ready_first_is_the_reason(
    instances: list[InstanceStatus], start_up_s: float | None, expected: tuple[str, float | None]
) -> None:
    found = unavailability("m", instances, start_up_s, 100.0)
    assert (str(found.why), found.retry_s) == expected


def test_endpoints_that_do_not_answer_are_counted() -> None:
    gpu, phase = server("gpu"), Phase.UNHEALTHY
    down = [instance(name, phase, endpoint=gpu, probe_at=at) for name, at in (("m-1", 103.0), ("m-2", 104.0))]
    assert str(unavailability("m", down[:1], None, 100.0).why) == "m-1 does not answer"
    assert str(unavailability("m", down, None, 100.0).why) == "none of its 2 endpoints answers, such as m-1"


# What it is of use to wait for


GPU = server("gpu")
PLACE = Place(tier=Tier.CPU, claims=())
DOWN = instance("m-gpu", Phase.UNHEALTHY, endpoint=GPU, probe_at=103.5)
LATER = instance("m-1", Phase.BACKING_OFF, until=150.0)
ROOM = Prospects(may_find_room=True)

WORTH_WAITING = {
    "it starts": [STARTING],
    "it restarts soon": [ONCE],
    "one restarts soon, others do not": [LATER, ONCE],
    "the runtime could not launch it": [instance("m-1", Phase.BACKING_OFF, until=101.0, hindered=True)],
    "it is stopped to be restarted": [instance("m-1", Phase.STOPPING, until=105.0)],
    "it is probed after failures": [instance("m-1", Phase.UNHEALTHY, in_service=True)],
    "it is ejected, and probed": [instance("m-1", Phase.EJECTED, in_service=True)],
    "it is ejected for a short time": [instance("m-1", Phase.EJECTED, in_service=True, until=105.0)],
    "an external server that was not asked yet": [instance("m-gpu", Phase.STARTING, endpoint=GPU)],
    "an external server that is probed after failures": [
        instance("m-gpu", Phase.UNHEALTHY, endpoint=GPU, in_service=True)
    ],
    "another instance gives its place back": [UNPLACED, instance("x-1", Phase.STOPPING, place=PLACE)],
    "another instance is drained": [
        UNPLACED,
        instance("x-1", Phase.DRAINING, place=PLACE, until=120.0),
    ],
}
NO_PACKAGE = Reason("no-package", {"package": "vllm", "remedy": "run: pip install vllm"})
CANNOT_START = instance(
    "m-1", Phase.BACKING_OFF, final=True, given_up=True, reason=Reason("cannot-start", {"why": NO_PACKAGE})
)
HOPELESS = {
    "none is wanted": [],
    "it is no longer wanted": [instance("m-1", Phase.DRAINING, leaving=True)],
    "it failed to start too often": [instance("m-1", Phase.STARTING, since=90.0, given_up=True)],
    "it failed to start too often, and waits": [instance("m-1", Phase.BACKING_OFF, until=101.0, given_up=True)],
    "it restarts much later": [LATER],
    "its rollout is stopped": [instance("m-1", Phase.BACKING_OFF, halted=True)],
    "it cannot start": [CANNOT_START],
    "it is ejected for long": [instance("m-1", Phase.EJECTED, in_service=True, until=300.0)],
    "an external server that is down": [DOWN],
    "an external server that never answered": [instance("m-gpu", Phase.STARTING, endpoint=GPU, has_failed=True)],
    "an external server that an operator drains": [instance("m-gpu", Phase.DRAINING, endpoint=GPU, drain_asked=True)],
    "it has no place": [UNPLACED],
    "another deployment starts": [instance("x-1", Phase.STARTING)],
}


@pytest.mark.parametrize("instances", WORTH_WAITING.values(), ids=WORTH_WAITING.keys())
def test_worth_waiting(instances: list[InstanceStatus]) -> None:
    assert not unavailability("m", instances, 30.0, 100.0).none_expected


@pytest.mark.parametrize("instances", HOPELESS.values(), ids=HOPELESS.keys())
def test_of_no_use_to_wait(instances: list[InstanceStatus]) -> None:
    found = unavailability("m", instances, 30.0, 100.0)
    assert found.none_expected
    assert str(found.why)


@pytest.mark.parametrize(
    ("instances", "prospects", "none_expected"),
    [
        ([], Prospects(may_start=True), False),
        ([UNPLACED], ROOM, False),
        ([UNPLACED], Prospects(may_start=True), True),
        ([instance("m-1", Phase.STARTING, given_up=True)], Prospects(may_start=True), True),
        ([DOWN], Prospects(may_start=True), False),
        ([instance("m-1", Phase.STOPPING, leaving=True)], Prospects(may_start=True), False),
        ([instance("m-1", Phase.DRAINING, until=120.0)], ROOM, False),  # evicted: it comes back when it is its turn
        ([], ROOM, True),
        ([LATER], NO_PROSPECTS, True),
    ],
)
def test_scaling_may_be_worth_waiting_for(
    instances: list[InstanceStatus], prospects: Prospects, none_expected: bool
) -> None:
    assert unavailability("m", instances, 30.0, 100.0, prospects).none_expected is none_expected


def test_clients_are_told_when_an_external_server_is_asked_again() -> None:
    found = unavailability("m", [DOWN], None, 100.0)
    assert (str(found.why), found.retry_s) == ("m-gpu does not answer", 3.5)


def test_clients_learn_why_it_cannot_start_but_not_the_details() -> None:
    found = unavailability("m", [CANNOT_START], 30.0, 100.0)
    told = "m-1 cannot start: a package that it needs is not installed; an operator must correct that"
    assert str(found.why) == told


def test_what_is_given_up_is_a_problem_once_per_deployment() -> None:
    twin = msgspec.structs.replace(CANNOT_START, id="m-2")
    other = msgspec.structs.replace(CANNOT_START, id="x-1", deployment="x")
    first, second = given_up([CANNOT_START, twin, other, UNPLACED])
    remedy = "the Python package vllm is not installed; run: pip install vllm; then apply it again"
    assert str(first) == f"m-1 and 1 more are given up: {remedy}"
    assert str(second) == f"x-1 is given up: {remedy}"


ENGINE = DesiredEngine("simulated")
M, X = (DesiredDeployment(name=name, model=name, engine=ENGINE) for name in "mx")


@pytest.mark.parametrize(
    ("desired", "instances", "is_futile"),
    [
        ([M], [CANNOT_START], True),
        ([M, X], [CANNOT_START], False),  # x is scaled to zero, or not tried yet
        ([M, X], [CANNOT_START, instance("x-1", Phase.STARTING)], False),
        ([M, X], [CANNOT_START, instance("x-1", Phase.BACKING_OFF, until=101.0)], False),
        ([M, X], [CANNOT_START, msgspec.structs.replace(CANNOT_START, id="x-1", deployment="x")], True),
        ([M], [CANNOT_START, instance("m-gpu", Phase.STARTING, endpoint=GPU)], False),
        ([M], [UNPLACED], False),  # its need is not known to be too large
        ([], [], False),
    ],
)
def test_whether_nothing_can_start(
    desired: list[DesiredDeployment], instances: list[InstanceStatus], is_futile: bool
) -> None:
    wanted = Desired({one.name: one for one in desired})
    assert bool(nothing_can_start(wanted, instances, None)) is is_futile
