"""A plane on virtual time: controller, autoscaler and preemption, on a well-behaved runtime."""

from collections.abc import Callable, Iterable
from typing import Any

from pointsman.control.desired import DesiredDeployment
from pointsman.control.events import (
    Admit,
    Applied,
    AwaitDrained,
    ControllerCommand,
    ControllerEvent,
    Drained,
    PlaceNeeded,
    WorkerSeen,
)
from pointsman.control.instances import replica_counts
from pointsman.control.preemption import Preemptor
from pointsman.placement.asks import Ask, EngineAbility, Need
from pointsman.scaling import ScalingLimits, TargetOngoing
from pointsman.scaling.autoscaler import Autoscaler, DeploymentScaling, PolicyPlan, ScalingChange, ScalingSetup
from pointsman.scaling.deployment import Load, ScaledDeployment
from pointsman.scaling.limits import ScalingPlan
from pointsman.scaling.records import ScalingRecord
from pointsman.types import Worker
from tests.control.worlds import World, deployment, wish

GIB = 2**30
STEP_S = 0.1


def needing(gib: float, name: str = "m", **facts: Any) -> DesiredDeployment:
    """A deployment whose instances need this much memory."""
    ask = Ask(
        instance_id="",
        deployment=name,
        need=Need(host_bytes=int(gib * GIB), tensor_parallel_sizes=()),
        engine=EngineAbility(name="any", needs_gpu=False),
        cpu=True,
        priority=facts.pop("priority", 0),
    )
    return deployment(name, 0, ask=ask, **facts)


def plan(policy: Any = None, recipe: str = '["policy", {}]', **limits: Any) -> ScalingPlan:
    usual: dict[str, Any] = {"max_replicas": 3, "interval_s": 0.1, "down_delay_s": 0.2, "idle_timeout_s": 0.2}
    made = TargetOngoing(1, 0.2) if policy is None else policy
    return ScalingPlan(policy=made, policy_name="policy", limits=ScalingLimits(**usual | limits), recipe=recipe)


class ScaledWorld(World):
    """Requests come and end when a test says so; policies run when they are due."""

    def __init__(self, *deployments: tuple[DesiredDeployment, ScalingPlan], gib: float = 64, slots: int = 2) -> None:
        super().__init__()
        self.specs = {spec.name: spec for spec, _ in deployments}
        self.slots = slots
        self.autoscaler = Autoscaler()
        self.preemptor = Preemptor(self.controller, self.autoscaler.deployments)
        self.waiting: list[tuple[str, str]] = []
        """(request, deployment), in order of arrival."""
        self.on: dict[str, str] = {}
        """Requests that run, and on which instance."""
        self.sent: list[str] = []
        self.arrived = dict.fromkeys(self.specs, 0)
        self.draining: set[str] = set()
        self.saved: list[ScalingRecord] = []
        self.tell(WorkerSeen(Worker(name="here", cpus=64, memory_bytes=int(gib * GIB))))
        self.configure({spec.name: made for spec, made in deployments})

    def configure(self, plans: dict[str, ScalingPlan], policies: Iterable[PolicyPlan] | None = None) -> None:
        scaled = {name: DeploymentScaling(plan=made) for name, made in plans.items()}
        alone = [PolicyPlan(name=name, plan=made, nodes={name: name}) for name, made in plans.items()]
        self.autoscaler.configure(ScalingSetup(scaled, tuple(alone if policies is None else policies)), {})
        self.retarget()

    def retarget(self) -> None:
        self.tell(Applied(wish(*self.specs.values()).with_replicas(self.autoscaler.targets())))

    # Requests

    def request(self, request: str, deployment: str = "m") -> None:
        self.arrived[deployment] += 1
        self.waiting.append((request, deployment))
        self._dispatch()
        if (request, deployment) in self.waiting and not self.ready(deployment):
            self.autoscaler.wake(deployment)

    def end(self, *requests: str) -> None:
        for request in requests:
            del self.on[request]
        self._dispatch()

    def _dispatch(self) -> None:
        for request, name in list(self.waiting):
            free = [
                one.id
                for one in self.controller.instances()
                if one.deployment == name
                and one.id in self.in_service
                and self.in_service[one.id].can_accept_request
                and list(self.on.values()).count(one.id) < self.slots
            ]
            if free:
                self.waiting.remove((request, name))
                self.on[request] = min(free, key=lambda one: (list(self.on.values()).count(one), one))
                self.sent.append(request)
        idle = sorted(self.draining - set(self.on.values()))
        self.draining -= set(idle)
        self.pending.extend(Drained(one) for one in idle)

    def _carry_out(self, command: ControllerCommand, event: ControllerEvent) -> None:
        if isinstance(command, AwaitDrained):
            self.draining.add(command.instance_id)
            return
        super()._carry_out(command, event)
        if isinstance(command, Admit):
            self._dispatch()

    # Time

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.until(lambda: False, seconds, required=False)

    def until(self, condition: Callable[[], object], seconds: float = 120.0, *, required: bool = True) -> None:
        """Let time pass until something is so."""
        end = self.now + seconds
        while not condition():
            if self.now >= end:
                assert not required, "it did not come to that"
                return
            self._call_policies()
            self._dispatch()
            self.behave(STEP_S)

    def load(self, one: ScaledDeployment) -> Load:
        running = sum(name.rpartition("-")[0] == one.name for name in self.on.values())
        waiting = sum(name == one.name for _, name in self.waiting)
        return Load(running=running, waiting=waiting, arrived=self.arrived[one.name], max_concurrency=self.slots)

    def _call_policies(self) -> None:
        for policy in self.autoscaler.due(self.now):
            policy.begin()
            members = self.autoscaler.members(policy)
            replicas = {one.name: replica_counts(self.controller.instances(), one.members) for one in members}
            call = self.autoscaler.invoke(policy, {one.name: self.load(one) for one in members}, replicas, self.now)
            assert call is not None
            self._apply(self.autoscaler.answered(call, call.call(), self.now))
            used = {name for _, name in self.waiting} | {name.rpartition("-")[0] for name in self.on.values()}
            for one in members:
                made = self.preemptor.make_room(one, used, self.now)
                for instance_id, why in made.evictions:
                    self.tell(PlaceNeeded(instance_id, why))
                self._apply(ScalingChange(made.records, made.retarget))
            policy.end(self.now)

    def _apply(self, change: ScalingChange) -> None:
        self.saved += change.records
        if change.retarget:
            self.retarget()

    # What came of it

    def one(self, name: str = "m") -> ScaledDeployment:
        return self.autoscaler.deployments[name]

    def changes(self, name: str = "m") -> list[tuple[int, int]]:
        return [(one.before, one.after) for one in self.one(name).records if one.before != one.after]

    def reasons(self, name: str = "m") -> list[str]:
        return [one.why for one in self.one(name).records]

    def problems(self, name: str = "m") -> list[str]:
        return [one.problem for one in self.one(name).records if one.problem]
