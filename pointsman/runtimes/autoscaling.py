"""Scaling on a running plane: the timers, threads, observations and store around `Autoscaler`."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any, Protocol, TypeAlias
from urllib.parse import quote, urlsplit

import msgspec

from pointsman.config.plan import DeploymentPlan, PointsmanPlan
from pointsman.control import Controller, Desired, Phase
from pointsman.control.desired import Address
from pointsman.control.instances import replica_counts, running_counts
from pointsman.control.places import WORKLOAD, Places, remember
from pointsman.control.preemption import Preemptor
from pointsman.control.status import NO_PROSPECTS, Prospects
from pointsman.engines import Samples
from pointsman.http.client import NoResponse, fetch
from pointsman.reasons import Reason
from pointsman.runtimes.interface import BackgroundTasks, GpuMeter, Timer
from pointsman.runtimes.policy_runner import PolicyRunner
from pointsman.runtimes.serving import Demand, Ending, PlaneTraffic
from pointsman.runtimes.stores import TargetStore
from pointsman.scaling.autoscaler import ActivePolicy, Autoscaler, ScalingChange, ScalingSetup
from pointsman.scaling.deployment import (
    Load,
    ReplicaCounts,
    ScaledDeployment,
    begin_records,
    load_history,
    policy_problems,
    scaling_status,
)
from pointsman.scaling.limits import MetricQuery
from pointsman.scaling.measurements import Measurements
from pointsman.scaling.policy import policy_name
from pointsman.scaling.records import ScalingRecord

# Observations for scaling policies: requests and replicas, custom metrics of replicas and Prometheus servers, and GPU
# usage. A number that cannot be read is left out: the policy keeps the earlier numbers, and the problem is reported.


CUSTOM = "pointsman_custom_metric"
TIMEOUT_S = 5.0


class MetricSources:
    def __init__(
        self,
        demand: Demand,
        controller: Controller,
        clock: Callable[[], float],
        gpu_usage: GpuMeter,
        tasks: BackgroundTasks,
    ) -> None:
        self._demand = demand
        self._controller = controller
        self._clock = clock
        self._gpu_usage = gpu_usage
        self._tasks = tasks
        self._custom: dict[str, CustomMetrics] = {}
        self._plans: dict[str, DeploymentPlan] = {}

    def configure(self, one: ScaledDeployment, plan: DeploymentPlan) -> None:
        """Observe a deployment whose lane is open."""
        clock, self._plans[one.name] = self._clock, plan
        self._demand.observe(one.name, lambda ended: _ended(one.observed.measurements, ended, clock()))
        if one.name not in self._custom:
            self._custom[one.name] = CustomMetrics(
                lambda: self._addresses(one), lambda name, value: one.observed.measurements.metric(clock(), name, value)
            )
        custom = self._custom[one.name]
        custom.queries, custom.interval_s = one.plan.metrics, one.plan.limits.interval_s
        if plan.is_replica or one.plan.metrics:
            custom.start(self._tasks, one.name)

    def forget(self, deployment: str) -> None:
        self._custom.pop(deployment).close()
        del self._plans[deployment]

    def close(self) -> None:
        for custom in self._custom.values():
            custom.close()
        self._gpu_usage.close()

    def problems(self) -> list[Reason]:
        return [why for name, one in self._custom.items() for why in one.problems(name)]

    def replicas(self, deployments: Iterable[ScaledDeployment]) -> dict[str, ReplicaCounts]:
        instances = self._controller.instances()
        return {one.name: replica_counts(instances, one.members) for one in deployments}

    def load(self, one: ScaledDeployment, *, gpus: bool = False) -> Load:
        """The load of a deployment; with `gpus`, including the last reading of its GPU usage."""
        self._demand.expect(one.name, one.observed.start_up_s)
        counts, desired = self._demand.counts(one.name), self._plans[one.name].desired
        return Load(
            running=counts.running,
            waiting=counts.waiting,
            arrived=counts.arrived,
            kv_usage=counts.kv_usage,
            gpu_usage=self._gpu_usage.of(one.members, self._controller.instances()) if gpus else None,
            max_concurrency=desired.max_concurrency or desired.engine_slots,
            start_timeout_s=desired.lifecycle.start_timeout_s,
        )

    async def read_gpus(self, deployments: Iterable[ScaledDeployment]) -> None:
        names = {name for one in deployments for name in one.members}
        await self._gpu_usage.read(names, self._controller.instances())

    def _addresses(self, one: ScaledDeployment) -> list[Address]:
        """Replicas that may have custom metrics."""
        plan = self._plans.get(one.name)
        if plan is None or not plan.is_replica:
            return []
        ready = [each for each in self._controller.instances() if each.phase is Phase.READY]
        return [Address(each.host, each.port, each.tls) for each in ready if each.deployment in one.members]


def _ended(measurements: Measurements, one: Ending, now: float) -> None:
    measurements.ended(
        now,
        latency_ms=one.latency_ms,
        ttft_ms=one.ttft_ms,
        tpot_ms=one.tpot_ms,
        met_slo=one.met_slo,
        tokens=one.tokens,
    )


class CustomMetrics:
    """Reads the custom metrics of one deployment repeatedly."""

    def __init__(self, replicas: Callable[[], Sequence[Address]], tell: Callable[[str, float], None]) -> None:
        """`replicas` returns the replicas that take requests. `tell(name, value)` is called with each number."""
        self.queries: tuple[MetricQuery, ...] = ()
        self.interval_s = 1.0
        self._replicas = replicas
        self._tell = tell
        self._problems: dict[str, Reason] = {}
        self._task: Timer | None = None

    def start(self, tasks: BackgroundTasks, deployment: str) -> None:
        if self._task is None:
            self._task = tasks.keep(f"metrics of {deployment}", self._follow)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def problems(self, deployment: str) -> list[Reason]:
        return [why.having(deployment=deployment) for why in self._problems.values()]

    async def _follow(self) -> None:
        while True:
            await self.once()
            await asyncio.sleep(self.interval_s)

    async def once(self) -> None:
        asked = [self._of_replica(address) for address in self._replicas()]
        asked += [self._of_prometheus(query) for query in self.queries]
        await asyncio.gather(*asked)
        names = {query.name for query in self.queries}
        self._problems = {name: why for name, why in self._problems.items() if name in names}

    async def _of_replica(self, address: Address) -> None:
        try:
            answer = await fetch(address, "GET", "/metrics", timeout_s=TIMEOUT_S)
        except NoResponse:  # the probes of the replica report what is wrong
            return
        for name, value in Samples(answer.body).labelled(CUSTOM, "name") if answer.status == 200 else ():
            self._tell(name, value)

    async def _of_prometheus(self, query: MetricQuery) -> None:
        try:
            value = await answer_of(query)
        except NoResponse as error:
            facts = {"metric": query.name, "url": query.url, "error": str(error)}
            self._problems[query.name] = Reason("metric-not-read", facts)
        else:
            if value is not None and isfinite(value):
                self._problems.pop(query.name, None)
                self._tell(query.name, value)
                return
            found = None if value is None else str(value)
            self._problems[query.name] = Reason(
                "metric-useless", {"metric": query.name, "url": query.url, "found": found}
            )


class Result(msgspec.Struct):
    """One series in the response of a Prometheus server."""

    value: tuple[float, str]


class Data(msgspec.Struct, rename="camel"):
    """The result of a query: a list of series, or a number and its time."""

    result_type: str
    result: msgspec.Raw = msgspec.Raw()


class MetricAnswer(msgspec.Struct):
    """The response of a Prometheus server."""

    status: str = ""
    data: Data | None = None
    error: str = ""


async def answer_of(query: MetricQuery) -> float | None:
    """The sum of the present values at a Prometheus server; None if there are no values. Raises `NoResponse`."""
    try:
        parts = urlsplit(query.url)
        port = parts.port
    except ValueError as error:
        raise NoResponse(f"this is not an address: {error}") from None
    tls = parts.scheme == "https"
    address = Address(parts.hostname or "", port or (443 if tls else 80), tls)
    path = f"{parts.path.rstrip('/')}/api/v1/query?query={quote(query.query, safe='')}"
    answer = await fetch(address, "GET", path, timeout_s=TIMEOUT_S)
    try:
        told = msgspec.json.decode(answer.body, type=MetricAnswer)
        if told.data is None:
            raise NoResponse(told.error or f"it answered with {answer.status}")
        if told.data.result_type == "scalar":
            return float(msgspec.json.decode(told.data.result, type=tuple[float, str])[1])
        if told.data.result_type != "vector":
            raise NoResponse(f"the query must give numbers of now, and gives a {told.data.result_type}")
        found = [float(one.value[1]) for one in msgspec.json.decode(told.data.result, type=list[Result])]
    except (msgspec.MsgspecError, ValueError) as error:
        raise NoResponse(f"it answered with {answer.status}, and not as a Prometheus does: {error}") from None
    return sum(found) if found else None


SAVE_S = 30.0
"""How often measurements are saved; decisions are saved at once."""


Decided: TypeAlias = Callable[[ScalingChange, Iterable[ScaledDeployment], float], None]
"""Called with (change, deployments, now) after the call of a policy."""


class PolicyCalls(Protocol):
    """Calls policies when they are due."""

    def start(self) -> None: ...

    def close(self) -> None: ...

    def wake(self) -> None:
        """Check again when policies are due: a policy may be due earlier than before."""
        ...

    def problems(self) -> list[Reason]:
        """Calls of replaced policies that do not return."""
        ...


MakePolicyCalls: TypeAlias = Callable[
    [Autoscaler, MetricSources, Callable[[], float], Decided, BackgroundTasks], PolicyCalls
]


class PlaneScaling:
    def __init__(
        self,
        traffic: PlaneTraffic,
        controller: Controller,
        retarget: Callable[[], None],
        evict: Callable[[str, Reason], None],
        clock: Callable[[], float],
        gpu_usage: GpuMeter,
        policies: MakePolicyCalls,
        tasks: BackgroundTasks,
    ) -> None:
        """Calls `retarget()` when targets have changed, and `evict(instance, why)` when an instance must make room."""
        self._traffic = traffic
        self._controller = controller
        self._retarget = retarget
        self._evict = evict
        self._clock = clock
        self._autoscaler = Autoscaler()
        self._preemptor = Preemptor(controller, self._autoscaler.deployments)
        self._sources = MetricSources(traffic.demand, controller, clock, gpu_usage, tasks)
        self._loop = policies(self._autoscaler, self._sources, clock, self._decided, tasks)
        self._state = ScalingState(self._autoscaler, clock, controller.places)

    def open(self, store: TargetStore) -> None:
        """Continue with the state that an earlier plane saved."""
        self._state.store = store
        remember(self._controller.places, store.scaling().get(WORKLOAD, ""))
        self._traffic.hooks.wanted = self.wake
        self._loop.start()

    def listen(self, noted: Callable[[ScalingRecord], None]) -> None:
        self._state.noted = noted

    def close(self) -> None:
        self._state.save()
        self._state.store = None
        self._loop.close()
        self._sources.close()

    def configure(self, plan: PointsmanPlan) -> None:
        """Apply a plan whose lanes are open. Targets stay as they are."""
        for name in self._state.configure(plan.scaling_setup(), running_counts(self._controller.instances())):
            self._sources.forget(name)
        plans = {one.name: one for one in plan.deployments}
        for one in self._autoscaler.deployments.values():
            self._sources.configure(one, plans[one.name])
        self._loop.wake()

    def desired(self, wanted: Desired, plan: PointsmanPlan | None = None) -> Desired:
        """The desired state with the targets in force, within the limits of `plan` (default: the plan in force)."""
        setup, running = None if plan is None else plan.scaling_setup(), running_counts(self._controller.instances())
        return wanted.with_replicas(self._autoscaler.targets(setup, self._state.saved(), running))

    def scale(self, name: str, replicas: int | None, for_s: float | None, by: str) -> None:
        self._apply(self._autoscaler.override(name, replicas, for_s, by, self._clock()))
        self._loop.wake()

    def wake(self, deployment: str) -> None:
        """Call the policy now, because a request waits and no instance takes requests."""
        self._autoscaler.wake(deployment)
        self._loop.wake()

    def prospects(self, deployment: str) -> Prospects:
        """What scaling can do for a deployment that has no instances that take requests."""
        one = next((one for one in self.each() if deployment in one.members), None)
        if one is None:
            return NO_PROSPECTS
        may_start = one.target > 0 or (one.guard.override is None and not one.refuses)
        return Prospects(may_start, self._preemptor.may_make_room(one))

    # What operators see

    def status(self, name: str) -> dict[str, Any]:
        one, now = self._autoscaler.find(name), self._clock()
        one.observed.observe_replicas(replica_counts(self._controller.instances(), one.members), now)
        return scaling_status(one, self._sources.load(one), now)

    def load_history(self, name: str) -> dict[str, Any]:
        one = self._autoscaler.find(name)
        return load_history(one, self._sources.load(one), self._clock())

    def each(self) -> list[ScaledDeployment]:
        return list(self._autoscaler.deployments.values())

    def problems(self) -> list[Reason]:
        return [*self._sources.problems(), *self._loop.problems(), *policy_problems(self.each())]

    # Carrying out decisions

    def _decided(self, change: ScalingChange, deployments: Iterable[ScaledDeployment], now: float) -> None:
        """Apply the targets that a policy has returned, and make room for instances that have no place."""
        self._apply(change)
        used = self._traffic.demand.used()
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

    def __init__(self, autoscaler: Autoscaler, clock: Callable[[], float], places: Places) -> None:
        self.store: TargetStore | None = None
        self.noted: Callable[[ScalingRecord], None] = lambda *_: None
        """Called with each change of a target, and each problem of a policy."""
        self._places = places
        self._autoscaler = autoscaler
        self._clock = clock
        self._saved_at = 0.0

    def saved(self) -> dict[str, str]:
        found = {} if self.store is None else self.store.scaling()
        return {name: state for name, state in found.items() if name != WORKLOAD}

    def configure(self, setup: ScalingSetup, running: Mapping[str, int]) -> list[str]:
        """Apply a configuration, given the saved state and what runs. Returns deployments that are no longer scaled."""
        records = (lambda _: ()) if self.store is None else self.store.scaling_records
        gone = self._autoscaler.configure(setup, self.saved(), records, running)
        if self.store is not None:
            for name in gone:
                self.store.forget_scaling(name)
        self.keep(begin_records(self._autoscaler.deployments.values(), self._clock()))
        return gone

    def keep(self, records: Collection[ScalingRecord]) -> None:
        """Save records at once, and the state of their deployments."""
        for record in records:
            self.noted(record)
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
            self.store.save_scaling({**self._autoscaler.state(), WORKLOAD: self._places.learned.as_json()})


class PolicyLoop:
    """Calls every policy when it is due: each on its own thread, one call at a time, with a time limit."""

    def __init__(
        self,
        autoscaler: Autoscaler,
        sources: MetricSources,
        clock: Callable[[], float],
        decided: Decided,
        tasks: BackgroundTasks,
    ) -> None:
        self._background = tasks
        self._loop: Timer | None = None
        self._autoscaler = autoscaler
        self._sources = sources
        self._clock = clock
        self._decided = decided
        self._runners: dict[ActivePolicy, PolicyRunner] = {}
        """Runners, including those of policies that were replaced during a call."""
        self._woken = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._loop = self._background.keep("scaling policies", self._run)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
        for call in self._calls:
            call.cancel()

    def wake(self) -> None:
        self._woken.set()

    def problems(self) -> list[Reason]:
        current = self._autoscaler.policies
        self._runners = {
            policy: runner
            for policy, runner in self._runners.items()
            if runner.is_running or current.get(policy.plan.key) is policy
        }
        left = [one.plan for one in self._runners if current.get(one.plan.key) is not one]
        facts = [{"policy": policy_name(one.plan.policy), "deployment": one.name} for one in left]
        return [Reason("policy-call-stuck", one) for one in facts]

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            for policy in self._autoscaler.due(self._clock()):
                self._begin(policy)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._autoscaler.next_due_s(self._clock())):
                    await self._woken.wait()

    def _begin(self, policy: ActivePolicy) -> None:
        policy.begin()
        call = asyncio.get_running_loop().create_task(self._decide(policy))
        self._calls.add(call)
        call.add_done_callback(lambda _: self._ended(policy, call))

    def _ended(self, policy: ActivePolicy, call: asyncio.Task[None]) -> None:
        """Note the end of a call. Whatever its result, the next call is scheduled."""
        self._calls.discard(call)
        policy.end(self._clock())
        self._woken.set()
        error = None if call.cancelled() else call.exception()
        if error is not None:  # a bug in Pointsman: the next call may succeed
            self._background.failed(f"scaling of {policy.plan.name}", error)

    async def _decide(self, policy: ActivePolicy) -> None:
        await self._sources.read_gpus(self._autoscaler.members(policy))
        members, now = self._autoscaler.members(policy), self._clock()
        loads = {one.name: self._sources.load(one, gpus=True) for one in members}
        invocation = self._autoscaler.invoke(policy, loads, self._sources.replicas(members), now)
        if invocation is None:
            return
        runner = self._runners.setdefault(policy, PolicyRunner(policy.plan.name))
        answer = await runner.run(invocation.call, invocation.time_limit_s)
        if self._autoscaler.policies.get(policy.plan.key) is policy:  # otherwise it was replaced
            change = self._autoscaler.answered(invocation, answer, now)
            self._decided(change, self._autoscaler.members(policy), now)
