"""A choice as a decision: what is expected of it, in numbers and in words."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from pointsman.routing.endpoints import LOAD, Endpoint, EndpointTable
from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR, expected
from pointsman.routing.filters.demands import Demands
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import Cycle, Filter, SchedulingFailure, SchedulingResult
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision


class Unplaced(NamedTuple):
    """A request that nobody can take now, and why."""

    request: RequestMetadata
    failure: SchedulingFailure[Endpoint]

    @property
    def why(self) -> str:
        """In one sentence."""
        if self.failure.why and not self.failure.failures:
            return self.failure.why  # nobody was asked who could not
        return refusal_text(self.request, self.failure)

    def reasons(self) -> dict[str, str]:
        """The reason for every instance."""
        return {str(endpoint): why for endpoint, _, why in self.failure.reasons()}


def refusal_text(request: RequestMetadata, failure: SchedulingFailure[Endpoint]) -> str:
    """Why nobody can take this request."""
    model = f'"{request.model_name}"' if request.model_name else "this request"
    return f"no instance can take {model}: {failure.in_words('instances')}"


class Decided(msgspec.Struct, eq=False, gc=False):
    """A decision as the numbers of its moment; it is put into words when somebody reads it, which is rare."""

    request_id: str
    target_instance_id: str
    instance: ExecutionInstance
    load: float
    """Before it counts the request."""
    expected_ms: float | None
    expected_cost: float | None
    how: tuple[object, ...]
    """A format string and what goes into it."""

    @property
    def decision(self) -> SchedulingDecision:
        """With its words."""
        instance, latency = self.instance, self.expected_ms
        running = f"{self.load:.0f}"
        if instance.max_concurrency is not None:
            running += f" of {instance.max_concurrency}"
        about = "" if latency is None else f", about {latency:.0f} ms"
        template, *facts = self.how
        return SchedulingDecision(
            self.request_id,
            self.target_instance_id,
            instance.parallelism,
            instance.tensor_parallel_size,
            instance.pipeline_parallel_size,
            latency,
            self.expected_cost,
            f"{str(template).format(*facts)} ({running} running{about})",
        )


def decide(
    request: RequestMetadata,
    endpoint: Endpoint,
    endpoints: Endpoints,
    price_per_gpu_hour: float,
    how: tuple[object, ...],
) -> Decided:
    """A decision for this endpoint, as it stands. `how`: a format string and what goes into it."""
    instance, row = endpoint.instance, endpoint.row
    latency, cost = expected(request, row, endpoints.columns, price_per_gpu_hour)
    load = endpoints.columns[LOAD][row]
    return Decided(request.request_id, instance.instance_id, instance, load, latency, cost, how)


class Choice(msgspec.Struct, eq=False):
    """What a cycle chose, and the decision it amounts to."""

    result: SchedulingResult[Endpoint]
    decided: Decided

    @property
    def decision(self) -> SchedulingDecision:
        """With its words."""
        return self.decided.decision


class Vetted(NamedTuple):
    """A policy's decisions, divided into those that keep the promises and those that do not."""

    good: list[SchedulingDecision]
    bad: list[tuple[SchedulingDecision, str]]


def vet(
    decisions: Iterable[SchedulingDecision],
    requests: Iterable[RequestMetadata],
    fleet: EndpointTable,
    price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR,
) -> Vetted:
    """Check a policy's decisions one by one, as if each were carried out before the next: load adds up.

    The fleet counts what was good; take a fleet of your own to only look.
    """
    waiting = {request.request_id: request for request in requests}
    checks = Demands(price_per_gpu_hour).filters
    vetted = Vetted([], [])
    for made in decisions:
        request = waiting.pop(made.request_id, None)
        broken = _broken_promise(made, request, fleet, checks)
        if request is None or broken is not None:
            vetted.bad.append((made, broken or ""))
        else:
            vetted.good.append(made)
            fleet.reserve(fleet[made.target_instance_id], request.input_tokens)
    return vetted


def _broken_promise(
    made: SchedulingDecision,
    request: RequestMetadata | None,
    fleet: EndpointTable,
    checks: Sequence[Filter[Endpoint]],
) -> str | None:
    if request is None:
        return f'request "{made.request_id}" was not waiting, or was decided before'
    if made.target_instance_id not in fleet:
        return f'there is no instance "{made.target_instance_id}"'
    cycle: RequestCycle = Cycle(request)
    itself = fleet.roster.only(fleet[made.target_instance_id].row)
    for check in checks:
        for endpoint, why in check.rejections(cycle, itself):
            return f'instance "{endpoint}" may not be chosen: {why}'
    return None
