"""Scaling on a running plane: the timers, threads, observations and store around `Autoscaler`."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from pointsman.config.plan import PointsmanPlan
from pointsman.control import Controller, Desired
from pointsman.control.instances import replica_counts
from pointsman.control.preemption import Preemptor
from pointsman.reasons import Reason
from pointsman.runtimes.interface import GpuMeter, TargetStore
from pointsman.runtimes.metric_sources import MetricSources
from pointsman.runtimes.policy_runner import PolicyRunner
from pointsman.runtimes.traffic import Traffic
from pointsman.scaling.autoscaler import ActivePolicy, Autoscaler, ScalingChange, ScalingSetup
from pointsman.scaling.deployment import ScaledDeployment, load_history, policy_problems, scaling_status
from pointsman.scaling.policy import policy_name
from pointsman.scaling.records import ScalingRecord

SAVE_S = 30.0
"""Measurements are saved this often; decisions at once."""


Decided: TypeAlias = Callable[[ScalingChange, Iterable[ScaledDeployment], float], None]
"""(change, deployments, now): what came of the call of a policy."""


class PolicyCalls(Protocol):
    """Calls policies when they are due."""

    def start(self) -> None: ...

    def close(self) -> None: ...

    def wake(self) -> None:
        """A policy may be due earlier than it was."""
        ...

    def problems(self) -> list[str]:
        """Calls of replaced policies that do not return."""
        ...


MakePolicyCalls: TypeAlias = Callable[[Autoscaler, MetricSources, Callable[[], float], Decided], PolicyCalls]


class PlaneScaling:
    """The scaled deployments of a plane."""

    def __init__(
        self,
        traffic: Traffic,
        controller: Controller,
        retarget: Callable[[], None],
        evict: Callable[[str, Reason], None],
        clock: Callable[[], float],
        gpu_usage: GpuMeter,
        policies: MakePolicyCalls,
    ) -> None:
        """`retarget()` is called when targets have changed, `evict(instance, why)` when an instance makes room."""
        self._traffic = traffic
        self._controller = controller
        self._retarget = retarget
        self._evict = evict
        self._clock = clock
        self._autoscaler = Autoscaler()
        self._preemptor = Preemptor(controller, self._autoscaler.deployments)
        self._sources = MetricSources(traffic, controller, clock, gpu_usage)
        self._loop = policies(self._autoscaler, self._sources, clock, self._decided)
        self._state = ScalingState(self._autoscaler, clock)

    def open(self, store: TargetStore) -> None:
        """Continue with what an earlier plane saved."""
        self._state.store = store
        self._traffic.hooks.wanted = self.wake
        self._loop.start()

    def close(self) -> None:
        self._state.save()
        self._state.store = None
        self._loop.close()
        self._sources.close()

    def configure(self, plan: PointsmanPlan) -> None:
        """Apply a plan whose lanes are open. Targets stay."""
        for name in self._state.configure(plan.scaling_setup()):
            self._sources.forget(name)
        for one in self._autoscaler.deployments.values():
            self._sources.configure(one)
        self._loop.wake()

    def desired(self, wanted: Desired, plan: PointsmanPlan | None = None) -> Desired:
        """The same with the targets in force, within the limits of `plan`; None: of the plan in force."""
        return wanted.with_replicas(self._autoscaler.targets(None if plan is None else plan.scaling_setup()))

    def scale(self, name: str, replicas: int | None, for_s: float | None, by: str) -> None:
        """Set a target, whatever the policy says, for so long; None: follow the policy again."""
        self._apply(self._autoscaler.override(name, replicas, for_s, by, self._clock()))
        self._loop.wake()

    def wake(self, deployment: str) -> None:
        """A request waits and no instance takes it: call the policy now."""
        self._autoscaler.wake(deployment)
        self._loop.wake()

    # What operators see

    def status(self, name: str) -> dict[str, Any]:
        """How many replicas a deployment has, and why: plain data."""
        one, now = self._autoscaler.find(name), self._clock()
        one.observed.observe_replicas(replica_counts(self._controller.instances(), one.members), now)
        return scaling_status(one, self._sources.load(one), now)

    def load_history(self, name: str) -> dict[str, Any]:
        """Past arrivals of a deployment, for rehearsals: plain data."""
        one = self._autoscaler.find(name)
        return load_history(one, self._sources.load(one), self._clock())

    def each(self) -> list[ScaledDeployment]:
        return list(self._autoscaler.deployments.values())

    def problems(self) -> list[str]:
        """Metrics that cannot be read, and policies that fail."""
        return [*self._sources.problems(), *self._loop.problems(), *policy_problems(self.each())]

    # What follows from decisions

    def _decided(self, change: ScalingChange, deployments: Iterable[ScaledDeployment], now: float) -> None:
        """A policy has answered: apply its targets, and make room for instances that have no place."""
        self._apply(change)
        used = {name for name, lane in self._traffic.lanes.items() if len(lane.dispatcher)}
        for one in deployments:
            made = self._preemptor.make_room(one, used, now)
            for instance_id, why in made.evictions:
                self._evict(instance_id, why)
            self._apply(ScalingChange(made.records, made.retarget))
        self._state.save_if_due(now)

    def _apply(self, change: ScalingChange) -> None:
        self._state.keep(change.records)
        if change.retarget:
            self._retarget()


class ScalingState:
    """Saves and restores targets, records and the state of policies. Without a store, nothing is kept."""

    def __init__(self, autoscaler: Autoscaler, clock: Callable[[], float]) -> None:
        self.store: TargetStore | None = None
        self._autoscaler = autoscaler
        self._clock = clock
        self._saved_at = 0.0

    def configure(self, setup: ScalingSetup) -> list[str]:
        """Apply a configuration with what was saved. Returns the deployments that are not scaled any more."""
        store = self.store
        if store is None:
            return self._autoscaler.configure(setup, {})
        gone = self._autoscaler.configure(setup, store.scaling(), store.scaling_records)
        for name in gone:
            store.forget_scaling(name)
        return gone

    def keep(self, records: Collection[ScalingRecord]) -> None:
        """Save records at once, and the state of their deployments."""
        if self.store is not None and records:
            for record in records:
                self.store.note_scaling(record.deployment, record.as_json())
            self.store.save_scaling(self._autoscaler.state({record.deployment for record in records}))

    def save_if_due(self, now: float) -> None:
        if now - self._saved_at >= SAVE_S:
            self.save()

    def save(self) -> None:
        self._saved_at = self._clock()
        if self.store is not None:
            self.store.save_scaling(self._autoscaler.state())


class PolicyLoop:
    """Calls every policy when it is due: each on a thread of its own, one call at a time, with a time limit."""

    def __init__(
        self,
        autoscaler: Autoscaler,
        sources: MetricSources,
        clock: Callable[[], float],
        decided: Decided,
    ) -> None:
        self._autoscaler = autoscaler
        self._sources = sources
        self._clock = clock
        self._decided = decided
        self._runners: dict[ActivePolicy, PolicyRunner] = {}
        """Also of policies that were replaced during a call."""
        self._woken = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._spawn(self._run())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def wake(self) -> None:
        """A policy may be due earlier than it was."""
        self._woken.set()

    def problems(self) -> list[str]:
        """Calls of replaced policies that do not return."""
        current = self._autoscaler.policies
        self._runners = {
            policy: runner
            for policy, runner in self._runners.items()
            if runner.is_running or current.get(policy.plan.key) is policy
        }
        return [
            f'a call of {policy_name(one.plan.plan.policy)}, which decides about "{one.plan.name}" no more, '
            "does not return; it takes a core or a thread until the plane is started again"
            for one in self._runners
            if current.get(one.plan.key) is not one
        ]

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            for policy in self._autoscaler.due(self._clock()):
                policy.begin()
                self._spawn(self._call(policy))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._autoscaler.next_due_s(self._clock())):
                    await self._woken.wait()

    async def _call(self, policy: ActivePolicy) -> None:
        try:
            await self._decide(policy)
        except Exception as error:  # a defect of ours: the next call may succeed
            failed = {"message": f"pointsman: scaling {policy.plan.name} failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(failed)
        policy.end(self._clock())
        self._woken.set()

    async def _decide(self, policy: ActivePolicy) -> None:
        await self._sources.read_gpus(self._autoscaler.members(policy))
        members, now = self._autoscaler.members(policy), self._clock()
        loads = {one.name: self._sources.load(one, gpus=True) for one in members}
        invocation = self._autoscaler.invoke(policy, loads, self._sources.replicas(members), now)
        if invocation is None:
            return
        runner = self._runners.setdefault(policy, PolicyRunner(policy.plan.name))
        answer = await runner.run(invocation.call, invocation.time_limit_s)
        if self._autoscaler.policies.get(policy.plan.key) is policy:  # else it was replaced meanwhile
            change = self._autoscaler.answered(invocation, answer, now)
            self._decided(change, self._autoscaler.members(policy), now)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
