"""Every instance has a place while its process runs; others wait for one."""

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pointsman.control.controller import Controller
from pointsman.control.desired import Desired, DesiredDeployment, DesiredEngine
from pointsman.control.events import (
    Admit,
    Answered,
    Applied,
    ControllerCommand,
    ControllerTimer,
    Drained,
    Exited,
    Kill,
    Launch,
    PlaceNeeded,
    RequestsFail,
    Update,
    WorkerLost,
    WorkerSeen,
)
from pointsman.control.instances import Phase
from pointsman.placement.asks import Ask, Claim, EngineAbility, Need, Place, Tier
from pointsman.placement.fleet import FREE_BYTES, FREE_MEMORY
from pointsman.reasons import Reason
from pointsman.types import Gpu, Worker
from tests.control.worlds import adopted, launched
from tests.properties import examples

GIB = 1 << 30


def worker(name: str = "w1", *gpus: int, memory: int = 64) -> Worker:
    devices = tuple(Gpu(index=index, memory_bytes=size * GIB) for index, size in enumerate(gpus))
    return Worker(name=name, cpus=16, memory_bytes=memory * GIB, gpus=devices)


def deployment(size: int, replicas: int = 1, name: str = "m") -> DesiredDeployment:
    """A deployment whose instances need this many GiB of one GPU."""
    ask = Ask(instance_id="", deployment=name, need=Need.fixed(size * GIB), engine=EngineAbility())
    return DesiredDeployment(name=name, model=name, replicas=replicas, engine=DesiredEngine("any"), ask=ask)


def with_ask(spec: DesiredDeployment, **facts: Any) -> DesiredDeployment:
    assert spec.ask is not None
    return msgspec.structs.replace(spec, ask=msgspec.structs.replace(spec.ask, **facts))


def wish(*deployments: DesiredDeployment) -> Applied:
    return Applied(Desired({one.name: one for one in deployments}))


def launches(commands: list[ControllerCommand]) -> dict[str, Place | None]:
    return {command.instance_id: command.place for command in commands if isinstance(command, Launch)}


def phases(controller: Controller) -> dict[str, Phase]:
    return {one.id: one.phase for one in controller.instances()}


def test_an_instance_is_launched_where_there_is_room() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 8, 24)), 0.0)
    found = launches(controller.handle(wish(deployment(16)), 0.0))
    place = found["m-1"]
    assert place is not None
    assert place.gpus == (("w1", 1),)
    assert place.largest_gpu_share == 16 / 24
    [status] = controller.instances()
    assert status.place == place


def labels_once_ready(controller: Controller, name: str) -> dict[str, str]:
    """The labels that dispatchers are told when an instance enters service."""
    commands = [*controller.handle(launched(name), 1.0), *controller.handle(Answered(name, readiness=True), 1.0)]
    [admitted] = [command for command in commands if isinstance(command, Admit)]
    return admitted.instance.labels


def test_an_instance_has_the_labels_of_its_worker() -> None:
    def seen(name: str, **labels: str) -> WorkerSeen:
        return WorkerSeen(msgspec.structs.replace(worker(name, 24), labels=labels))

    controller = Controller()
    controller.handle(seen("w1", rack="r1", zone="a"), 0.0)
    controller.handle(seen("w2", rack="r2", zone="a"), 0.0)
    spec = msgspec.structs.replace(deployment(16, 2), labels={"zone": "of the deployment"})
    places = launches(controller.handle(wish(spec), 0.0))
    rack = {"w1": "r1", "w2": "r2"}
    for name, place in places.items():
        assert place is not None
        expected = {"rack": rack[place.workers[0]], "zone": "of the deployment"}
        assert labels_once_ready(controller, name) == expected
    told = controller.handle(seen("w1", rack="r9"), 2.0)
    [update] = [command for command in told if isinstance(command, Update)]
    assert update.instance.labels["rack"] == "r9", "dispatchers are told at once"
    assert not any(isinstance(command, Update) for command in controller.handle(seen("w1", rack="r9"), 3.0))


def test_without_places_the_labels_of_the_only_worker_count() -> None:
    def started(*workers: Worker) -> dict[str, str]:
        controller = Controller()
        for one in workers:
            controller.handle(WorkerSeen(one), 0.0)
        controller.handle(wish(msgspec.structs.replace(deployment(16), ask=None)), 0.0)
        return labels_once_ready(controller, "m-1")

    here = msgspec.structs.replace(worker("w1"), labels={"rack": "r1"})
    assert started(here) == {"rack": "r1"}
    assert started(here, worker("w2")) == {}, "it is not known which"


def test_without_a_known_fleet_it_is_launched_anywhere() -> None:
    assert launches(Controller().handle(wish(deployment(16)), 0.0)) == {"m-1": None}


def test_an_instance_without_a_place_says_why_and_waits_for_room() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 24)), 0.0)
    assert list(launches(controller.handle(wish(deployment(16, 2)), 0.0))) == ["m-1"]
    assert phases(controller) == {"m-1": Phase.STARTING, "m-2": Phase.BACKING_OFF}
    [_, waits] = controller.instances()
    assert str(waits.reason) == "no place: no room on one GPU: needs 16.0 GiB, the largest free is 8.0 GiB"
    assert waits.restarts == 0
    controller.handle(launched("m-1"), 1.0)
    controller.handle(ControllerTimer(), 1.5)
    assert controller.instances()[1].since == 0.0, "however often it was tried"
    assert list(launches(controller.handle(WorkerSeen(worker("w2", 24)), 2.0))) == ["m-2"]
    controller.handle(launched("m-2"), 3.0)
    controller.handle(Answered("m-2", readiness=True), 3.0)
    [_, placed] = controller.instances()
    assert (placed.phase, placed.reason) == (Phase.READY, None), "that it had no place is over"


def test_an_earlier_failure_is_the_reason_again_once_there_is_a_place() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 24)), 0.0)
    controller.handle(wish(deployment(16)), 0.0)
    controller.handle(Exited("m-1", "exit code 7"), 1.0)
    controller.handle(ControllerTimer(), 60.0)
    [again] = controller.instances()
    assert (again.phase, str(again.reason)) == (Phase.STARTING, "exit code 7")


def test_an_unplaced_instance_is_retried_with_backoff() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 8)), 0.0)
    controller.handle(wish(deployment(16)), 0.0)
    for now in (1.0, 3.0, 10.0):
        assert launches(controller.handle(ControllerTimer(), now)) == {}
    [status] = controller.instances()
    assert (status.phase, status.restarts) == (Phase.BACKING_OFF, 0)


def test_freed_room_is_used_at_once() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 24)), 0.0)
    controller.handle(wish(deployment(16, name="a"), deployment(16, name="b")), 0.0)
    controller.handle(launched("a-1"), 0.0)
    controller.handle(Answered("a-1", readiness=True), 0.0)
    controller.handle(wish(deployment(16, name="b")), 1.0)
    controller.handle(Drained("a-1"), 2.0)
    assert list(launches(controller.handle(Exited("a-1", "exit code 0"), 3.0))) == ["b-1"]


def test_a_crash_frees_the_place_and_the_restart_takes_one_again() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 24)), 0.0)
    controller.handle(wish(deployment(16)), 0.0)
    controller.handle(launched("m-1"), 0.0)
    controller.handle(Exited("m-1", "exit code 1"), 1.0)
    assert dict(controller.places.fleet.occupants) == {}
    assert list(launches(controller.handle(ControllerTimer(), 10.0))) == ["m-1"]
    assert list(controller.places.fleet.occupants) == ["m-1"]


def test_instances_of_a_lost_worker_are_placed_elsewhere() -> None:
    controller = Controller()
    for name in ("w1", "w2"):
        controller.handle(WorkerSeen(worker(name, 24)), 0.0)
    first = launches(controller.handle(wish(deployment(16)), 0.0))["m-1"]
    assert first is not None
    controller.handle(launched("m-1"), 0.0)
    controller.handle(Answered("m-1", readiness=True), 0.0)
    commands = controller.handle(WorkerLost(first.workers[0], "no heartbeat"), 1.0)
    assert [type(command).__name__ for command in commands if type(command).__name__ != "WakeController"] == [
        "Withdraw"
    ]
    [status] = controller.instances()
    assert str(status.reason) == f'worker "{first.workers[0]}" is lost: no heartbeat'
    again = launches(controller.handle(ControllerTimer(), 10.0))["m-1"]
    assert again is not None
    assert again.workers != first.workers


def spread(replicas: int = 1, name: str = "m") -> DesiredDeployment:
    """A deployment whose instances need 10 GiB of each of two GPUs, on two workers if need be."""
    return with_ask(deployment(0, replicas, name), need=Need.fixed(10 * GIB, stages=2), several_workers=True)


def test_a_process_that_loses_another_worker_holds_its_gpus_until_it_has_ended() -> None:
    controller = Controller()
    for name in ("w1", "w2"):
        controller.handle(WorkerSeen(worker(name, 12)), 0.0)
    place = launches(controller.handle(wish(spread()), 0.0))["m-1"]
    assert place is not None
    assert len(place.workers) == 2
    controller.handle(launched("m-1"), 0.0)
    controller.handle(Answered("m-1", readiness=True), 0.0)
    home, other = place.workers
    commands = controller.handle(WorkerLost(other, "no heartbeat"), 1.0)
    assert Kill("m-1") in commands
    assert phases(controller) == {"m-1": Phase.STOPPING}
    assert controller.places.fleet.occupants["m-1"].place.workers == (home,)
    assert launches(controller.handle(WorkerSeen(worker(other, 12)), 2.0)) == {}, "it may run on"
    assert launches(controller.handle(wish(spread(), deployment(10, name="n")), 3.0))["n-1"] is not None
    controller.handle(Exited("m-1", "killed by SIGKILL"), 4.0)
    assert set(controller.places.fleet.occupants) == {"n-1"}
    [status] = [one for one in controller.instances() if one.id == "m-1"]
    assert "is lost: no heartbeat" in str(status.reason)


def test_a_process_that_is_adopted_without_a_part_of_its_place_is_ended() -> None:
    place = Place(
        tier=Tier.SEVERAL_WORKERS,
        claims=(Claim(worker="w1", gpu=0, gpu_bytes=10 * GIB), Claim(worker="w2", gpu=0, gpu_bytes=10 * GIB)),
    )
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 12)), 0.0)
    commands = controller.handle(msgspec.structs.replace(adopted("m-1", spread()), place=place), 0.0)
    assert Kill("m-1") in commands
    assert launches(controller.handle(wish(deployment(10, name="n")), 1.0)) == {}, "its GPU is not free yet"
    assert list(launches(controller.handle(Exited("m-1", "killed by SIGKILL"), 2.0))) == ["n-1"]


def test_scaling_down_stops_the_instance_that_frees_the_most_useful_room() -> None:
    """With packing, the instance that is alone on its worker is stopped, although it is not the newest."""
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 24)), 0.0)
    controller.handle(WorkerSeen(worker("w2", 24, 24)), 0.0)
    wanted = deployment(16, 3)
    places = launches(controller.handle(wish(wanted), 0.0))
    [alone] = [name for name, place in places.items() if place is not None and place.workers == ("w1",)]
    for name in places:
        controller.handle(launched(name), 0.0)
        controller.handle(Answered(name, readiness=True), 0.0)
    [step] = controller.preview(Desired({"m": deployment(16, 2)}))
    assert step.subject == alone


def test_an_instance_may_preempt_one_of_lower_priority() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 24)), 0.0)
    batch = with_ask(deployment(16, name="batch"), priority=-1)
    controller.handle(wish(batch), 0.0)
    controller.handle(launched("batch-1"), 0.0)
    controller.handle(Answered("batch-1", readiness=True), 0.0)
    timid, bold = (with_ask(deployment(16, name="chat"), priority=1, preempts=may) for may in (False, True))
    controller.handle(wish(batch, timid), 1.0)
    assert phases(controller) == {"batch-1": Phase.READY, "chat-1": Phase.BACKING_OFF}
    controller.handle(wish(batch, bold), 2.0)
    controller.handle(ControllerTimer(), 10.0)
    assert phases(controller)["batch-1"] is Phase.DRAINING, "what it is doing may end"
    controller.handle(ControllerTimer(), 11.0)
    controller.handle(Drained("batch-1"), 12.0)
    assert list(launches(controller.handle(Exited("batch-1", "exit code 0"), 13.0))) == ["chat-1"]
    controller.handle(ControllerTimer(), 30.0)
    [waits, _] = controller.instances()
    assert (waits.id, waits.unplaced) == ("batch-1", True), "it comes back when there is room"


def test_deployments_without_instances_are_placed_first() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 24)), 0.0)
    many, one = deployment(16, 4, "many"), deployment(16, 1, "one")
    controller.handle(wish(many), 0.0)
    controller.handle(wish(many, one), 1.0)
    assert [one.id for one in controller.instances() if one.place is not None] == ["many-1"]
    assert list(launches(controller.handle(WorkerSeen(worker("w2", 24)), 2.0))) == ["one-1"], "although it came last"
    assert list(launches(controller.handle(WorkerSeen(worker("w3", 24)), 3.0))) == ["many-2"]


def test_higher_priorities_are_placed_first() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 8)), 0.0)
    controller.handle(wish(deployment(16, 1, "chat"), with_ask(deployment(16, 2, "vip"), priority=1)), 0.0)
    room = worker("w2", 24, 24)
    assert list(launches(controller.handle(WorkerSeen(room), 2.0))) == ["vip-1", "vip-2"]


def test_the_longest_waiting_instance_is_placed_first() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 8)), 0.0)
    early, late = deployment(16, 1, "z-early"), deployment(16, 1, "a-late")
    controller.handle(wish(early), 0.0)
    controller.handle(wish(early, late), 5.0)
    for now in (6.0, 8.0, 12.0, 20.0):
        controller.handle(ControllerTimer(), now)
    assert list(launches(controller.handle(WorkerSeen(worker("w2", 24)), 21.0))) == ["z-early-1"]


def test_an_evicted_instance_comes_back_when_there_is_room() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 24)), 0.0)
    busy, other = deployment(16, name="busy"), deployment(16, name="other")
    controller.handle(wish(busy), 0.0)
    controller.handle(launched("busy-1"), 0.0)
    controller.handle(Answered("busy-1", readiness=True), 1.0)
    controller.handle(wish(busy, other), 2.0)
    controller.handle(PlaceNeeded("busy-1", Reason("place-awaited")), 3.0)
    assert phases(controller) == {"busy-1": Phase.DRAINING, "other-1": Phase.BACKING_OFF}, "what it is doing may end"
    assert controller.handle(PlaceNeeded("busy-1", Reason("place-awaited")), 3.5) == []
    controller.handle(Drained("busy-1"), 4.0)
    assert list(launches(controller.handle(Exited("busy-1", "exit code 0"), 5.0))) == ["other-1"]
    controller.handle(ControllerTimer(), 30.0)
    assert {one.id: one.unplaced for one in controller.instances()} == {"busy-1": True, "other-1": False}
    controller.handle(wish(busy), 31.0)
    assert list(launches(controller.handle(Exited("other-1", "exit code 0"), 32.0))) == ["busy-1"], "it comes back"


def test_the_start_up_time_is_measured_from_the_launch() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 24, 24)), 0.0)
    controller.handle(adopted("m-1", deployment(16, 2)), 0.0)
    controller.handle(wish(deployment(16, 2)), 0.0)
    controller.handle(launched("m-2"), 1.0)
    for name in ("m-1", "m-2"):
        controller.handle(Answered(name, readiness=True), 4.0)
    assert {one.id: one.start_up_s for one in controller.instances()} == {"m-1": None, "m-2": 4.0}
    controller.handle(RequestsFail("m-2", Reason("status 500")), 10.0)
    controller.handle(Answered("m-2", readiness=True), 11.0)
    assert controller.instances()[1].start_up_s == 4.0, "it was doubted, and not started again"
    controller.handle(Exited("m-2", "exit code 1"), 12.0)
    controller.handle(ControllerTimer(), 20.0)
    controller.handle(launched("m-2"), 20.0)
    controller.handle(Answered("m-2", readiness=True), 27.0)
    assert controller.instances()[1].start_up_s == 7.0


def test_an_instance_whose_gpu_is_gone_is_stopped_and_placed_anew() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 24, 24)), 0.0)
    controller.handle(wish(deployment(16, 2)), 0.0)
    for name in ("m-1", "m-2"):
        controller.handle(launched(name), 0.0)
        controller.handle(Answered(name, readiness=True), 0.0)
    controller.handle(WorkerSeen(worker("w1", 24)), 1.0)
    assert phases(controller) == {"m-1": Phase.READY, "m-2": Phase.STOPPING}
    controller.handle(Exited("m-2", "killed by SIGTERM"), 2.0)
    assert list(launches(controller.handle(WorkerSeen(worker("w2", 24)), 3.0))) == ["m-2"]


def test_all_or_nothing() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 24, 24)), 0.0)
    three = with_ask(deployment(16, 3), all_or_nothing=True)
    assert launches(controller.handle(wish(three), 0.0)) == {}
    assert dict(controller.places.fleet.occupants) == {}
    assert sorted(launches(controller.handle(WorkerSeen(worker("w2", 24)), 1.0))) == ["m-1", "m-2", "m-3"]


def test_adopted_instances_keep_their_places() -> None:
    place = Place(tier=Tier.ONE_GPU, claims=(Claim(worker="w1", gpu=0, gpu_bytes=16 * GIB),))
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 24)), 0.0)
    wanted = deployment(16, 2)
    controller.handle(msgspec.structs.replace(adopted("m-1", wanted), place=place), 0.0)
    assert launches(controller.handle(wish(wanted), 0.0)) == {}, "there is no room for the second"
    assert controller.places.fleet.occupants["m-1"].place == place


def test_a_preview_says_where_and_claims_nothing() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 24, 24)), 0.0)
    wanted = wish(deployment(16, 3))
    for _ in range(2):
        steps = controller.preview(wanted.desired)
        assert [(step.subject, str(step.where).partition(" (")[0]) for step in steps[:2]] == [
            ("m-1", "w1: gpu0"),
            ("m-2", "w1: gpu1"),
        ]
        assert str(steps[2].where) == "no place: no room on one GPU: needs 16.0 GiB, the largest free is 8.0 GiB"
        assert controller.places.taken is None, "no instance needs a place yet"
    places = launches(controller.handle(wanted, 0.0))
    assert {step.subject: str(step.where) for step in steps[:2]} == {name: str(place) for name, place in places.items()}
    [more] = controller.preview(wish(deployment(16, 4)).desired)
    assert (more.subject, more.where) == ("m-4", steps[2].where)


def test_a_preview_includes_the_room_of_leaving_instances() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 24)), 0.0)
    controller.handle(wish(deployment(16, name="a")), 0.0)
    stop, start = controller.preview(wish(deployment(16, name="b")).desired)
    assert (stop.subject, stop.where) == ("a-1", None)
    assert (start.subject, str(start.where)) == ("b-1", "w1: gpu0 (16.0 GiB)")
    [start] = controller.preview(wish(deployment(16, name="a"), deployment(16, name="b")).desired)
    assert str(start.where).startswith("no place: ")
    assert list(controller.places.fleet.occupants) == ["a-1"]


def test_a_preview_of_all_or_nothing() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 24, 24)), 0.0)
    for replicas, some in ((2, True), (3, False)):
        steps = controller.preview(wish(with_ask(deployment(16, replicas), all_or_nothing=True)).desired)
        assert [str(step.where).startswith("w1: ") for step in steps] == [some] * replicas


def test_a_preview_says_why_there_is_no_place() -> None:
    controller = Controller()
    controller.handle(WorkerSeen(worker("w1", 8)), 0.0)
    by_memory = with_ask(deployment(0), need=Need(host_bytes=80 * GIB, tensor_parallel_sizes=()), cpu=True)
    [step] = controller.preview(wish(by_memory).desired)
    assert str(step.where) == "no place: too little memory: needs 80.0 GiB, 64.0 GiB free", "GPUs are of no use to it"
    controller.handle(WorkerSeen(worker("w2", 12)), 0.0)
    controller.handle(WorkerSeen(worker("w3")), 0.0)
    [step] = controller.preview(wish(deployment(16)).desired)
    assert str(step.where) == (
        "no place: 1 no GPU for the engine (it has none, not amd or nvidia; if the "
        "engine runs without one, set placement.cpu), "
        "2 no room on one GPU (w1: needs 16.0 GiB, the largest free is 8.0 GiB)"
    )


def test_a_preview_without_a_fleet_or_an_ask_has_no_place() -> None:
    controller = Controller()
    [step] = controller.preview(wish(deployment(16)).desired)
    assert step.where is None
    controller.handle(WorkerSeen(worker("w1", 24)), 0.0)
    [step] = controller.preview(wish(msgspec.structs.replace(deployment(16), ask=None)).desired)
    assert step.where is None


class Claims(RuleBasedStateMachine):
    """At any time, exactly the instances with a process hold places, and no worker is overcommitted."""

    def __init__(self) -> None:
        super().__init__()
        self.controller = Controller()
        self.now = 0.0
        self.workers: set[str] = set()
        self.running: set[str] = set()

    def tell(self, event: object) -> None:
        self.now += 0.7
        for command in self.controller.handle(event, self.now):  # type: ignore[arg-type]
            if isinstance(command, Launch):
                assert command.instance_id not in self.running
                self.running.add(command.instance_id)

    @rule(name=st.sampled_from(["w1", "w2", "w3"]), gpus=st.lists(st.sampled_from([8, 24]), max_size=2))
    def seen(self, name: str, gpus: list[int]) -> None:
        if name not in self.workers:
            self.workers.add(name)
            self.tell(WorkerSeen(worker(name, *gpus)))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def lost(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        self.workers.discard(name)
        places = {one.id: one.place for one in self.controller.instances() if one.place is not None}
        self.running -= {one for one, place in places.items() if place.home == name}
        self.tell(WorkerLost(name, "gone"))

    @rule(a=st.integers(0, 3), b=st.integers(0, 2), c=st.integers(0, 2))
    def wanted(self, a: int, b: int, c: int) -> None:
        self.tell(wish(deployment(6, a, "a"), deployment(12, b, "b"), spread(c, "c")))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), works=st.booleans())
    def comes_up(self, data: st.DataObject, works: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.tell(launched(name))
        if works:
            self.tell(Answered(name, readiness=True))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def exits(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.running.discard(name)
        self.tell(Exited(name, "exit code 1"))

    @rule()
    def time_passes(self) -> None:
        self.now += 30.0
        self.tell(ControllerTimer())

    @invariant()
    def places_are_held_by_processes(self) -> None:
        fleet = self.controller.places.fleet
        assert set(fleet.occupants) <= self.running
        placed = {one.id for one in self.controller.instances() if one.place is not None}
        assert placed == set(fleet.occupants)
        assert all(free >= 0 for free in fleet.gpus.columns.get(FREE_BYTES, ()))
        assert all(free >= 0 for free in fleet.workers.columns[FREE_MEMORY])


TestClaims = Claims.TestCase
TestClaims.settings = settings(max_examples=examples(60), stateful_step_count=25)
