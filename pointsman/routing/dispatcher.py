"""The dispatcher: from a request's arrival to its end, without touching a socket or a clock.

    arrived -> admitted -> waiting -> decided -> sent -> first token -> ended
                  |           |          ^        |
               refused     refused       +--------+  failed: back to waiting, at most `max_tries` times, then refused

Enters: events, each with the time. Leaves: commands. The one rule: every request that arrives leaves exactly once, with
an answer or with a refusal that says why. Each arrival, and each event that may give an instance room, causes as many
waiting requests to be sent as fit. A `RequestTable` holds the requests; a `Sender` finds instances for them.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import msgspec

from pointsman.reasons import Reason
from pointsman.routing.canary import Handle, Watcher, each_of, tapped
from pointsman.routing.closing import Closings
from pointsman.routing.decisions import Unplaced
from pointsman.routing.endpoints import EndpointTable, Extractor, ingest, share, survey
from pointsman.routing.events import (
    Arrived,
    Cancelled,
    Changed,
    DispatcherCommand,
    DispatcherEvent,
    Ended,
    Failed,
    FirstToken,
    HeardAgain,
    Joined,
    Left,
    Measured,
    NoneExpected,
    Outcome,
    Paused,
    Refusal,
    Refuse,
    Rested,
    Scraped,
    Shared,
    ShuttingDown,
    Silenced,
    Surveyed,
    TimerFired,
    WakeAt,
    Watch,
)
from pointsman.routing.plugins import Learner
from pointsman.routing.queue import Queued
from pointsman.routing.records import Journal, Record
from pointsman.routing.request_table import Pool, RequestTable, Sent
from pointsman.routing.routes import DEFAULT_SETTINGS, Chooser, DispatcherSettings, DispatchPlan
from pointsman.routing.sending import PluginHooks, Sender, taken_back, wait_again
from pointsman.routing.user_code import Useless
from pointsman.types import RequestMetadata, arrived


class RequestEvents:
    """Events of requests: they arrive, are answered, fail, are cancelled or expire."""

    def __init__(self, plan: DispatchPlan, sender: Sender, max_tries: int, *, is_open: bool) -> None:
        self._sender = sender
        self._table, self._fleet, self._chooser, self._hooks = sender.table, sender.fleet, sender.chooser, sender.hooks
        self._pools, self._journal = self._table.pools, self._table.journal
        self._max_tries = max_tries
        self.is_open = is_open
        """False once the dispatcher is shutting down."""
        self._budget = plan.budget
        self._ungated = is_open and plan.policy is None and plan.detector is None and self._hooks.sheds_only
        """Whether a request of priority 0 or above needs only a choice, and neither admission nor flow control."""

    def arrived(self, event: Arrived, now: float, commands: list[DispatcherCommand]) -> None:
        requests = event.requests
        if (
            len(requests) == 1
            and self._ungated
            and (requests[0].priority >= 0 or self._hooks.shedding is None)
            and self._sender.sent_at_once(requests[0], now, commands)
        ):
            return
        entered: dict[str, Pool] = {}
        for given in requests:
            request = given if type(given.arrival_time) is float else arrived(given, now)
            if request.request_id in self._table.waiting or request.request_id in self._table.sent:
                self._refuse_duplicate(request, commands)
                continue
            self._journal.arrived(request, now)
            denial = self._denial(request, now)
            if denial is not None:
                self._table.refuse(request, denial, now, commands)
                continue
            pool = self._enter(request, now, commands)
            if pool is not None:
                entered[pool.model] = pool
        for pool in entered.values():
            self._sender.send_waiting(pool, now, commands)

    def _refuse_duplicate(self, request: RequestMetadata, commands: list[DispatcherCommand]) -> None:
        """Refuse a request whose id is in use: the record with that id belongs to the first request."""
        self._journal.counters.arrived += 1
        why = Reason("id-in-flight", {"request_id": request.request_id})
        commands.append(Refuse(request, Refusal(Outcome.REJECTED_OTHER, why)))
        self._journal.counters.ended("", "", Outcome.REJECTED_OTHER.value, None)

    def _denial(self, request: RequestMetadata, now: float) -> Refusal | None:
        if not self.is_open:
            return Refusal(Outcome.EVICTED_SHUTTING_DOWN, Reason("not-taking-requests"))
        if request.cost_budget is not None and self._budget is not None:
            why = self._budget.unaffordable(request, self._fleet.serving(request.model_name))
            if why is not None:
                self._sender.look(Queued(request), now)
                return Refusal(Outcome.REJECTED_UNSCHEDULABLE, why)
        if self._hooks.sheds_only and (request.priority >= 0 or self._hooks.shedding is None):
            return None
        serving = self._fleet.serving(request.model_name)
        why = self._hooks.denial(self._chooser.cycle(request, now), serving)
        return None if why is None else Refusal(Outcome.REJECTED_ADMISSION, why)

    def _enter(self, request: RequestMetadata, now: float, commands: list[DispatcherCommand]) -> Pool | None:
        """Put a request into its queue. Returns None if it was refused."""
        item = Queued(request)
        pool = self._pools.of(request.model_name)
        if pool is None:
            why = Reason("too-many-models", {"model": request.model_name})
            self._table.refuse(request, Refusal(Outcome.REJECTED_NO_ENDPOINTS, why), now, commands)
            return None
        try:
            offered = pool.queue.offer(item, now, pool.is_empty)
        except Exception as error:  # a user's ordering; the request is not in the queue yet
            self._table.refuse_unordered(request, error, now, commands)
            return None
        for displaced, refusal in offered.displaced:
            self._table.refuse(displaced.request, refusal, now, commands)
        if offered.refusal is not None:
            self._sender.look(item, now)
            self._table.refuse(request, offered.refusal, now, commands)
            return None
        self._table.wait(item)
        return pool

    def first_token(self, event: FirstToken, now: float, commands: list[DispatcherCommand]) -> None:
        sent = self._table.sent.get(event.request_id)
        if sent is not None and not sent.begun:
            sent.begun = True
            self._table.ledger.first_token(event.request_id)
            self._journal.first_token(event.request_id, now)
            if self._hooks.progress:
                self._hooks.first_token(sent.endpoint, sent.item.request, now)

    def ended(self, event: Ended, now: float, commands: list[DispatcherCommand]) -> None:
        sent = taken_back(self._sender, event.request_id, now, event)
        if sent is None:
            return
        sent.pool.queue.ended(sent.item, event.output_tokens or 0, now)
        sent.endpoint.worked_at = now
        seconds = now - sent.item.taken_at
        self._fleet.load.learn_latency(sent.endpoint, seconds * 1000, sent.lightness)
        if event.output_tokens:
            prompt = sent.item.request.input_tokens if event.input_tokens is None else event.input_tokens
            self._fleet.load.learn_throughput(sent.endpoint, prompt + event.output_tokens, seconds, sent.lightness)
        self._journal.served(event, now)
        if self._pools.busy:
            self._sender.room_on(sent.endpoint, now, commands)

    def failed(self, event: Failed, now: float, commands: list[DispatcherCommand]) -> None:
        sent = taken_back(self._sender, event.request_id, now)
        if sent is None:
            return
        if sent.revoked is not None:
            sent.pool.queue.ended(sent.item, 0)
            self._table.leave(sent.item.request, sent.revoked, now)
        elif event.full and not sent.begun and self.is_open:
            self._journal.failed(sent.item.request, str(sent.endpoint), event.why, local="full")
            wait_again(self._sender, sent, now, commands)
        else:
            self._try_again(sent, event, now, commands)
        self._sender.room_on(sent.endpoint, now, commands)

    def _try_again(self, sent: Sent, event: Failed, now: float, commands: list[DispatcherCommand]) -> None:
        item, instance_id, local = sent.item, event.instance_id or str(sent.endpoint), event.local
        self._journal.failed(item.request, instance_id, event.why, local=local)
        item.tries += not local
        item.unsent += bool(local)
        item.excluded |= {instance_id}
        item.answered = event.answered
        tried = item.unsent if local else item.tries
        if event.retry and not sent.begun and tried < self._max_tries and self.is_open:
            wait_again(self._sender, sent, now, commands)
            return
        sent.pool.queue.ended(item, 0)
        if local:
            why = Reason("not-sent", {"instance": instance_id, "cause": local, "error": event.why})
            self._table.refuse(item.request, Refusal(Outcome.EVICTED_NOT_SENT, why), now, commands)
            return
        facts = {"instance": instance_id, "error": event.why, "tries": item.tries, "max_tries": self._max_tries}
        stopped = "begun" if sent.begun else "no-retry" if not event.retry else "" if self.is_open else "shutting-down"
        why = Reason("instance-failed", facts | {"no_retry": stopped})
        self._table.refuse(item.request, Refusal(Outcome.EVICTED_OTHER, why), now, commands)

    def cancelled(self, event: Cancelled, now: float, commands: list[DispatcherCommand]) -> None:
        gone = event.refusal or Refusal(Outcome.EVICTED_CANCELLED, Reason("client-gone"))
        item = self._table.waiting.get(event.request_id)
        if item is not None:
            pool = self._pools.of(item.request.model_name)
            assert pool is not None, "a request waits in it"
            pool.queue.cancel(event.request_id)
            self._table.leave(item.request, gone, now)
            self._sender.send_waiting(pool, now, commands)
            return
        sent = taken_back(self._sender, event.request_id, now)
        if sent is not None:
            sent.pool.queue.ended(sent.item, 0)
            self._table.leave(sent.item.request, sent.revoked or gone, now)
            self._sender.room_on(sent.endpoint, now, commands)

    def expire(self, now: float, commands: list[DispatcherCommand]) -> None:
        for pool in self._pools.with_expired(now):
            for item, refusal in pool.queue.expire(now, pool.is_empty):
                self._sender.look(item, now)
                self._table.refuse(item.request, _with_reason(refusal, item.request, self._journal), now, commands)
            self._sender.send_waiting(pool, now, commands)  # requests behind may fit where these did not

    def shutting_down(self, event: ShuttingDown, now: float, commands: list[DispatcherCommand]) -> None:
        self.is_open = self._ungated = False
        for pool in self._pools.waiting():
            for item, refusal in pool.queue.drain():
                self._table.refuse(item.request, refusal, now, commands)


class InstanceEvents:
    """Events of instances: they join, change, leave and report metrics."""

    def __init__(
        self,
        sender: Sender,
        requests: RequestEvents,
        extractors: Sequence[Extractor],
        learners: Sequence[Learner],
    ) -> None:
        self._learners = learners
        self._sender = sender
        self._requests = requests
        self._extractors = extractors
        self._table, self._fleet, self._hooks = sender.table, sender.fleet, sender.hooks
        self._pools, self._journal = self._table.pools, self._table.journal

    def joined(self, event: Joined, now: float, commands: list[DispatcherCommand]) -> None:
        endpoint = self._fleet.add(event.instance)
        self._pools.members_changed(now)
        self._sender.room_on(endpoint, now, commands)

    def changed(self, event: Changed, now: float, commands: list[DispatcherCommand]) -> None:
        closed = event.instance.closed
        if closed is not None and self._fleet[event.instance.instance_id].instance.can_accept_request:
            self._journal.counters.closed[event.instance.instance_id, closed.code] += 1
        endpoint = self._fleet.update(event.instance)
        self._pools.members_changed(now)
        self._sender.room_on(endpoint, now, commands)

    def left(self, event: Left, now: float, commands: list[DispatcherCommand]) -> None:
        gone = self._fleet[event.instance_id]
        interrupted = self._table.ledger.on(gone)
        self._fleet.remove(event.instance_id)
        self._pools.members_changed(now)
        self._hooks.departed(gone)
        for request_id in interrupted:
            self._requests.failed(Failed(request_id, event.why, instance_id=event.instance_id), now, commands)
        self._journal.counters.departed(event.instance_id)

    def none_expected(self, event: NoneExpected, now: float, commands: list[DispatcherCommand]) -> None:
        for pool in self._pools.waiting():
            for item in list(pool.queue.waiting()):
                self._sender.look(item, now)
                pool.queue.cancel(item.request.request_id)
                reason = Reason("none-expected", {"model": item.request.model_name})
                self._table.refuse(item.request, Refusal(Outcome.EVICTED_NO_ENDPOINTS, reason), now, commands)

    def measured(self, event: Measured, now: float, commands: list[DispatcherCommand]) -> None:
        self._fleet.measure(event.instance_id, event.metrics, now)
        self._sender.room_on(self._fleet[event.instance_id], now, commands)

    def surveyed(self, event: Surveyed, now: float, commands: list[DispatcherCommand]) -> None:
        survey(self._fleet, event.readings, now)
        if self._pools.busy:
            for name, _ in event.readings:
                if name in self._fleet:
                    self._sender.room_on(self._fleet[name], now, commands)

    def rested(self, event: Rested, now: float, commands: list[DispatcherCommand]) -> None:
        self._fleet.load.rest(self._fleet[event.instance_id], event.until)

    def scraped(self, event: Scraped, now: float, commands: list[DispatcherCommand]) -> None:
        endpoint = self._fleet[event.instance_id]
        for extractor in self._extractors:
            self._hooks.ask(extractor, ingest, self._fleet, extractor, event.instance_id, event.source, now)
        self._sender.room_on(endpoint, now, commands)

    def shared(self, event: Shared, now: float, commands: list[DispatcherCommand]) -> None:
        fleet = self._fleet
        known = [name for name in event.in_flight if name in fleet]
        for name in known:
            share(fleet, name, *event.in_flight[name])
        if event.learned:
            by_id = {endpoint.id: endpoint for endpoint in fleet.roster}
            for number, endpoint_id, what in event.learned:
                if endpoint_id in by_id and number < len(self._learners):
                    learner = self._learners[number]
                    self._hooks.ask(learner, learner.learn, by_id[endpoint_id], what, now)
        for name in known:
            self._sender.room_on(fleet[name], now, commands)


class Dispatcher:
    """Admission, queue, choice, retry, release: `handle(event, now) -> commands`."""

    def __init__(self, plan: DispatchPlan, settings: DispatcherSettings = DEFAULT_SETTINGS) -> None:
        self.fleet = EndpointTable()
        self._woken = self.fleet.load.woken
        self._journal = Journal(settings.keep_records, plan.route.name)
        self.records = self._journal.records
        """The records of the newest requests."""
        self.ended_records = self._journal.ended
        """Records of the newest requests that have ended, until they are taken from here."""
        self.counters = self._journal.counters
        self._chooser = Chooser(plan.route, self.fleet, traced=settings.traced, seed=settings.seed)
        self._table = RequestTable(plan, self.fleet, self._journal)
        self._pools, self.ledger = self._table.pools, self._table.ledger
        self._max_tries = settings.max_tries
        self._wake_at: float | None = None
        self._due: float | None = None
        """When the next waiting request expires, or the next pause ends."""
        self._undelivered: list[DispatcherCommand] = []
        """Commands from an event whose handler raised; they are returned with those of the next event."""
        self._listeners: dict[str, Callable[[Record], None]] = {}
        self._taps: dict[type[DispatcherEvent], Callable[[Any, float], None]] = {}
        self._watcher: Watcher | None = None
        self._configure(plan, is_open=True)

    def _configure(self, plan: DispatchPlan, *, is_open: bool) -> None:
        watcher, self._plan = self._watcher, plan
        if watcher is not None:
            policy = None if plan.policy is None else watcher.policy(plan.policy)
            plan = msgspec.structs.replace(plan, route=watcher.route(plan.route), policy=policy)
        more = () if watcher is None else (watcher, *watcher.extractors)
        self.strategy = plan.strategy
        self.plugins = plan.plugins
        """The plugins in force."""
        self.extractors = tuple(plugin for plugin in (*plan.plugins, *more) if isinstance(plugin, Extractor))
        """The extractors, which read what `Scraped` delivers."""
        self.learners = tuple(plugin for plugin in plan.plugins if isinstance(plugin, Learner))
        """The learners, which remember what was sent where. `Shared` adds what other dispatchers have sent."""
        self._journal.strategy = plan.route.name
        self._chooser.route, self._chooser.stand_in = plan.route, plan.stand_in
        self._chooser.failed = self._journal.error
        self._evicts = plan.make_eviction is not None
        hooks = PluginHooks((*plan.plugins, *more), plan.shedding, self._journal)
        self._sender = Sender(plan, self._table, self.fleet, self._chooser, hooks)
        self._requests = requests = RequestEvents(plan, self._sender, self._max_tries, is_open=is_open)
        instances = InstanceEvents(self._sender, requests, self.extractors, self.learners)
        self._closings = closings = Closings(self._sender, requests.failed, self._max_tries)
        self._handlers: dict[type[DispatcherEvent], Handle] = {
            Arrived: requests.arrived,
            FirstToken: requests.first_token,
            Ended: requests.ended,
            Failed: requests.failed,
            Cancelled: requests.cancelled,
            ShuttingDown: requests.shutting_down,
            Joined: instances.joined,
            Changed: instances.changed,
            Paused: closings.paused,
            Silenced: closings.silenced,
            HeardAgain: closings.heard_again,
            Left: instances.left,
            NoneExpected: instances.none_expected,
            Measured: instances.measured,
            Surveyed: instances.surveyed,
            Rested: instances.rested,
            Scraped: instances.scraped,
            Shared: instances.shared,
            TimerFired: self._timer_fired,
        }
        for kind, tap in self._taps.items():
            self._handlers[kind] = tapped(self._handlers[kind], tap)

    def reconfigure(self, plan: DispatchPlan, now: float) -> list[DispatcherCommand]:
        """Schedule by another plan from now on. Instances, requests, reservations and records stay as they are."""
        commands, self._undelivered = self._undelivered, []
        self._configure(plan, is_open=self._requests.is_open)
        self.counters.useless = Useless()
        self._table.configure(plan, now, commands)
        if self._watcher is not None:
            self._watcher.attach(self.fleet, self.records, self.plugins)
        for pool in self._pools.waiting():
            self._sender.send_waiting(pool, now, commands)
        self._set_timer(commands)
        return commands

    def handle(self, event: DispatcherEvent, now: float) -> list[DispatcherCommand]:
        """Handle one event. The runtime carries the commands out in their order."""
        commands, self._undelivered = self._undelivered, []
        if self._due is not None and self._due <= now:
            self._closings.resume(now, commands)
            self._requests.expire(now, commands)
        try:
            self._handlers[type(event)](event, now, commands)
        except BaseException:
            self._undelivered = commands
            raise
        if self._woken:
            commands += [Watch(str(endpoint)) for endpoint in self.fleet.load.wake(now)]
        if self._evicts:
            self._evict(now, commands)
        if self._pools.busy or self._wake_at is not None or self.fleet.pauses:
            self._set_timer(commands)
        return commands

    def listen(self, ended: Callable[[Record], None] | None, whose: str = "") -> None:
        """Call `ended` with the record of each request that has ended, served or refused. It replaces the earlier
        listener; None removes that."""
        self._listeners.pop(whose, None)
        if ended is not None:
            self._listeners[whose] = ended
        calls = tuple(self._listeners.values())
        self._journal.listener = each_of(calls) if len(calls) > 1 else calls[0] if calls else None

    def __len__(self) -> int:
        """Number of requests that have arrived and not left."""
        return len(self._table)

    @property
    def running(self) -> int:
        """Number of requests that were sent and have not ended."""
        return len(self._table.sent)

    def waiting(self) -> list[RequestMetadata]:
        """The waiting requests, model by model, each in the order in which they would go."""
        return [item.request for pool in self._pools.waiting() for item in pool.queue.waiting()]

    def explain(self, request_id: str, now: float) -> Record | None:
        """The record of a request. A waiting request is first tried without being sent, to make its reasons current."""
        item = self._table.waiting.get(request_id)
        if item is not None:
            self._sender.look(item, now)
        return self.records.get(request_id)

    def _timer_fired(self, event: TimerFired, now: float, commands: list[DispatcherCommand]) -> None:
        # `handle` has expired what was due. The timer has fired, even if its clock was fast and nothing was due yet.
        self._wake_at = None

    def _set_timer(self, commands: list[DispatcherCommand]) -> None:
        due = self._pools.next_expiry()
        if self.fleet.pauses:
            due = min(due or inf, *self.fleet.pauses.values())
        self._due = due
        if due is not None and due != self._wake_at:
            commands.append(WakeAt(due))
        self._wake_at = due

    def _evict(self, now: float, commands: list[DispatcherCommand]) -> None:
        """Stop running requests for more important ones that are blocked."""
        for pool in self._pools.waiting():
            if pool.eviction is None:
                continue
            for item, refusal in pool.eviction.victims(now, self._sender.saturation(pool, now), pool.queue.blocked):
                self._table.revoke(item.request.request_id, refusal, commands)


def _with_reason(refusal: Refusal, request: RequestMetadata, journal: Journal) -> Refusal:
    """The refusal, extended by the reason why no instance took the request at its last try."""
    record = journal.records.get(request.request_id)
    if record is None or record.failure is None:
        return refusal
    return Refusal(refusal.outcome, refusal.reason.having(because=Unplaced(request, record.failure).why))


def watch(dispatcher: Dispatcher, watcher: Watcher | None) -> None:
    """Let a watcher observe the decisions, and make its share of them; None removes the watcher. The plan stays."""
    dispatcher._watcher = watcher
    dispatcher._configure(dispatcher._plan, is_open=dispatcher._requests.is_open)
    if watcher is not None:
        watcher.attach(dispatcher.fleet, dispatcher.records, dispatcher.plugins)


def tap(dispatcher: Dispatcher, kind: type[DispatcherEvent], call: Callable[[Any, float], None] | None) -> None:
    """Call this function with each event of a kind, and the time, before the event is handled; None stops the calls."""
    dispatcher._taps.pop(kind, None)
    if call is not None:
        dispatcher._taps[kind] = call
    dispatcher._configure(dispatcher._plan, is_open=dispatcher._requests.is_open)
