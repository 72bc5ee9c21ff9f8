"""How requests find their instances, as the dispatcher sees it: one by one, or all that wait at once."""

from collections.abc import Iterable
from typing import Protocol

from pointsman.routing.decisions import Choice, decide
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import Scheduler, SchedulingFailure
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision

BEST_OF = '{}: best of {} by profile "{}"'


class Route(Protocol):
    """Finds an instance for one request: a strategy, or a configured scheduler."""

    @property
    def name(self) -> str: ...

    def choose(self, cycle: RequestCycle, endpoints: Endpoints) -> Choice | SchedulingFailure[Endpoint]:
        """As things stand; nothing is reserved yet."""
        ...


class BatchPolicy(Protocol):
    """Finds instances for all waiting requests at once: a user's own `schedule`."""

    now: float | None
    seed: int
    price_per_gpu_hour: float

    @property
    def name(self) -> str: ...

    def schedule(
        self, requests: list[RequestMetadata], instances: list[ExecutionInstance]
    ) -> Iterable[SchedulingDecision]: ...


class ConfiguredRoute:
    """A scheduler put together from plugins."""

    def __init__(
        self,
        scheduler: Scheduler[Endpoint],
        name: str = "configured",
        price_per_gpu_hour: float = DEFAULT_PRICE_PER_GPU_HOUR,
    ) -> None:
        self.name = name
        self._scheduler = scheduler
        self._price = price_per_gpu_hour

    def choose(self, cycle: RequestCycle, endpoints: Endpoints) -> Choice | SchedulingFailure[Endpoint]:
        result = self._scheduler.run(cycle, endpoints)
        if isinstance(result, SchedulingFailure):
            return result
        primary = result.primary
        run = result.results[primary]
        how = (BEST_OF, self.name, len(run.ranked.totals), primary)
        return Choice(result, decide(cycle.request, run.targets[0], endpoints, self._price, how))
