"""Requests in progress: one lane per deployment, each with its dispatcher.

Enters: requests (from a gateway), instances and metrics (from a plane). Leaves: commands, to the carrier. The one rule:
the commands of a dispatcher are carried out at once, in the order in which it returns them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from pointsman.config.plan import DeploymentPlan
from pointsman.control.status import Unavailable
from pointsman.errors import UnknownName
from pointsman.reasons import Reason
from pointsman.routing.canary import Watcher
from pointsman.routing.dispatcher import Dispatcher, watch
from pointsman.routing.endpoints import Metrics
from pointsman.routing.estimates import speed_and_cost
from pointsman.routing.events import (
    Cancelled,
    Changed,
    DispatcherCommand,
    DispatcherEvent,
    Joined,
    Left,
    Measured,
    NoneExpected,
    Outcome,
    Paused,
    Refusal,
    Refuse,
    Revoke,
    Scraped,
    Send,
    Surveyed,
    TimerFired,
    WakeAt,
    Watch,
)
from pointsman.routing.outliers import FAILED, Doubt, Outlier, Outliers
from pointsman.routing.producers import ApproxPrefixCacheProducer
from pointsman.routing.producers.prefix_index import MAX_INDEX_BYTES
from pointsman.routing.routes import DEFAULT_SETTINGS, DispatcherSettings
from pointsman.routing.user_code import CodeWatch, Containment
from pointsman.runtimes.interface import Clock, Timer
from pointsman.runtimes.shadowing import shadow_problems, watcher_of
from pointsman.types import ExecutionInstance

RETRY_S = 1.0
"""Pause after the timer of a lane has raised."""
FAILURES_IN_A_ROW = 3
"""Number of requests that must fail in a row on an instance before the controller is notified."""


class Carrier(Protocol):
    """Carries out the commands of dispatchers. The gateway is a carrier."""

    def send(self, lane: "Lane", command: Send) -> None: ...

    def refuse(self, lane: "Lane", command: Refuse) -> None: ...

    def revoke(self, lane: "Lane", command: Revoke) -> None: ...


class TrafficHooks:
    """Functions that lanes call to report events. Those that are None are not called."""

    def __init__(self) -> None:
        self.failing: Callable[[str, Reason], None] | None = None
        """(instance, why): requests fail in a row on an instance."""
        self.standing_out: Callable[[Outlier], None] | None = None
        """(outlier): an instance has more errors than its peers."""
        self.gone: Callable[[str], None] | None = None
        """(instance): the instance has left, and its requests were sent to other instances or put back in the queue."""
        self.closed: Callable[[Lane], None] | None = None
        """(lane): the last instance of a removed deployment has gone, and the lane is dropped."""
        self.wanted: Callable[[str], None] | None = None
        """(deployment): a request waits, and no instance takes requests."""
        self.stirred: Callable[[str], None] | None = None
        """(instance): an instance that rested was sent a request."""
        self.unavailability: Callable[[str, float | None], Unavailable] | None = None
        """(deployment, start-up time): why no instance takes requests."""
        self.failed: Callable[[str, Exception, float], None] | None = None
        """(task, error, seconds until the next try): the timer of a lane raised. If None, the error is raised."""


class Lane:
    """The requests of one deployment, and the instances that take them."""

    __slots__ = (
        "_carrier",
        "_clock",
        "_good",
        "_idle_calls",
        "_now",
        "_timer",
        "closed",
        "containment",
        "dispatcher",
        "hooks",
        "name",
        "outliers",
        "plan",
        "start_up_s",
        "watcher",
    )

    def __init__(
        self, plan: DeploymentPlan, dispatcher: Dispatcher, carrier: Carrier, clock: Clock, hooks: TrafficHooks
    ) -> None:
        self.name = plan.name
        self.plan = plan
        self.dispatcher = dispatcher
        self.start_up_s: float | None = None
        """How long an instance takes to start; None if unknown."""
        self.containment: Containment | None = None
        """The containment of the lane's user code; None if that code is not timed."""
        self.watcher: Watcher | None = None
        """The watcher with the candidates of the lane; None if it has no candidates."""
        self.closed = False
        """Whether the deployment is gone. Then no new requests come, but those that wait or run may still end."""
        self._carrier = carrier
        self._clock = clock
        self._now = clock.now
        self.hooks = hooks
        self._timer: Timer | None = None
        self.outliers = Outliers()
        self._good = self.outliers.good
        self._idle_calls: dict[str, Callable[[], None]] = {}

    def tell(self, event: DispatcherEvent) -> None:
        """Pass an event to the dispatcher, and carry out the commands that it returns."""
        commands = self.dispatcher.handle(event, self._now())
        if commands:
            self.carry_out(commands)

    def carry_out(self, commands: Iterable[DispatcherCommand]) -> None:
        for command in commands:
            kind = type(command)
            if kind is Send:
                self._carrier.send(self, command)  # type: ignore[arg-type]
            elif kind is Refuse:
                self._carrier.refuse(self, command)  # type: ignore[arg-type]
            elif kind is WakeAt:
                self._set_timer(command.at)  # type: ignore[union-attr]
            elif kind is Watch:
                if self.hooks.stirred is not None:
                    self.hooks.stirred(command.instance_id)  # type: ignore[union-attr]
            else:
                self._carrier.revoke(self, command)  # type: ignore[arg-type]

    def _set_timer(self, at: float) -> None:
        if not takes_requests(self.dispatcher):
            if self.hooks.wanted is not None:
                self.hooks.wanted(self.plan.name)
            if self.hooks.unavailability is not None:
                self._clock.call_soon(refuse_stranded, self)
        self.stop_timer()
        self._timer = self._clock.call_at(at, self._wake)

    def _wake(self) -> None:
        self._timer = None
        try:
            self.tell(TimerFired())
        except Exception as error:
            if self.hooks.failed is None:
                raise
            self.hooks.failed(f"queue of {self.name}", error, RETRY_S)
            self.stop_timer()
            self._timer = self._clock.call_at(self._now() + RETRY_S, self._wake)

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Observations of the gateway

    def worked(self, instance_id: str) -> None:
        self._good[instance_id] += 1
        if self.outliers.streaks:
            self.outliers.streaks.pop(instance_id, None)
        if self._idle_calls:
            self.look_for_idle()

    def failed(self, instance_id: str, why: Reason, kind: str = FAILED) -> None:
        """An attempt to serve a request failed, or its answer was an error that is not passed on to the client."""
        if kind in (FAILED, "5xx"):
            streak = self.outliers.streaks[instance_id]
            streak.failures += 1
            if streak.failures % FAILURES_IN_A_ROW == 0 and self.hooks.failing is not None:
                self.hooks.failing(instance_id, why)
        self.erred(Doubt(instance_id, kind))

    def erred(self, doubt: Doubt) -> None:
        """Count an error of an instance, and compare it with its peers."""
        self.outliers.erred(doubt, self._now())
        _report_outliers(self, (doubt,))
        if self._idle_calls:
            self.look_for_idle()

    def pause(self, instance_id: str, asked_s: float | None, why: Reason) -> None:
        """Send an instance no requests for a while. `asked_s` is how long it asked for; None if it did not say."""
        fleet, now = self.dispatcher.fleet, self._now()
        if instance_id in fleet:
            is_until = fleet.pauses.get(instance_id, now)
            pause_s = self.outliers.streaks[instance_id].pause_s(asked_s, is_paused=is_until > now)
            if now + pause_s > is_until:
                self.tell(Paused(instance_id, now + pause_s, why))

    def when_idle(self, instance_id: str, call: Callable[[], None]) -> None:
        self._idle_calls[instance_id] = call
        self.look_for_idle()

    def look_for_idle(self) -> None:
        """Make the pending calls of `when_idle` for instances that have become idle."""
        if self.closed and len(self.dispatcher):
            return  # waiting requests must be served first
        for instance_id in [one for one in self._idle_calls if not in_flight(self.dispatcher, one)]:
            self._clock.call_soon(self._idle_calls.pop(instance_id))


def contain(lane: Lane, watch: CodeWatch | None) -> None:
    """Time users' code in the scheduling of a lane."""
    if watch is not None:
        lane.containment = Containment(watch, lane.plan.time_limit_s)
        lane.containment.contain(lane.plan.scheduling_code)


def unavailability(lane: Lane) -> Unavailable | None:
    """Why no instance takes requests; None if that is unknown."""
    why = lane.hooks.unavailability
    return None if why is None else why(lane.plan.name, lane.start_up_s)


def refuse_stranded(lane: Lane) -> None:
    """If no instance takes requests and none is expected, refuse the requests that wait."""
    dispatcher = lane.dispatcher
    if lane.closed or len(dispatcher) == dispatcher.running or takes_requests(dispatcher):
        return
    unavailable = unavailability(lane)
    if unavailable is not None and unavailable.none_expected:
        lane.tell(NoneExpected())


def settle(lane: Lane, doubts: Sequence[Doubt], *, contradicted: bool) -> None:
    """Settle the errors of a request. `contradicted` is True if another instance has served the request."""
    if contradicted:
        lane.outliers.contradicted(doubts, lane._now())
        _report_outliers(lane, doubts)
    else:
        lane.outliers.confirmed(doubts, lane._now())


def _report_outliers(lane: Lane, doubts: Iterable[Doubt]) -> None:
    report = lane.hooks.standing_out
    if report is not None:
        for doubt in doubts:
            found = lane.outliers.find(doubt, accepting(lane.dispatcher), lane._now())
            if found is not None:
                report(found)


def takes_requests(dispatcher: Dispatcher) -> bool:
    """Whether an instance takes requests, even if all are full or paused."""
    return any(endpoint.instance.can_accept_request for endpoint in dispatcher.fleet.roster)


def accepting(dispatcher: Dispatcher) -> list[str]:
    """The instances that take requests, even if they are full or paused."""
    return [str(endpoint) for endpoint in dispatcher.fleet.roster if endpoint.instance.can_accept_request]


def in_flight(dispatcher: Dispatcher, instance_id: str) -> int:
    """Requests in flight on an instance; 0 if it is unknown."""
    fleet = dispatcher.fleet
    return len(dispatcher.ledger.on(fleet[instance_id])) if instance_id in fleet else 0


def prefix_producers(lane: Lane) -> list[ApproxPrefixCacheProducer]:
    """The plugins of a lane that track the prefix caches of instances."""
    # The plugins of the plan may be others: applying an equal plan builds plugins that are never used.
    return [plugin for plugin in lane.dispatcher.plugins if isinstance(plugin, ApproxPrefixCacheProducer)]


def warmth(lanes: Iterable[Lane]) -> dict[str, float]:
    """Blocks in the prefix cache of each instance, if a plugin tracks them."""
    known = [producer.index for lane in lanes for producer in prefix_producers(lane)]
    return {name: float(index.held(name)) for index in known for name in index.servers}


def scheduling_problems(lanes: Collection[Lane]) -> list[Reason]:
    """Problems of the policies and plugins of lanes."""
    each = [(lane.name, producer) for lane in lanes for producer in prefix_producers(lane)]
    short = [Reason("prefix-index-full", _fullness(name, one)) for name, one in each if one.index.memory.is_short]
    merged = [Reason("many-block-sizes", {"deployment": name}) for name, one in each if one.sizes_merged]
    contained = [(lane.name, lane.containment) for lane in lanes if lane.containment is not None]
    misbehaving = [reason for name, one in contained for reason in one.problems(name)]
    useless = [(lane.name, lane.dispatcher.counters.useless) for lane in lanes]
    wrong = [
        Reason("answers-useless", {"deployment": name, "count": one.count, "last": one.last})
        for name, one in useless
        if one.count
    ]
    return [*short, *merged, *misbehaving, *wrong, *shadow_problems(lanes)]


def _fullness(deployment: str, producer: ApproxPrefixCacheProducer) -> dict[str, Any]:
    memory = producer.index.memory
    return {"deployment": deployment, "used_bytes": memory.used_bytes, "dropped": memory.dropped}


def _instance_load(dispatcher: Dispatcher, instance_id: str, now: float) -> dict[str, Any]:
    endpoint = dispatcher.fleet[instance_id]
    metrics, age = endpoint.metrics, dispatcher.fleet.load.metrics_age(endpoint, now)
    until, is_silent = dispatcher.fleet.pauses.get(instance_id), instance_id in dispatcher.fleet.silent
    return {
        "in_flight": in_flight(dispatcher, instance_id),
        "max_concurrency": endpoint.instance.max_concurrency,
        "waiting": None if metrics is None else metrics.waiting_queue_size,
        "running": None if metrics is None else metrics.running_requests_size,
        "kv_cache_usage": None if metrics is None else metrics.kv_cache_usage,
        "metrics_age_s": None if age is None else round(age, 3),
        "silence": endpoint.closed.as_dict() if endpoint.closed is not None and is_silent else None,
        "paused_s": None if until is None else round(max(until - now, 0.0), 3),
        "gpus": endpoint.instance.gpu_count,
        "tensor_parallel_size": endpoint.instance.tensor_parallel_size,
        "pipeline_parallel_size": endpoint.instance.pipeline_parallel_size,
        **speed_and_cost(dispatcher.fleet, endpoint),
    }


class Traffic:
    """All lanes, by deployment and by the names of their models."""

    def __init__(
        self,
        clock: Clock,
        carrier: Carrier,
        settings: DispatcherSettings = DEFAULT_SETTINGS,
        watch: CodeWatch | None = None,
    ) -> None:
        """`watch` times users' scheduling code. If it is None, as on virtual time, that code is not timed."""
        self._watch = watch
        self.hooks = TrafficHooks()
        self.by_model: dict[str, Lane] = {}
        """Lanes by the names that clients use."""
        self.lanes: dict[str, Lane] = {}
        """Lanes by deployment."""
        self._closing: dict[str, Lane] = {}
        """Lanes of removed deployments that still have instances."""
        self._clock = clock
        self._carrier = carrier
        self.settings = settings
        """Settings for lanes that are opened from now on."""
        self.prefix_index_bytes = MAX_INDEX_BYTES
        """Memory for the prefix indexes of all lanes together."""

    # Deployments

    def configure(self, plans: Sequence[DeploymentPlan]) -> None:
        """Open lanes of new deployments, reconfigure dispatchers whose plans differ, close lanes of removed ones."""
        wanted = {plan.name: plan for plan in plans}
        for name in [name for name in self.lanes if name not in wanted]:
            gone = self._closing[name] = self.lanes.pop(name)
            gone.closed = True
        for name, plan in wanted.items():
            lane = self.lanes.get(name)
            if lane is None and name in self._closing:
                lane = self.lanes[name] = self._closing.pop(name)
                lane.closed = False
            if lane is None:
                dispatcher = Dispatcher(plan.dispatch_plan(), self.settings)
                lane = self.lanes[name] = Lane(plan, dispatcher, self._carrier, self._clock, self.hooks)
                contain(lane, self._watch)
                _shadow(lane, self._clock, self._watch)
            else:
                shadows = lane.plan.shadow_recipe
                changed = lane.plan.scheduling_recipe != plan.scheduling_recipe
                changed |= lane.plan.first_wait_s != plan.first_wait_s
                lane.plan = plan
                if changed:
                    contain(lane, self._watch)
                    lane.carry_out(lane.dispatcher.reconfigure(plan.dispatch_plan(), self._clock.now()))
                if changed or shadows != plan.shadow_recipe:
                    _shadow(lane, self._clock, self._watch)
        self.by_model = {
            model: lane for lane in self.lanes.values() if not lane.plan.internal for model in lane.plan.names
        }
        for name in list(self._closing):
            self._end_if_empty(name)
        indexes = [producer.index for lane in self.all_lanes() for producer in prefix_producers(lane)]
        for index in indexes:
            index.memory.limit(self.prefix_index_bytes // len(indexes))

    def _end_if_empty(self, name: str) -> None:
        """If a removed deployment has no instances left, drop its lane and refuse the requests that still wait."""
        lane = self._closing.get(name)
        if lane is not None and not len(lane.dispatcher.fleet):
            del self._closing[name]
            why = Reason("deployment-removed", {"deployment": name})
            refusal = Refusal(Outcome.EVICTED_NO_ENDPOINTS, why)
            for request in lane.dispatcher.waiting():
                lane.tell(Cancelled(request.request_id, refusal))
                self._carrier.refuse(lane, Refuse(request, refusal))
            if self.hooks.closed is not None:
                self.hooks.closed(lane)

    def all_lanes(self) -> list[Lane]:
        """All lanes, including those of removed deployments that still have instances or requests."""
        return [*self.lanes.values(), *self._closing.values()]

    # Instances

    def admit(self, deployment: str, instance: ExecutionInstance) -> None:
        lane = self._lane(deployment)
        lane.outliers.joined()
        lane.tell(Joined(instance))

    def update(self, deployment: str, instance: ExecutionInstance) -> None:
        """A property of an instance has changed. The change is ignored if the deployment is gone: the instance then
        takes the requests that still wait, even while it drains.
        """
        lane = self._lane(deployment)
        fleet, name = lane.dispatcher.fleet, instance.instance_id
        if not lane.closed and name in fleet:
            if fleet[name].instance.can_accept_request is not instance.can_accept_request:
                lane.outliers.forget(name)
                if instance.can_accept_request:
                    lane.outliers.joined()
            lane.tell(Changed(instance))

    def withdraw(self, deployment: str, instance_id: str, why: Reason) -> None:
        lane = self._lane(deployment)
        if instance_id in lane.dispatcher.fleet:
            lane.tell(Left(instance_id, why))
            if self.hooks.gone is not None:
                self.hooks.gone(instance_id)
        lane.outliers.forget(instance_id)
        lane.look_for_idle()
        self._end_if_empty(deployment)

    def measured(self, deployment: str, instance_id: str, metrics: Metrics, source: object = None) -> None:
        """An engine reported its metrics. Extractors read more values from `source`, the origin of the metrics."""
        lane = self._lane(deployment)
        if instance_id in lane.dispatcher.fleet:
            lane.tell(Measured(instance_id, metrics))
            if lane.dispatcher.extractors and source is not None:
                lane.tell(Scraped(instance_id, source))

    def surveyed(self, deployment: str, readings: Sequence[tuple[str, Metrics]]) -> None:
        """Several engines of a deployment reported their metrics at the same moment. Some engines may have left."""
        self._lane(deployment).tell(Surveyed(readings))

    def when_idle(self, deployment: str, instance_id: str, call: Callable[[], None]) -> None:
        self._lane(deployment).when_idle(instance_id, call)

    def status(self, deployment: str) -> dict[str, Any] | None:
        """The requests of a deployment, as plain data; None if the deployment has no lane."""
        lane, now = self.lanes.get(deployment) or self._closing.get(deployment), self._clock.now()
        if lane is None:
            return None
        dispatcher = lane.dispatcher
        members = [str(endpoint) for endpoint in dispatcher.fleet.roster]
        return {
            "strategy": dispatcher.strategy,
            "policies": [] if lane.containment is None else lane.containment.report(),
            "waiting": len(dispatcher) - dispatcher.running,
            "running": dispatcher.running,
            "instances": {name: _instance_load(dispatcher, name, now) for name in members},
        }

    def _lane(self, deployment: str) -> Lane:
        lane = self.lanes.get(deployment) or self._closing.get(deployment)
        if lane is None:
            raise UnknownName("deployment", deployment, self.lanes)
        return lane


def only_lane(traffic: Traffic) -> Lane | None:
    """The lane of the only deployment that clients may name; None if there are several, or none."""
    known = [lane for lane in traffic.lanes.values() if not lane.plan.internal]
    return known[0] if len(known) == 1 else None


def _shadow(lane: Lane, clock: Clock, code_watch: CodeWatch | None) -> None:
    """Let the candidates of a plan watch its lane. They replace earlier candidates."""
    before, lane.watcher = lane.watcher, watcher_of(lane.plan, clock, code_watch)
    if lane.watcher is not before:
        watch(lane.dispatcher, lane.watcher)
