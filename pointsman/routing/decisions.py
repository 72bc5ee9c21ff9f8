"""Decisions. They are made from choices, or by a user's policy, whose decisions are checked."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from pointsman.reasons import Reason, reason_of
from pointsman.routing.endpoints import LOAD, Endpoint, EndpointTable
from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR, expected
from pointsman.routing.filters.demands import Demands
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import Cycle, Filter, SchedulingFailure, SchedulingResult, plugin_name
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision


class Unplaced(NamedTuple):
    """A request that no instance can take now, and why."""

    request: RequestMetadata
    failure: SchedulingFailure[Endpoint]

    @property
    def why(self) -> Reason:
        """The reason, with the number of instances that were rejected for each code."""
        if self.failure.given and not self.failure.failures:
            return self.failure.reason  # no instance was looked at
        return no_instance(self.request, self.failure)

    def reasons(self) -> dict[str, Reason]:
        return {str(endpoint): reason for endpoint, _, reason in self.failure.reasons()}


def no_instance(request: RequestMetadata, failure: SchedulingFailure[Endpoint]) -> Reason:
    return Reason("no-instance-can-take", {"model": request.model_name, "cause": failure.reason})


How: TypeAlias = tuple[str, str, str, int]
"""How an instance was chosen: the code of the reason, the policy, its rule or profile, and the number of candidates."""


class Decided(msgspec.Struct, eq=False, gc=False):
    """The numbers that a decision is based on. The decision itself is built when it is read, which is rare."""

    request_id: str
    target_instance_id: str
    instance: ExecutionInstance
    load: float
    """The load without this request."""
    expected_ms: float | None
    expected_cost: float | None
    how: How
    predicted: tuple[float, float] | None = None
    """Predicted TTFT and TPOT, in milliseconds; None if there is no prediction."""

    @property
    def decision(self) -> SchedulingDecision:
        instance, latency = self.instance, self.expected_ms
        code, policy, rule, candidates = self.how
        chosen = {"policy": policy, "rule": rule, "candidates": candidates}
        figures = {"running": self.load, "limit": instance.max_concurrency, "expected_ms": latency}
        return SchedulingDecision(
            self.request_id,
            self.target_instance_id,
            instance.parallelism,
            latency,
            self.expected_cost,
            instance.tensor_parallel_size,
            instance.pipeline_parallel_size,
            Reason(code, chosen | figures),
        )


def decide(
    request: RequestMetadata, endpoint: Endpoint, endpoints: Endpoints, price_per_gpu_hour: float, how: How
) -> Decided:
    instance, row = endpoint.instance, endpoint.row
    latency, cost = expected(request, row, endpoints.columns, price_per_gpu_hour)
    load = endpoints.columns[LOAD][row]
    return Decided(request.request_id, instance.instance_id, instance, load, latency, cost, how)


def decision_data(decision: SchedulingDecision | None) -> dict[str, Any] | None:
    """A decision as JSON. The metadata of a decision may contain any value."""
    if decision is None:
        return None
    reason = reason_of("policy", decision.reason).as_dict()
    bare = msgspec.structs.replace(decision, reason="")
    return {**msgspec.to_builtins(bare, str_keys=True, enc_hook=str), "reason": reason}


class Choice(msgspec.Struct, eq=False):
    """The result of a cycle, and the decision made from it."""

    result: SchedulingResult[Endpoint]
    decided: Decided
    stood_in: Reason | None = None
    """Why a stand-in made the choice; None if the policy itself made it."""

    @property
    def decision(self) -> SchedulingDecision:
        return self.decided.decision


class Vetted(NamedTuple):
    """A policy's decisions: those that can be carried out, and those that cannot, each with the reason."""

    good: list[SchedulingDecision]
    bad: list[tuple[SchedulingDecision, Reason]]


def vet(
    decisions: Iterable[SchedulingDecision],
    requests: Iterable[RequestMetadata],
    fleet: EndpointTable,
    price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR,
) -> Vetted:
    """Check a policy's decisions one by one, as if each were carried out before the next.

    Decisions that can be carried out reserve load in `fleet`.
    """
    waiting = {request.request_id: request for request in requests}
    checks = Demands(price_per_gpu_hour).filters
    vetted = Vetted([], [])
    for made in decisions:
        request = waiting.pop(made.request_id, None)
        broken = _broken_promise(made, request, fleet, checks)
        if broken is not None:
            vetted.bad.append((made, broken))
        elif request is not None:
            vetted.good.append(made)
            fleet.load.reserve(fleet[made.target_instance_id], request.input_tokens)
    return vetted


def _broken_promise(
    made: SchedulingDecision, request: RequestMetadata | None, fleet: EndpointTable, checks: Sequence[Filter[Endpoint]]
) -> Reason | None:
    if request is None:
        return Reason("unknown-request", {"request_id": made.request_id})
    if made.target_instance_id not in fleet:
        return Reason("unknown-instance", {"instance": made.target_instance_id})
    cycle: RequestCycle = Cycle(request)
    itself = fleet.roster.only(fleet[made.target_instance_id].row)
    for check in checks:
        for endpoint, why in check.rejections(cycle, itself):
            facts = {"instance": str(endpoint), "cause": reason_of(plugin_name(check), why)}
            return Reason("instance-not-allowed", facts)
    return None
