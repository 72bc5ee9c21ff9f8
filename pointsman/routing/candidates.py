"""A candidate: a policy that is not in force, with plugins of its own. All calls to a candidate are guarded.

Enters: a decision that was made, or a request to decide on. Leaves: the candidate's choice, or why there is none.
The one rule: no exception and no delay of a candidate leaves this file; it is suspended like users' code.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from pointsman.reasons import Reason
from pointsman.routing.decisions import Choice, decide, vet
from pointsman.routing.endpoints import (
    ACCEPTS,
    LATENCY_MS,
    LOAD,
    THROUGHPUT,
    Endpoint,
    EndpointTable,
    Extractor,
)
from pointsman.routing.plugins import (
    PREFIX_MATCH,
    UNCACHED_REQUEST_TOKENS,
    DepartureListener,
    DispatchListener,
    Endpoints,
    ProgressListener,
    RequestCycle,
)
from pointsman.routing.routes import BatchPolicy, ConfiguredRoute, DispatchPlan, Route
from pointsman.routing.user_code import (
    Containment,
    Misconduct,
    UserCodeFailed,
    cause_of,
    decisions_in,
    is_user_code,
)
from pointsman.selection import Cycle, Producer, Scheduler, SchedulingFailure, SchedulingResult
from pointsman.selection.profile import ProfileResult, Ranked
from pointsman.types import ExecutionInstance

if TYPE_CHECKING:
    from pointsman.routing.shadow import Decision


STALL = 2
"""Users' code in a candidate is interrupted after this many times its time limit. The factor is low because no decision
depends on a candidate."""


@runtime_checkable
class Shareable(Protocol):
    """A plugin whose state depends only on what was sent: two such plugins with equal settings have equal state."""

    geometry: Any
    """The settings on which the state depends."""


def uncached_tokens(cycle: RequestCycle) -> Any:
    """Tokens of the prompt that each endpoint would compute; None if no producer of this cycle provides them."""
    found = cycle.state.get(UNCACHED_REQUEST_TOKENS)
    if found is None and (match := cycle.state.get(PREFIX_MATCH)) is not None:
        found = match.uncached_tokens(float(cycle.request.input_tokens))
    return found


def instance_of(endpoint: Endpoint, endpoints: Endpoints) -> ExecutionInstance:
    """An instance in the form in which policies get it, with the load from these columns."""
    columns, row = endpoints.columns, endpoint.row
    latency, throughput = columns[LATENCY_MS][row], columns[THROUGHPUT][row]
    return msgspec.structs.replace(
        endpoint.instance,
        current_load=int(columns[LOAD][row]),
        avg_latency_ms=float(latency) if latency == latency else None,
        throughput_tokens_per_sec=float(throughput) if throughput == throughput else None,
        can_accept_request=bool(columns[ACCEPTS][row]),
        labels=dict(endpoint.labels),
    )


class BatchRoute:
    """A `Route` that calls a user's `schedule` with one request at a time."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self.name = policy.name

    def choose(self, cycle: RequestCycle, endpoints: Endpoints) -> Choice | SchedulingFailure[Endpoint]:
        policy, request = self._policy, cycle.request
        policy.now, policy.seed = cycle.now, cycle.seed
        instances = [instance_of(endpoint, endpoints) for endpoint in endpoints]
        made = decisions_in(policy.schedule([request], [msgspec.structs.replace(one) for one in instances]))
        vetted = vet(made, [request], EndpointTable(instances), policy.price_per_gpu_hour)
        if not vetted.good:
            why = vetted.bad[0][1] if vetted.bad else Reason("left-waiting", {"policy": policy.name})
            return SchedulingFailure(why, {})
        chosen = next(one for one in endpoints if str(one) == vetted.good[0].target_instance_id)
        how = ("best-by-rule", policy.name, "schedule()", len(instances))
        return Choice(result_of(chosen, endpoints), decide(request, chosen, endpoints, policy.price_per_gpu_hour, how))


def result_of(target: Endpoint, endpoints: Endpoints) -> SchedulingResult[Endpoint]:
    """A result with this one target."""
    only = endpoints.only(target.row)
    return SchedulingResult({"default": ProfileResult("default", [target], Ranked(only, [1.0]))}, "default")


class CandidateChoice(msgspec.Struct, gc=False):
    """The choice of a candidate, or why there is none."""

    endpoint: Endpoint | None = None
    cost: float | None = None
    uncached: Any = None
    failure: str = ""
    """suspended, unplaced or failed; empty if it chose."""


SUSPENDED, UNPLACED, FAILED = (
    CandidateChoice(failure="suspended"),
    CandidateChoice(failure="unplaced"),
    CandidateChoice(failure="failed"),
)


class CandidateConduct:
    """The failures of a candidate, in its own code and in users' code inside it."""

    def __init__(self, name: str, containment: Containment | None) -> None:
        self.own = Misconduct(name)
        """Failures of code that has no guard of its own."""
        self._containment = containment

    def suspended(self, now: float) -> Reason | None:
        """Why the candidate is not called now, with the fact `left_s`; None if it may be called."""
        for one in self._each():
            if one.suspended_until is not None and (why := one.suspended(now)) is not None:
                return why
        return None

    def problem(self) -> Reason | None:
        """The last failure; None if it has not failed."""
        wrong = [one for one in self._each() if one.cause is not None]
        return max(wrong, key=lambda one: one.last_at).cause if wrong else None

    def failures(self) -> int:
        """Total number of calls that were slow, blocked or raised."""
        return sum(one.count for one in self._each())

    def _each(self) -> list[Misconduct]:
        return [self.own, *(() if self._containment is None else self._containment.members)]


class CandidatePolicy:
    """A policy that is not in force."""

    def __init__(
        self,
        name: str,
        plan: DispatchPlan,
        timer: Callable[[], float],
        clock: Callable[[], float],
        containment: Containment | None = None,
    ) -> None:
        """`timer` measures its budget. `clock` is the clock of dispatchers. `containment` guards users' code in it."""
        self.name = name
        self.conduct = CandidateConduct(name, containment)
        self._timer = timer
        self._clock = clock
        self.taken_s = 0.0
        """Time that calls took since this was last set to 0."""
        self.spent_s = 0.0
        """Time spent of its budget."""
        self.extractors = tuple(one for one in plan.plugins if isinstance(one, Extractor))
        self._route: Route = plan.route if plan.policy is None else BatchRoute(plan.policy)
        self._plugins: tuple[Any, ...] = plan.plugins
        self.share([])

    def share(self, plugins: Sequence[Any]) -> None:
        """Replace each of its own producers with a producer of the policy in force, if one has the same state."""
        own = list(self._plugins)
        if isinstance(self._route, ConfiguredRoute) and plugins:
            scheduler, shared = self._route.scheduler, []
            for one in scheduler.producers:
                twin = _twin(one, plugins)
                shared.append(one if twin is None else twin)
                if twin is not None:
                    own = [plugin for plugin in own if plugin is not one]
            made: Scheduler[Endpoint] = Scheduler(list(scheduler.profiles.values()), scheduler.handler, shared)
            self._route = ConfiguredRoute(made, self._route.name)
        self._listeners = [one for one in own if isinstance(one, DispatchListener)]
        self._departures = [one for one in own if isinstance(one, DepartureListener)]
        self._progress = [one for one in own if isinstance(one, ProgressListener)]
        self._producers = [one for one in own if isinstance(one, Producer)]

    @property
    def has_own_state(self) -> bool:
        """Whether it has plugins of its own that remember what was sent where."""
        return bool(self._listeners)

    def may_spend(self, earned_s: float, now: float) -> bool:
        """Whether it may be called: it has some of its budget left, and is not suspended."""
        return self.spent_s < earned_s and self.conduct.suspended(now) is None

    def decide(self, decision: "Decision") -> CandidateChoice:
        """Choose by the numbers of a past decision, and learn where the request went."""
        cycle: RequestCycle = Cycle(decision.request, decision.now, decision.seed)
        choice = self._called(decision.now, self._route.choose, cycle, decision.endpoints)
        if isinstance(choice, CandidateChoice):
            return choice  # it is suspended, or has failed
        if self._listeners:
            self._tell(cycle, decision.result, decision.now)
        if isinstance(choice, SchedulingFailure):
            return UNPLACED
        return CandidateChoice(choice.result.target, choice.decided.expected_cost, uncached_tokens(cycle))

    def follow(self, decision: "Decision") -> None:
        """Learn where a request went, without choosing."""
        if not self._listeners:
            return
        cycle: RequestCycle = Cycle(decision.request, decision.now, decision.seed)
        for producer in self._producers:
            self._called(decision.now, producer.produce, cycle, decision.endpoints)
        self._tell(cycle, decision.result, decision.now)

    def act(self, cycle: RequestCycle, endpoints: Endpoints) -> Choice | None:
        """The choice to carry out; None if the policy in force must decide."""
        own: RequestCycle = Cycle(cycle.request, cycle.now, cycle.seed, cycle.trace)
        choice = self._called(cycle.now, self._route.choose, own, endpoints)
        if not isinstance(choice, Choice):
            return None
        if self._listeners:
            self._tell(own, choice.result, cycle.now)
        code, _, rule, considered = choice.decided.how
        choice.decided.how = code, self.name, rule, considered
        return choice

    def progressed(self, now: float, what: str, *about: Any) -> None:
        """Notify its plugins of a first token or an end; `what` is the method of `ProgressListener`."""
        for one in self._progress:
            self._called(now, getattr(one, what), *about, now)

    def departed(self, endpoint: Endpoint) -> None:
        for one in self._departures:
            self._called(self._clock(), one.departed, endpoint)

    def _tell(self, cycle: RequestCycle, result: SchedulingResult[Endpoint], now: float) -> None:
        for one in self._listeners:
            self._called(now, one.dispatched, cycle, result)

    def _called(self, now: float, call: Callable[..., Any], *about: Any) -> Any:
        """The result of a call; `SUSPENDED` if it is not made, `FAILED` if it raised or blocked."""
        if self.conduct.suspended(now) is not None:
            return SUSPENDED
        began, conduct = self._timer(), self.conduct.own
        try:
            answer = call(*about)
        except UserCodeFailed as error:  # its own guard has counted the failure
            return SUSPENDED if error.why.code == "policy-suspended" else FAILED
        except Exception as error:
            conduct.went_wrong(cause_of(error, 0.0), now, suspend=False)
            return FAILED
        finally:
            self.taken_s += self._timer() - began
        if conduct.strikes:
            conduct.went_well(now)
        return answer


def _twin(plugin: object, others: Sequence[Any]) -> Any:
    """The other plugin with the same state; None if there is no such plugin. Users' code is never shared,
    because its faults must count against the caller."""
    if is_user_code(plugin) or not isinstance(plugin, Shareable):
        return None
    return next((one for one in others if type(one) is type(plugin) and one.geometry == plugin.geometry), None)
