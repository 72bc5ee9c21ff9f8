"""Events in any order give consistent commands; with a well-behaved runtime, the desired state is reached."""

import copy
from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pointsman.control.controller import Controller
from pointsman.control.desired import Desired, DesiredDeployment
from pointsman.control.events import (
    Answered,
    Applied,
    ControllerCommand,
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
    StandsOut,
)
from pointsman.control.instances import InstanceStatus, Phase
from pointsman.control.reconcile import What, reconcile
from pointsman.reasons import Reason
from tests.control.worlds import World, about, adopted, deployment, launched, server, wish, with_lifecycle
from tests.properties import examples

IDS = ["m-1", "m-2", "m-3", "m-4", "x-1", "x-2", "gpu", "m-gpu", "x-gpu", "m-gpu-2", "unknown"]

ENDPOINTS = st.lists(
    st.builds(server, st.sampled_from(["gpu", "tpu"]), port=st.integers(1, 2), max_concurrency=st.sampled_from([1, 2])),
    max_size=3,  # names may be there twice
).map(tuple)


@st.composite
def deployments(draw: st.DrawFn, name: str) -> DesiredDeployment:
    spec = deployment(
        name,
        draw(st.integers(0, 3)),
        draw(st.integers(0, 1)),
        model=draw(st.sampled_from(["llama", "llama", "other"])),
        max_concurrency=draw(st.sampled_from([None, 4])),
        labels=draw(st.sampled_from([{}, {"zone": "a"}])),
        endpoints=draw(ENDPOINTS),
    )
    if draw(st.booleans()):
        spec = with_lifecycle(spec, failures_until_unhealthy=1, stop_grace_s=3.0, drain_timeout_s=5.0)
    return spec


WISHES: st.SearchStrategy[Desired] = (
    st.lists(st.sampled_from("mx"), unique=True, max_size=2)
    .flatmap(lambda names: st.tuples(*map(deployments, names)))
    .map(lambda specs: wish(*specs))
)


class Fire(RuleBasedStateMachine):
    """Sends every event to a world, which checks its commands, and to a twin."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.twin = Controller()
        self.shut = False

    def tell(self, event: ControllerEvent) -> list[ControllerCommand]:
        before = {one.id: one for one in self.world.controller.instances()}
        commands = self.world.tell(event)
        assert self.twin.handle(event, self.world.now) == commands, "the same events, other commands"
        self.nobody_was_let_go_too_early(before)
        return commands

    def nobody_was_let_go_too_early(self, before: dict[str, InstanceStatus]) -> None:
        """A serving instance is withdrawn only if enough others are ready."""
        desired = self.world.controller.desired
        if self.shut or desired is None:
            return
        for one in self.world.controller.instances():
            was_ready = one.id in before and before[one.id].phase is Phase.READY
            spec = desired.deployments.get(one.deployment)
            if was_ready and one.phase is Phase.DRAINING and one.endpoint is None and spec is not None:
                assert len(self.ready_processes(one.deployment)) >= spec.replicas

    def ready_processes(self, name: str) -> list[InstanceStatus]:
        there = self.world.controller.instances()
        return [one for one in there if one.deployment == name and one.phase is Phase.READY and one.endpoint is None]

    # Events

    @initialize(data=st.data(), ids=st.lists(st.sampled_from(["m-1", "m-2", "m-4", "x-2", "x-7"]), unique=True))
    def begin(self, data: st.DataObject, ids: list[str]) -> None:
        for instance_id in ids:
            self.tell(adopted(instance_id, data.draw(deployments(instance_id[0]))))

    @rule(desired=WISHES)
    def apply(self, desired: Desired) -> None:
        self.tell(Applied(desired))
        assert self.tell(Applied(desired)) == [], "applied twice is applied once"
        assert self.world.controller.preview(desired) == []

    @precondition(lambda self: self.world.controller.desired is not None)
    @rule(replicas=st.integers(0, 3), version=st.integers(0, 1), limit=st.sampled_from([None, 4]))
    def change_a_little(self, replicas: int, version: int, limit: int | None) -> None:
        """As people do: another number, another parameter."""
        assert self.world.controller.desired is not None
        specs = dict(self.world.controller.desired.deployments)
        specs["m"] = deployment("m", replicas, version, max_concurrency=limit)
        self.apply(Desired(specs))

    @rule(desired=WISHES)
    def preview(self, desired: Desired) -> None:
        """Checks that a preview changes nothing: the twin has none, and stays equal."""
        controller = self.world.controller
        steps = controller.preview(desired)
        assert all(step.why for step in steps)
        if not self.shut and controller.desired is not None:
            leaving = {one.id for one in controller._state.instances.values() if one.leaving}
            trial = copy.deepcopy(controller)
            touched = {about(command) for command in trial.handle(Applied(desired), self.world.now)} - {""}
            # A leaving instance may get a drain timeout if its deployment is wanted again with other limits.
            assert touched <= leaving or steps, "a step was not in the preview"

    @rule(instance_id=st.sampled_from(IDS))
    def run_short(self, instance_id: str) -> None:
        """The runtime has no file descriptor left."""
        there = {one.id: one.phase for one in self.world.controller.instances()}
        self.tell(ProbeNotMade(instance_id, "too many open files"))
        assert {one.id: one.phase for one in self.world.controller.instances()} == there
        self.tell(LaunchFailed(instance_id, "too many open files", local="files"))

    @rule(
        instance_id=st.sampled_from(IDS), kind=st.sampled_from([Exited, Silent, LaunchFailed, RequestsFail, OutOfReach])
    )
    def go_wrong(self, instance_id: str, kind: Any) -> None:
        self.tell(kind(instance_id, "bad luck"))

    @rule(instance_id=st.sampled_from(IDS), contradicted=st.booleans())
    def stand_out(self, instance_id: str, contradicted: bool) -> None:
        """Never the last one that is ready, and never too many."""
        before = [one for one in self.world.controller.instances() if one.phase is Phase.READY]
        self.tell(StandsOut(instance_id, Reason("stands-out"), contradicted))
        there = self.world.controller.instances()
        for name in {one.deployment for one in before}:
            phases = Counter(one.phase for one in there if one.deployment == name)
            assert phases[Phase.READY]
            if any(one.id == instance_id and one.phase is Phase.EJECTED for one in there):
                assert phases[Phase.EJECTED] <= max(1, phases[Phase.READY])

    @rule(instance_id=st.sampled_from(IDS), kind=st.sampled_from([Drained, DrainAsked]))
    def drain(self, instance_id: str, kind: Any) -> None:
        self.tell(kind(instance_id))

    @rule(instance_id=st.sampled_from(IDS), readiness=st.booleans())
    def answer(self, instance_id: str, readiness: bool) -> None:
        self.tell(Answered(instance_id, readiness))

    @rule(instance_id=st.sampled_from(IDS))
    def launch(self, instance_id: str) -> None:
        self.tell(launched(instance_id))

    @precondition(lambda self: self.world.controller.desired is not None)
    @rule(data=st.data(), instance_id=st.sampled_from(["m-1", "m-3", "x-9"]))
    def adopt_late(self, data: st.DataObject, instance_id: str) -> None:
        if instance_id not in self.world.processes:
            self.tell(adopted(instance_id, data.draw(deployments(instance_id[0]))))

    @precondition(lambda self: self.world.pending)
    @rule(most=st.sampled_from([1, 3, 100]))
    def behave_for_a_while(self, most: int) -> None:
        while self.world.pending and most:
            most -= 1
            event = self.world.pending.popleft()
            if self.world._still_makes_sense(event):
                self.tell(event)

    @rule(seconds=st.sampled_from([0.01, 0.5, 2.0, 10.0, 60.0, 120.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        self.tell(ControllerTimer())

    @rule(sure=st.integers(0, 20))
    def shut_down(self, sure: int) -> None:
        if sure == 20:
            self.shut = True
            self.tell(PlaneStopping())

    # What always holds

    @invariant()
    def nothing_is_left_to_do_but_to_wait(self) -> None:
        controller = self.world.controller
        if controller.desired is not None and not self.shut:
            steps = reconcile(controller.desired, controller._state.instances.values())
            assert all(step.what is What.REPLACE for step in steps)

    @invariant()
    def the_timer_is_set_for_what_is_due(self) -> None:
        controller = self.world.controller
        if controller.desired is not None or self.shut:
            dues = {one.id: one.due for one in controller._state.instances.values() if one.due is not None}
            assert {one: due for due, _, one in controller._due._live.values()} == dues
            assert not dues or self.world.wake_at == min(dues.values())

    @invariant()
    def there_are_no_more_processes_than_wanted_and_one(self) -> None:
        controller = self.world.controller
        if controller.desired is None:
            return
        ending = {one.id for one in controller.instances() if one.phase in (Phase.DRAINING, Phase.STOPPING)}
        staying = Counter(name for one, name in self.world.processes.items() if one not in ending)
        for name, number in staying.items():
            spec = controller.desired.deployments.get(name)
            assert spec is not None
            assert not self.shut
            assert number <= spec.replicas + 1

    @invariant()
    def what_runs_and_serves_is_known(self) -> None:
        there = {one.id: one for one in self.world.controller.instances()}
        assert self.world.processes.keys() <= there.keys()
        assert {name for name, one in there.items() if one.in_service} == self.world.in_service.keys()
        for name, told in self.world.in_service.items():
            assert told.can_accept_request is (there[name].phase is Phase.READY)

    def teardown(self) -> None:
        if self.world.controller.desired is not None and not self.shut:
            desired = self.world.controller.desired
            self.world.tell(Applied(desired, retry=frozenset(desired.deployments)))  # rollouts that were stopped go on
            self.world.settle()
            self.what_is_wanted_is_there(desired)
        self.world.tell(PlaneStopping())
        self.world.settle()
        assert not len(self.world.controller)
        assert not self.world.processes
        assert not self.world.in_service

    def what_is_wanted_is_there(self, desired: Desired) -> None:
        there = self.world.controller.instances()
        for name, spec in desired.deployments.items():
            mine = [one for one in there if one.deployment == name and not (one.endpoint and one.drain_asked)]
            assert all(one.phase is Phase.READY for one in mine)
            assert sum(one.endpoint is None for one in mine) == spec.replicas
            wanted = {endpoint.name: endpoint for endpoint in reversed(spec.endpoints)}
            out = {one.endpoint.name for one in there if one.deployment == name and one.endpoint and one.drain_asked}
            assert {one.endpoint.name for one in mine if one.endpoint} == wanted.keys() - out
            assert all(wanted[one.endpoint.name].url == one.endpoint.url for one in mine if one.endpoint)
            for one in mine:
                told, of_its_own = self.world.in_service[one.id], None
                if one.endpoint is not None:
                    of_its_own = wanted[one.endpoint.name].max_concurrency
                assert (told.model_name, told.labels) == (spec.model, spec.labels)
                assert told.max_concurrency == (of_its_own or spec.max_concurrency)
        assert {one.deployment for one in there} <= desired.deployments.keys()


TestFire = Fire.TestCase
TestFire.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
