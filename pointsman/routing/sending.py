"""From waiting to sent: finds instances for waiting requests, as many as fit, or says why there is none.

Enters: a pool in which requests wait, and the time. Leaves: commands. The one rule: a request that is sent reserves its
share of the instance before the next one is considered.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from pointsman.reasons import Reason, reason_of
from pointsman.routing.decisions import no_instance
from pointsman.routing.endpoints import ACCEPTS, Endpoint, EndpointTable
from pointsman.routing.events import DispatcherCommand, Ended, Outcome, Refusal, Send
from pointsman.routing.plugins import (
    PREDICTED,
    Admitter,
    DepartureListener,
    DispatchListener,
    Endpoints,
    HeaderWriter,
    ProgressListener,
    RequestCycle,
    ResponseHeaderWriter,
)
from pointsman.routing.queue import Queued
from pointsman.routing.records import Journal
from pointsman.routing.request_table import Hold, Pool, RequestTable, Sent, holds_of
from pointsman.routing.routes import BatchPolicy, Chooser, DispatchPlan, pool_wide, stood_in
from pointsman.selection import Producer, SchedulingFailure, SchedulingResult, plugin_name
from pointsman.types import RequestMetadata, arrived

# Hooks of plugins around the choice; one that raises affects nothing else

T = TypeVar("T")

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class PluginHooks:
    """Admitters, listeners and header writers, by the roles of the plugins."""

    def __init__(self, plugins: Sequence[Any], shedding: Admitter | None, journal: Journal) -> None:
        admitters = [plugin for plugin in plugins if isinstance(plugin, Admitter)]
        self._producers = [plugin for plugin in plugins if admitters and isinstance(plugin, Producer)]
        """Producers that run before the admitters, which may read their facts. `shedding` does not read any."""
        self._admitters = admitters
        self.shedding = shedding
        """The last admitter, asked only about requests of negative priority."""
        self._listeners = [plugin for plugin in plugins if isinstance(plugin, DispatchListener)]
        self.progress = [plugin for plugin in plugins if isinstance(plugin, ProgressListener)]
        """Progress listeners; the dispatcher checks whether there are any before it calls."""
        self._departures = [plugin for plugin in plugins if isinstance(plugin, DepartureListener)]
        self._writers = [plugin for plugin in plugins if isinstance(plugin, HeaderWriter)]
        self._answer_writers = [plugin for plugin in plugins if isinstance(plugin, ResponseHeaderWriter)]
        self._journal = journal

    @property
    def sheds_only(self) -> bool:
        """Whether requests of priority 0 and above are always admitted."""
        return not self._admitters

    def denial(self, cycle: RequestCycle, endpoints: Endpoints) -> Reason | None:
        """The reason from the first admitter that denies the request; None if no admitter denies it."""
        for producer in self._producers:
            self.ask(producer, producer.produce, cycle, endpoints)
        shedding = () if self.shedding is None or cycle.request.priority >= 0 else (self.shedding,)
        for admitter in (*self._admitters, *shedding):
            why = self.ask(admitter, admitter.denial, cycle, endpoints)
            if why is not None:
                return reason_of(plugin_name(admitter), why)
        return None

    def dispatched(self, cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> dict[str, str | None]:
        """Notify listeners of a decision. Returns the headers to set on the request."""
        for listener in self._listeners:
            try:
                listener.dispatched(cycle, result)
            except Exception as error:
                self._journal.error(error, type(listener).__name__)
        headers: dict[str, str | None] = {}
        for writer in self._writers:
            headers |= self.ask(writer, writer.request_headers, cycle, result) or {}
        return headers

    def answer_headers(
        self, request: RequestMetadata, served_by: Endpoint, result: SchedulingResult[Endpoint] | None = None
    ) -> Mapping[str, str]:
        if not self._answer_writers:
            return _NO_HEADERS
        targets = {} if result is None else {name: run.targets[0] for name, run in result.results.items()}
        headers: dict[str, str] = {}
        for writer in self._answer_writers:
            headers |= self.ask(writer, writer.response_headers, request, served_by, targets) or {}
        return headers

    def first_token(self, endpoint: Endpoint, request: RequestMetadata, now: float) -> None:
        for listener in self.progress:
            self.ask(listener, listener.first_token, endpoint, request, now)

    def ended(self, endpoint: Endpoint, request: RequestMetadata, answer: Ended | None, now: float) -> None:
        for listener in self.progress:
            self.ask(listener, listener.ended, endpoint, request, answer, now)

    def departed(self, endpoint: Endpoint) -> None:
        for listener in self._departures:
            self.ask(listener, listener.departed, endpoint)

    def ask(self, plugin: object, call: Callable[..., T], *about: Any) -> T | None:
        """The result of a call to a plugin; None if it raises, which the journal counts."""
        try:
            return call(*about)
        except Exception as error:
            self._journal.error(error, type(plugin).__name__)
            return None


MAX_PASSED = 8
"""Maximum number of requests that are passed over, because they wait for an instance on which they have not failed."""

MAX_UNPARKED = 3
"""Number of parked requests that are tried again on each event."""


MAX_PAUSE_WAIT_S = 1.0
"""Requests do not wait for a pause to end if every instance is paused for longer than this."""


class Sender:
    """Finds instances for the requests of one dispatcher, as its plan says."""

    __slots__ = ("_journal", "_policy", "_pools", "_waits", "chooser", "fleet", "hooks", "table")

    def __init__(
        self, plan: DispatchPlan, table: RequestTable, fleet: EndpointTable, chooser: Chooser, hooks: PluginHooks
    ) -> None:
        self._policy = plan.policy
        self._waits = plan.waits
        self.table = table
        self._pools, self._journal = table.pools, table.journal
        self.fleet = fleet
        self.chooser = chooser
        self.hooks = hooks

    def sent_at_once(self, given: RequestMetadata, now: float, commands: list[DispatcherCommand]) -> bool:
        """Send a request at once, if no request waits and an instance has room. Returns False if it has to queue."""
        pool = self._pools.idle(given.model_name)
        if pool is None or given.request_id in self.table.sent:
            return False
        request = given if type(given.arrival_time) is float else arrived(given, now)
        item = Queued(request)
        cycle = self.chooser.cycle(request, now)
        try:
            choice = self.chooser.choose(cycle, item)
            if isinstance(choice, SchedulingFailure):
                return False
            pool.queue.goes_at_once(item, now)
        except Exception:  # the queue raises it again, and that is reported
            return False
        result = choice.result
        target = result.target
        sent = self.table.send(item, pool, target, choice.decided.how[1], holds_of(cycle, result))
        headers = self.hooks.dispatched(cycle, result)
        choice.decided.predicted = cycle.state.get(PREDICTED)
        self._journal.went_at_once(sent, choice.decided, cycle.trace, now, choice.stood_in)
        commands.append(
            Send(request, choice.decided, target, headers, self.hooks.answer_headers(request, target, result))
        )
        return True

    def room_on(self, endpoint: Endpoint, now: float, commands: list[DispatcherCommand]) -> None:
        """Send waiting requests that this endpoint may have room for."""
        for pool in self._pools.waiting():
            if endpoint.serves(pool.model):
                self.send_waiting(pool, now, commands)

    def send_waiting(self, pool: Pool, now: float, commands: list[DispatcherCommand]) -> None:
        """Send all waiting requests of a pool that fit on an instance."""
        failed: Reason | None = None
        if self._policy is not None:
            dropped = self._send_by(self._policy, pool, now, commands)
            if not isinstance(dropped, Reason):
                self._decide_again(dropped, pool, now, commands)
                self.refuse_paused(pool, now, commands)
                return
            failed = dropped
        passed: list[Queued] = []
        pool.queue.retry_parked(MAX_UNPARKED)
        while len(passed) <= MAX_PASSED and not (self._waits and self.fleet.load.all_full):
            try:
                item = pool.queue.pop(now, self.saturation(pool, now))
            except Exception as error:  # a user's limit or fairness policy
                self._journal.error(error)
                break
            if item is None:
                break
            failure = self._send(item, pool, now, commands, failed)
            if failure is not None and not failure.failures:
                pool.queue.drop(item)  # no profile ran: waiting will not help
                refusal = Refusal(Outcome.REJECTED_UNSCHEDULABLE, failure.reason)
                self.table.refuse(item.request, refusal, now, commands)
            elif failure is not None and (item.excluded or pool_wide(failure)):
                passed.append(item)
                if not item.excluded:
                    break
            elif failure is not None:
                pool.queue.park(item)
        for item in passed:
            pool.queue.put_back(item)
        if not self._waits:
            self._refuse_waiting(pool, now, commands)
        elif self.fleet.pauses:
            self.refuse_paused(pool, now, commands)

    def saturation(self, pool: Pool, now: float) -> float:
        """How full the instances of a pool are, if saturation holds requests back; else 0."""
        gate = pool.saturation
        if gate is None:
            return 0.0
        full = self.hooks.ask(gate.detector, gate.of, self.fleet.serving(pool.model), now)
        return 0.0 if full is None else float(full)

    def _send(
        self, item: Queued, pool: Pool, now: float, commands: list[DispatcherCommand], failed: Reason | None = None
    ) -> SchedulingFailure[Endpoint] | None:
        """Send a request, or return why no instance can take it now. `failed`: why the policy does not decide."""
        cycle = self.chooser.cycle(item.request, now)
        try:
            choice = self.chooser.choose(cycle, item)
        except Exception as error:
            self._journal.error(error)
            pool.queue.drop(item)
            self.table.refuse(item.request, Refusal(Outcome.REJECTED_OTHER, _policy_failed(error)), now, commands)
            return None
        failure = choice if isinstance(choice, SchedulingFailure) else None
        self._journal.tried(item.request, cycle.trace, failure)
        if isinstance(choice, SchedulingFailure):
            return failure
        result = choice.result
        target = result.target
        if item.enqueued_at < now:
            self.fleet.load.sent_from_backlog(target)
        why = choice.stood_in or failed
        sent = self.table.send_waiting(item, pool, target, choice.decided.how[1], holds_of(cycle, result))
        headers = self.hooks.dispatched(cycle, result)
        choice.decided.predicted = cycle.state.get(PREDICTED)
        self._journal.sent(sent, choice.decided, why)
        answer = self.hooks.answer_headers(item.request, target, result)
        commands.append(Send(item.request, choice.decided, target, headers, answer))
        return None

    def _send_by(
        self, policy: BatchPolicy, pool: Pool, now: float, commands: list[DispatcherCommand]
    ) -> list[Queued] | Reason:
        """Let a user's policy decide for all waiting requests. Returns the requests whose decisions were dropped. If
        the policy did not decide, returns the reason, and the route must decide for all requests.
        """
        waiting = {item.request.request_id: item for item in pool.queue.waiting()}
        try:
            vetted = self.chooser.choose_by(policy, [item.request for item in waiting.values()], now)
        except Exception as error:
            self._journal.error(error, policy.name)
            return stood_in(self.chooser.route.name, policy.name, error)
        for made, broken in vetted.bad:
            self._journal.dropped(made, broken, policy.name)
        for made in vetted.good:
            item, endpoint = waiting.pop(made.request_id), self.fleet[made.target_instance_id]
            pool.queue.take(item, now)
            holds = [Hold(endpoint, item.request.input_tokens)]
            self._journal.sent(self.table.send_waiting(item, pool, endpoint, policy.name, holds), made)
            commands.append(Send(item.request, made, endpoint, {}, self.hooks.answer_headers(item.request, endpoint)))
        named = {made.request_id for made, _ in vetted.bad}
        return [item for request_id, item in waiting.items() if request_id in named]

    def _decide_again(
        self, dropped: Sequence[Queued], pool: Pool, now: float, commands: list[DispatcherCommand]
    ) -> None:
        """Let the route decide for requests that a policy could have sent, so that none waits while a slot is free."""
        for item in dropped:
            if self.fleet.load.all_full:
                return
            pool.queue.take(item, now)
            if self._send(item, pool, now, commands) is not None:
                pool.queue.put_back(item)

    # Requests without an instance

    def look(self, item: Queued, now: float) -> None:
        """Try a request without sending it, and note the result in its record, with every reason.

        If a policy decides on batches, no trace is kept, because the trace of the route would not be of that policy.
        """
        policy, cycle = self._policy, self.chooser.cycle(item.request, now, traced=True)
        trace = cycle.trace if policy is None else None
        try:
            choice = self.chooser.choose(cycle, item)
        except Exception as error:
            self._journal.tried(item.request, trace, SchedulingFailure(_policy_failed(error), {}))
            return
        failure: SchedulingFailure[Endpoint] | None
        if isinstance(choice, SchedulingFailure):
            failure = choice
        elif policy is not None:
            failure = SchedulingFailure(Reason("left-waiting", {"policy": policy.name}), {})
        else:
            failure = self._held_back(item, now)
        self._journal.tried(item.request, trace, failure)

    def _held_back(self, item: Queued, now: float) -> SchedulingFailure[Endpoint] | None:
        """Why a request waits although an instance could take it."""
        pool = self._pools.of(item.request.model_name)
        if pool is None or pool.saturation is None:
            return None
        serving = self.fleet.serving(pool.model)
        facts = {
            "saturation": self.saturation(pool, now),
            "instances": len(serving),
            "unmeasured": sum(endpoint.metrics is None for endpoint in serving),
        }
        return SchedulingFailure(Reason("held-back", facts), {})

    def refuse_paused(self, pool: Pool, now: float, commands: list[DispatcherCommand]) -> None:
        """If all instances in service are paused, refuse requests with an error answer, or all if the pause is long."""
        pauses, serving = self.fleet.pauses, self.fleet.serving(pool.model)
        ends = [pauses[str(endpoint)] for endpoint in serving if str(endpoint) in pauses]
        if not ends or any(serving.column(ACCEPTS)):
            return
        left_s = min(ends) - now
        why = Reason("all-paused", {"instances": len(ends), "left_s": left_s})
        for item in list(pool.queue.waiting()):
            if item.answered or left_s > MAX_PAUSE_WAIT_S:
                pool.queue.cancel(item.request.request_id)
                self.table.refuse(item.request, Refusal(Outcome.REJECTED_CAPACITY, why), now, commands)

    def _refuse_waiting(self, pool: Pool, now: float, commands: list[DispatcherCommand]) -> None:
        for item in list(pool.queue.waiting()):
            pool.queue.cancel(item.request.request_id)
            record = self._journal.records.get(item.request.request_id)
            failure = None if record is None else record.failure
            why = Reason("all-saturated") if failure is None else no_instance(item.request, failure)
            outcome = Outcome.REJECTED_NO_ENDPOINTS if pool.is_empty else Outcome.REJECTED_CAPACITY
            self.table.refuse(item.request, Refusal(outcome, why), now, commands)


def _policy_failed(error: Exception) -> Reason:
    return Reason("policy-failed", {"error": str(error)})


def taken_back(sender: Sender, request_id: str, now: float, answer: Ended | None = None) -> Sent | None:
    """Take back a request that has left its instance, with or without an answer; None if it was not on an instance."""
    sent = sender.table.take_back(request_id, now)
    if sent is not None and sender.hooks.progress:
        sender.hooks.ended(sent.endpoint, sent.item.request, answer, now)
    return sent


def wait_again(sender: Sender, sent: Sent, now: float, commands: list[DispatcherCommand]) -> None:
    """Put a request back in its old position, and send what can be sent."""
    try:
        sender.table.wait_again(sent)
    except Exception as error:  # raised by a user's ordering
        sent.pool.queue.ended(sent.item, 0)
        sender.table.refuse_unordered(sent.item.request, error, now, commands)
    sender.send_waiting(sent.pool, now, commands)
