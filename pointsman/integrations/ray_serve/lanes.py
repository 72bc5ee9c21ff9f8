"""Requests and replicas of a Serve deployment, in the form that our dispatcher uses; nothing here imports Ray.

Enters: requests, Serve's reports about replicas, and the ends of requests. Leaves: for each request, a future with its
replica. The one rule: the dispatcher decides; if the user's code fails, power of two decides at once.
"""

import asyncio
import base64
import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from queue import SimpleQueue
from typing import Any

import msgspec

from pointsman.config.deployments import scheduling
from pointsman.config.plan import DeploymentPlan
from pointsman.config.problems import Problems
from pointsman.config.schema import SchedulingSpec
from pointsman.config.validation import Validator
from pointsman.control.desired import DesiredDeployment
from pointsman.errors import PluginError
from pointsman.reasons import Reason
from pointsman.render.text import one_line
from pointsman.routing.decisions import Choice
from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.endpoints import IN_FLIGHT_REQUESTS, IS_FULL, Endpoint, Metrics
from pointsman.routing.events import (
    Arrived,
    Cancelled,
    Changed,
    Ended,
    Failed,
    Joined,
    Left,
    Measured,
    Outcome,
    Refusal,
    Refuse,
    Revoke,
    Scraped,
    Send,
)
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.queue import FlowControl
from pointsman.routing.routes import BatchPolicy, DispatcherSettings, DispatchPlan, Route
from pointsman.routing.user_code import Stalled
from pointsman.runtimes.tasks import LoopClock
from pointsman.runtimes.traffic import Lane, TrafficHooks, contain, scheduling_problems
from pointsman.selection import SchedulingFailure
from pointsman.strategies import SchedulingPolicy
from pointsman.strategies.dispatching import MAX_WAITING, plan_for
from pointsman.strategies.power_of_two import PowerOfTwoPolicy
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision

MAX_MODELS = 1_000
"""Maximum number of multiplexed models that are distinguished; requests for further models go to any replica."""
KEPT_RECORDS = 2_000
GONE = Reason("replica-removed")

# Plans


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `request_router_kwargs`: the `scheduling` section of a deployment, and limits for waiting."""

    policy: str = ""
    parameters: Mapping[str, Any] = {}
    config: Mapping[str, Any] | None = None
    time_limit: str | float | None = None
    """Time limit for one call of the user's code; None means 5 ms."""
    pickled: str = ""
    """A policy that was passed as an object, as base64 of cloudpickle."""
    max_waiting: int = MAX_WAITING
    wait_s: float = 0.0
    """How long a request waits for a replica; 0 means as long as Serve allows."""
    seed: int = 0

    def section(self) -> dict[str, Any]:
        """The fields as a `scheduling` section."""
        given = {"policy": self.policy, "parameters": dict(self.parameters), "config": self.config}
        section = {name: value for name, value in given.items() if value}
        return section if self.time_limit is None else section | {"timeLimit": self.time_limit}


def routing_plan(deployment: str, settings: RouterSettings, policy: SchedulingPolicy | None = None) -> DeploymentPlan:
    """The scheduling of a deployment. Raises `ConfigError` with all problems. `policy`: a policy given as an object."""
    problems = Problems("")
    spec = Validator(problems).value(settings.section(), SchedulingSpec, ())
    how = scheduling(spec, problems, ())
    problems.raise_if_any()
    return DeploymentPlan(
        desired=DesiredDeployment(name=deployment, model=""),
        policy=policy or how.policy,
        picker=how.picker if policy is None else None,
        scheduling_recipe=how.recipe,
        time_limit_s=how.time_limit_s,
    )


def serve_plan(plan: DeploymentPlan, settings: RouterSettings) -> DispatchPlan:
    """The dispatcher's plan: the user's plan, with power of two for requests where that plan fails or finds nothing."""
    if plan.policy is not None:
        made = plan_for(plan.policy, max_waiting=settings.max_waiting, ttl_s=settings.wait_s)
    else:
        assert plan.picker is not None, "a plan has a policy or a picker"
        made = plan.picker.dispatch_plan()
        if plan.picker.flow_control is None:
            made = msgspec.structs.replace(
                made,
                make_queue=lambda: FlowControl(
                    max_requests=settings.max_waiting, default_request_ttl_s=settings.wait_s
                ),
            )
    if made.policy is not None:
        return msgspec.structs.replace(made, route=PowerOfTwoPolicy(), policy=InsistentBatch(made.policy))
    return msgspec.structs.replace(made, route=InsistentRoute(made.route), stand_in=PowerOfTwoPolicy())


def _has_room(endpoints: Endpoints) -> bool:
    full = endpoints.column(IS_FULL)
    return any(not is_full and one.instance.can_accept_request for one, is_full in zip(endpoints, full, strict=True))


class InsistentRoute:
    """A route that prefers replicas with the model of the request, and must choose while a replica has room.

    Without a choice, Serve would call its router again and again. So if the route finds no replica, the stand-in
    chooses, and the record says why.
    """

    def __init__(self, route: Route) -> None:
        self._route = route

    @property
    def name(self) -> str:
        return self._route.name

    def choose(self, cycle: RequestCycle, endpoints: Endpoints) -> Choice | SchedulingFailure[Endpoint]:
        model = cycle.request.model_name
        if model:
            others = [one.row for one in endpoints if one.metrics is None or model not in one.metrics.active_models]
            if 0 < len(others) < len(endpoints):
                loaded = endpoints.without(others)
                if _has_room(loaded):
                    return self._chosen(cycle, loaded)
        return self._chosen(cycle, endpoints)

    def _chosen(self, cycle: RequestCycle, endpoints: Endpoints) -> Choice | SchedulingFailure[Endpoint]:
        choice = self._route.choose(cycle, endpoints)
        if isinstance(choice, SchedulingFailure) and _has_room(endpoints):
            raise PluginError(self.name, "chose no replica although one has room")
        return choice


class InsistentBatch:
    """A policy for all waiting requests at once. While a replica has room, it must decide on at least one request."""

    now: float | None = None
    seed: int = 0

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self.name = policy.name
        self.price_per_gpu_hour = policy.price_per_gpu_hour

    def schedule(
        self, requests: list[RequestMetadata], instances: list[ExecutionInstance]
    ) -> Iterable[SchedulingDecision]:
        self._policy.now, self._policy.seed = self.now, self.seed
        decisions = list(self._policy.schedule(requests, instances))
        if not decisions and any(_accepts(one) for one in instances):
            raise PluginError(self.name, "chose no replica although one has room")
        return decisions


def _accepts(instance: ExecutionInstance) -> bool:
    limit = instance.max_concurrency
    return instance.can_accept_request and (limit is None or instance.current_load < limit)


# The user's code


class ThreadWatch:
    """Times the user's scheduling code on a thread, and abandons the thread when a call blocks.

    Serve's router does not run on the main thread, and signals can interrupt code only there. While a call hangs,
    further calls are refused at once. The thread is interrupted as soon as it runs Python again.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.inside = False
        self._calls: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], SimpleQueue[Any]]] = SimpleQueue()
        self._hangs: SimpleQueue[Any] | None = None
        """The queue for the answer of a call that hangs; None if no call hangs."""
        self._thread: threading.Thread | None = None

    def call(self, limit_s: float, method: Callable[..., Any], about: tuple[Any, ...]) -> tuple[Any, float]:
        if self._hangs is not None:
            if self._hangs.empty():
                raise Stalled
            self._hangs = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="pointsman policy", daemon=True)
            self._thread.start()
        began, answer = time.perf_counter(), SimpleQueue[Any]()
        self._calls.put((method, about, answer))
        self.inside = True
        try:
            result, error = answer.get(timeout=limit_s)
        except Exception:  # queue.Empty: the limit has passed
            self._hangs = answer
            _interrupt(self._thread)
            raise Stalled from None
        finally:
            self.inside = False
        if error is not None:
            raise error
        return result, time.perf_counter() - began

    def _work(self) -> None:
        while True:
            try:
                method, about, answer = self._calls.get()
                try:
                    made = method(*about)
                    answer.put((list(made) if hasattr(made, "__next__") else made, None))
                except BaseException as error:  # this includes the interrupting exception
                    answer.put((None, error))
            except Stalled:  # the interrupt came after the call had ended
                continue


def _interrupt(thread: threading.Thread) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Stalled))


# Requests


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica, as Serve describes it."""

    name: str
    max_ongoing: int
    node: str = ""
    zone: str = ""
    models: frozenset[str] = frozenset()
    """Multiplexed models that the replica has loaded."""
    stats: Mapping[str, Any] = {}
    """The last result of the replica's `record_routing_stats`."""


class RequestRefused(Exception):
    """The dispatcher has refused a request; the reason says why."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(f"{refusal.outcome.value}: {refusal.reason}")


class KnownReplicas:
    """The replicas of a lane, as Serve reports them, and the load that other routers have put on each of them."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._dispatcher = lane.dispatcher
        self._replicas: dict[str, Replica] = {}
        self._others: Counter[str] = Counter()
        """For each replica, the number of its requests that other routers have sent."""
        self._models: set[str] = set()
        self._read: dict[str, Metrics] = {}
        """The routing stats of each replica. They are read when they change, not at every request."""

    def update(self, replicas: Iterable[Replica]) -> set[str]:
        """Take in the present replicas. Returns the names of the replicas that have left."""
        known, now = self._replicas, {one.name: one for one in replicas}
        self._replicas = {name: known[name] for name in known if name not in now} | now
        for name, replica in now.items():
            if name not in known:
                self._lane.tell(Joined(self._instance(replica)))
            elif replica != known[name]:
                self._lane.tell(Changed(self._instance(replica)))
            else:
                continue
            self._read[name] = metrics_of(replica)
            self._measure(replica)
            if self._dispatcher.extractors and replica.stats:
                self._lane.tell(Scraped(name, replica.stats))
        return known.keys() - now.keys()

    def remove(self, name: str) -> None:
        del self._replicas[name]
        self._others.pop(name, None)
        self._read.pop(name, None)
        self._lane.tell(Left(name, GONE))

    def __contains__(self, name: str) -> bool:
        return name in self._replicas

    def reported(self, name: str, number: int) -> None:
        """Take in how many requests a replica runs, including those of other routers."""
        if name in self._replicas:
            others = max(number - self._ours(name), 0)
            if others != self._others[name]:
                self._others[name] = others
                self._measure(self._replicas[name])

    def is_full(self, name: str) -> None:
        """Note that a replica rejected a request. The replica must count as full, even without this request."""
        self._others[name] = max(self._replicas[name].max_ongoing - (self._ours(name) - 1), 1)
        self._measure(self._replicas[name])

    def used_by_others(self) -> list[str]:
        """Replicas that other routers also use. This router must ask them for their load."""
        return [name for name, number in self._others.items() if number]

    def serve(self, model: str) -> bool:
        """Register a model, which every replica can load, with the dispatcher. False if there are too many models."""
        if model not in self._models:
            if len(self._models) >= MAX_MODELS:
                return False
            self._models.add(model)
            for replica in self._replicas.values():
                self._lane.tell(Changed(self._instance(replica)))
        return True

    def loads(self) -> dict[str, int]:
        return {name: self._ours(name) + self._others[name] for name in self._replicas}

    def _ours(self, name: str) -> int:
        fleet = self._dispatcher.fleet
        return int(fleet.load.columns[IN_FLIGHT_REQUESTS][fleet[name].row])

    def _measure(self, replica: Replica) -> None:
        running = float(self._ours(replica.name) + self._others[replica.name])
        metrics = msgspec.structs.replace(self._read[replica.name], running_requests_size=running)
        self._lane.tell(Measured(replica.name, metrics))

    def _instance(self, replica: Replica) -> ExecutionInstance:
        labels = {"kubernetes.io/hostname": replica.node, "topology.kubernetes.io/zone": replica.zone}
        return ExecutionInstance(
            instance_id=replica.name,
            max_concurrency=replica.max_ongoing,
            adapters=frozenset(self._models),
            labels={name: value for name, value in labels.items() if value},
        )


class ReplicaLane:
    """The dispatcher of one router. For each request, it has a future with the request's replica."""

    def __init__(
        self,
        deployment: str,
        settings: RouterSettings,
        loop: asyncio.AbstractEventLoop,
        policy: SchedulingPolicy | None = None,
        problem: Reason | None = None,
    ) -> None:
        """`policy`: a policy given as an object. `problem`: why these settings replace the user's settings."""
        self._loop = loop
        self.problem = problem
        clock = LoopClock(loop)
        self.now = clock.now
        plan = routing_plan(deployment, settings, policy)
        made = DispatcherSettings(keep_records=KEPT_RECORDS, seed=settings.seed)
        self.dispatcher = Dispatcher(serve_plan(plan, settings), made)
        self._lane = Lane(plan, self.dispatcher, self, clock, TrafficHooks())
        contain(self._lane, ThreadWatch(clock.now))
        self.replicas = KnownReplicas(self._lane)
        self._chosen: dict[str, asyncio.Future[str]] = {}
        """The name of each request's replica, by request id."""
        self.revoke_request: Callable[[str], None] = lambda _: None
        """The function that stops the request with this id, to make room for a more important request."""
        self._revoked: set[str] = set()

    def choose(self, request: RequestMetadata) -> "asyncio.Future[str]":
        """The name of a request's replica, as soon as a replica has room. Raises `RequestRefused`."""
        if request.model_name and not self.replicas.serve(request.model_name):
            request = msgspec.structs.replace(request, model_name="")
        future: asyncio.Future[str] = self._loop.create_future()
        self._chosen[request.request_id] = future
        self._lane.tell(Arrived((request,)))
        return future

    def choose_again(self, request: RequestMetadata) -> "asyncio.Future[str]":
        """The next replica for a request that was rejected by its replica. The request keeps its place in the order."""
        holds = self.dispatcher.ledger.holds(request.request_id)
        if not holds:  # the replica is gone
            return self.choose(request)
        future: asyncio.Future[str] = self._loop.create_future()
        self._chosen[request.request_id] = future
        self.replicas.is_full(str(holds[0].endpoint))
        self._lane.tell(Failed(request.request_id, Reason("replica-full"), full=True))
        return future

    def ended(self, request_id: str) -> None:
        self._chosen.pop(request_id, None)
        self._lane.tell(Cancelled(request_id) if request_id in self._revoked else Ended(request_id))
        self._revoked.discard(request_id)

    def cancelled(self, request_id: str, refusal: Refusal | None = None) -> None:
        self._chosen.pop(request_id, None)
        self._revoked.discard(request_id)
        self._lane.tell(Cancelled(request_id, refusal))

    def update(self, replicas: Iterable[Replica]) -> None:
        """Take in the present replicas."""
        for name in self.replicas.update(replicas):
            self.lost(name)

    def lost(self, name: str) -> None:
        """Remove a replica. Serve handles its requests, and tries those again that the replica did not accept."""
        if name in self.replicas:
            facts = {"instance": name, "error": GONE, "tries": 1, "max_tries": 1, "no_retry": "no-retry"}
            for request_id in self.dispatcher.ledger.on(self.dispatcher.fleet[name]):
                self.cancelled(request_id, Refusal(Outcome.EVICTED_OTHER, Reason("instance-failed", facts)))
            self.replicas.remove(name)

    @property
    def is_blocked(self) -> bool:
        """Whether requests wait."""
        return len(self.dispatcher) > self.dispatcher.running

    # Carrying out decisions

    def send(self, lane: Lane, command: Send) -> None:
        future = self._chosen.pop(command.request.request_id, None)
        if future is None or future.done():  # the caller is gone, or Serve already has the answer
            self._loop.call_soon(self.cancelled, command.request.request_id)
        else:
            future.set_result(str(command.endpoint))

    def refuse(self, lane: Lane, command: Refuse) -> None:
        future = self._chosen.pop(command.request.request_id, None)
        if future is not None and not future.done():
            future.set_exception(RequestRefused(command.refusal))

    def revoke(self, lane: Lane, command: Revoke) -> None:
        self._revoked.add(command.request.request_id)
        self.revoke_request(command.request.request_id)

    def status(self) -> dict[str, Any]:
        """The state as plain data."""
        lane, dispatcher = self._lane, self.dispatcher
        return {
            "strategy": dispatcher.strategy,
            "policies": [] if lane.containment is None else lane.containment.report(),
            "problems": [one.as_dict() for one in problems_of(self)],
            "waiting": len(dispatcher) - dispatcher.running,
            "running": dispatcher.running,
            "replicas": self.replicas.loads(),
            "counters": dispatcher.counters.as_dict(),
        }


def problems_of(one: ReplicaLane) -> list[Reason]:
    return [*([] if one.problem is None else [one.problem]), *scheduling_problems([one._lane])]


def lane_of(
    deployment: str,
    kwargs: Mapping[str, Any],
    loop: asyncio.AbstractEventLoop,
    unpickled: Callable[[bytes], SchedulingPolicy],
) -> ReplicaLane:
    """The lane of a router with these settings. If the settings cannot be used, as when the router's process lacks a
    module, power of two decides: an exception would make Serve keep every request forever."""
    try:
        settings = msgspec.convert(kwargs, RouterSettings)
        policy = unpickled(base64.b64decode(settings.pickled)) if settings.pickled else None
        return ReplicaLane(deployment, settings, loop, policy)
    except Exception as error:
        what, instead = one_line(f"{type(error).__name__}: {error}", 300), PowerOfTwoPolicy.name
        why = Reason("router-settings-unusable", {"deployment": deployment, "error": what, "policy": instead})
        return ReplicaLane(deployment, RouterSettings(policy=instead), loop, problem=why)


def metrics_of(replica: Replica) -> Metrics:
    """The metrics that plugins read, from the routing stats with the same names; a missing metric is 0."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(Metrics):
        value = replica.stats.get(field.name)
        if value is None:
            continue
        if field.type is float and isinstance(value, int | float) and isfinite(value):
            found[field.name] = float(value)
        elif field.type is int and isinstance(value, int):
            found[field.name] = value
        elif isinstance(value, list | set | frozenset | tuple):
            found[field.name] = frozenset(map(str, value))
    found["active_models"] = found.get("active_models", frozenset()) | replica.models
    return Metrics(**found)
