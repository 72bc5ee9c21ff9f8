"""The control plane inside your own program: no server, no network, no thread."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pointsman.config import build_policy
from pointsman.errors import ConfigError, UnknownName
from pointsman.reasons import Reason
from pointsman.routing.decisions import Unplaced
from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.endpoints import Metrics
from pointsman.routing.events import (
    Arrived,
    Cancelled,
    Changed,
    DispatcherCommand,
    DispatcherEvent,
    Ended,
    Failed,
    FirstToken,
    Joined,
    Left,
    Measured,
    Refusal,
    Refuse,
    Send,
    ShuttingDown,
    TimerFired,
)
from pointsman.routing.queue import REQUEST_TTL_S
from pointsman.routing.records import Record
from pointsman.routing.routes import DEFAULT_SETTINGS, DispatcherSettings, DispatchPlan
from pointsman.routing.topology import Nearness, nearness, tree
from pointsman.selection import SchedulingFailure
from pointsman.strategies import SchedulingPolicy
from pointsman.strategies.dispatching import MAX_WAITING, keeps_its_order, plan_for
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision

MAX_REFUSALS = 10_000


class DecisionOutbox:
    """Delivers decisions and refusals in their order to callbacks, or keeps them until the owner takes them."""

    def __init__(
        self,
        on_decision: Callable[[SchedulingDecision], None] | None,
        on_refusal: Callable[[RequestMetadata, Refusal], None] | None,
    ) -> None:
        self._on_decision = on_decision
        self._on_refusal = on_refusal
        self._undelivered: deque[DispatcherCommand] = deque()
        self._delivering = False
        self._decisions: dict[str, SchedulingDecision] = {}
        """Decisions that were not read yet. Their requests have neither ended nor left the chosen instance."""
        self._refusals: deque[tuple[RequestMetadata, Refusal]] = deque(maxlen=MAX_REFUSALS)

    def add(self, commands: Iterable[DispatcherCommand]) -> None:
        """Deliver commands. If a callback raises, the remaining commands are delivered with the next ones."""
        self._undelivered += commands
        if self._delivering:  # a callback called this: the loop that called the callback delivers these commands too
            return
        self._delivering = True
        try:
            while self._undelivered:
                self._deliver(self._undelivered.popleft())
        finally:
            self._delivering = False

    def _deliver(self, command: DispatcherCommand) -> None:
        if isinstance(command, Send):
            if self._on_decision is not None:
                self._on_decision(command.decision)
            else:
                self._decisions[command.request.request_id] = command.decision
        elif isinstance(command, Refuse):
            self.withdraw(command.request.request_id)
            if self._on_refusal is not None:
                self._on_refusal(command.request, command.refusal)
            else:
                self._refusals.append((command.request, command.refusal))

    def withdraw(self, request_id: str) -> None:
        self._decisions.pop(request_id, None)

    def withdraw_all_of(self, instance_id: str) -> None:
        self._decisions = {r: made for r, made in self._decisions.items() if made.target_instance_id != instance_id}

    def take_decisions(self) -> list[SchedulingDecision]:
        taken, self._decisions = list(self._decisions.values()), {}
        return taken

    def take_refusals(self) -> list[tuple[RequestMetadata, Refusal]]:
        taken = list(self._refusals)
        self._refusals.clear()
        return taken


class ControlPlaneManager:
    """Register instances, submit requests, send them where the decisions say, and report how they ended.

    A decision is made at once if an instance has room, else as soon as an instance has room. Decisions go to
    `on_decision`. Without this callback, `decisions()` returns them. Refusals of requests that waited too long or
    failed too often go to `on_refusal` or `refusals()` in the same way.
    Call `tick()` from time to time if nothing else happens, so that waiting requests can expire.
    """

    def __init__(
        self,
        scheduling_policy: SchedulingPolicy | str = "adaptive",
        *,
        parameters: Mapping[str, Any] | None = None,
        on_decision: Callable[[SchedulingDecision], None] | None = None,
        on_refusal: Callable[[RequestMetadata, Refusal], None] | None = None,
        max_waiting: int = MAX_WAITING,
        ttl_s: float = REQUEST_TTL_S,
        max_tries: int = DEFAULT_SETTINGS.max_tries,
        clock: Callable[[], float] = time.time,
        seed: int = DEFAULT_SETTINGS.seed,
    ) -> None:
        """`scheduling_policy` is an object, a built-in name, or `package.module:Name`, created with `parameters`.
        `arrival_time` of requests is a time of `clock`."""
        self._max_waiting, self._ttl_s = max_waiting, ttl_s
        self.policy = _policy(scheduling_policy, parameters)
        settings = DispatcherSettings(max_tries=max_tries, seed=seed)
        self._dispatcher = Dispatcher(self._plan(), settings)
        self._clock = clock
        self._outbox = DecisionOutbox(on_decision, on_refusal)

    def update_policy(
        self, scheduling_policy: SchedulingPolicy | str, *, parameters: Mapping[str, Any] | None = None
    ) -> list[SchedulingDecision]:
        """Schedule by another policy from now on. Instances, requests and records stay. Returns its first decisions."""
        self.policy = _policy(scheduling_policy, parameters)
        commands = self._dispatcher.reconfigure(self._plan(), self._clock())
        self._outbox.add(commands)
        return [command.decision for command in commands if isinstance(command, Send)]

    def _plan(self) -> DispatchPlan:
        return plan_for(self.policy, max_waiting=self._max_waiting, ttl_s=self._ttl_s)

    @property
    def notes(self) -> list[str]:
        """Notes for the author of this policy."""
        if keeps_its_order(self.policy):
            return []
        return [
            f'policy "{self.policy.name}" has its own schedule() or prioritize(): each dispatch passes it '
            "all waiting requests; subclass Strategy and write order() and rule_for() if many may wait"
        ]

    # Instances

    def register_instance(self, instance: ExecutionInstance) -> None:
        """Add an instance that is ready for requests. Ids are unique."""
        _expect_instance(instance)
        self._handle(Joined(instance))

    def update_instance(self, instance: ExecutionInstance) -> None:
        """Change properties of an instance: health, limit, speed, load."""
        _expect_instance(instance)
        self._expect(instance.instance_id)
        self._handle(Changed(instance))

    def report_metrics(self, instance_id: str, metrics: Metrics) -> None:
        """Report an engine's measurements."""
        self._expect(instance_id)
        self._handle(Measured(instance_id, metrics))

    def remove_instance(self, instance_id: str, why: str = "it was removed") -> None:
        """Remove an instance, as planned or after a failure. Its unanswered requests return to their old positions in
        the queue."""
        self._expect(instance_id)
        self._outbox.withdraw_all_of(instance_id)
        self._handle(Left(instance_id, Reason("reported", {"text": why})))

    def instances(self) -> list[ExecutionInstance]:
        """Copies of the instances, with their present load."""
        return self._dispatcher.fleet.instances()

    # Requests

    def submit(self, *requests: RequestMetadata) -> list[SchedulingDecision]:
        """Submit requests. Several requests are decided together. Returns the decisions that this made possible."""
        for request in requests:
            if not isinstance(request, RequestMetadata):
                raise TypeError(f"expected a RequestMetadata, found a {type(request).__name__}")
        return self._handle(Arrived(requests))

    def first_token(self, request_id: str) -> None:
        """The answer has begun: the request cannot be sent again."""
        self._handle(FirstToken(request_id))

    def completed(self, request_id: str, output_tokens: int | None = None) -> list[SchedulingDecision]:
        """The request was answered. Returns the decisions that the free slot made possible."""
        self._outbox.withdraw(request_id)
        return self._handle(Ended(request_id, output_tokens))

    def failed(self, request_id: str, why: str, *, retry: bool = True) -> list[SchedulingDecision]:
        """An instance failed a request. The request waits again in its old position, and goes to another instance if
        there is another."""
        self._outbox.withdraw(request_id)
        return self._handle(Failed(request_id, Reason("reported", {"text": why}), retry))

    def cancel(self, request_id: str) -> list[SchedulingDecision]:
        """The client has disconnected."""
        self._outbox.withdraw(request_id)
        return self._handle(Cancelled(request_id))

    def tick(self) -> list[SchedulingDecision]:
        """Refuse requests that have waited too long."""
        return self._handle(TimerFired())

    def shut_down(self) -> None:
        """Refuse all waiting and new requests; running ones may end."""
        self._handle(ShuttingDown())

    # Results

    def decisions(self) -> list[SchedulingDecision]:
        """Decisions since the last call, oldest first, if there is no `on_decision`.

        Decisions that no longer hold are left out, because the request has ended or failed, or its instance has left.
        """
        return self._outbox.take_decisions()

    def refusals(self) -> list[tuple[RequestMetadata, Refusal]]:
        """Refusals since the last call, oldest first, if there is no `on_refusal`; at most the newest 10,000."""
        return self._outbox.take_refusals()

    def pending(self) -> list[Unplaced]:
        """The waiting requests, each with the current reason. Costs a scheduling cycle per request."""
        now, unplaced = self._clock(), []
        for request in self._dispatcher.waiting():
            record = self._dispatcher.explain(request.request_id, now)
            failure = None if record is None else record.failure
            unplaced.append(Unplaced(request, failure or SchedulingFailure(Reason("is-next"), {})))
        return unplaced

    def explain(self, request_id: str) -> Record:
        """Everything about one request: print it, or use its `as_dict()`."""
        record = self._dispatcher.explain(request_id, self._clock())
        if record is None:
            known = (record.request.request_id for record in self._dispatcher.records.newest())
            raise UnknownName("request", request_id, known)
        return record

    def metrics(self) -> dict[str, Any]:
        """Counters since the start, and current numbers; docs/metrics.md explains each."""
        dispatcher = self._dispatcher
        return dispatcher.counters.as_dict() | {
            "waiting": len(dispatcher) - dispatcher.running,
            "running": dispatcher.running,
            "instances": len(dispatcher.fleet),
        }

    def topology(self) -> dict[str, dict[str, dict[str, list[str]]]]:
        """rack -> host -> domain -> instances."""
        return tree(self.instances())

    def nearness(self, one: str, other: str) -> Nearness:
        """The closest level of the topology that two instances share."""
        fleet = self._dispatcher.fleet
        return nearness(fleet[one].instance, fleet[other].instance)

    def _expect(self, instance_id: str) -> None:
        self._dispatcher.fleet[instance_id]  # if there is no such instance, the error has the nearest name

    def _handle(self, event: DispatcherEvent) -> list[SchedulingDecision]:
        commands = self._dispatcher.handle(event, self._clock())
        self._outbox.add(commands)
        return [command.decision for command in commands if isinstance(command, Send)]


def _policy(given: SchedulingPolicy | str, parameters: Mapping[str, Any] | None) -> SchedulingPolicy:
    """The given policy, or a new policy of the given name. Raises `ConfigError` if `given` is neither of these."""
    wrong: object = given
    if isinstance(given, str):
        return build_policy(given, parameters or {})
    if isinstance(wrong, type) and issubclass(wrong, SchedulingPolicy):
        name = wrong.__name__
        raise ConfigError([f"scheduling_policy is the class {name}; make an object of it: {name}()"])
    if not isinstance(wrong, SchedulingPolicy):
        found = f"the class {wrong.__name__}" if isinstance(wrong, type) else f"{wrong!r:.60}"
        raise ConfigError([f"scheduling_policy: expected a SchedulingPolicy or the name of one, found {found}"])
    if parameters:
        raise ConfigError([f'policy "{given.name}" is made already; parameters go with a name'])
    return given


def _expect_instance(instance: object) -> None:
    if not isinstance(instance, ExecutionInstance):
        raise TypeError(f"expected an ExecutionInstance, found a {type(instance).__name__}")
