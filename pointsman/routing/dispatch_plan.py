"""What a dispatcher is built from: how it schedules, which a manifest may change at any time, and its settings."""

from collections.abc import Callable
from typing import Any

import msgspec

from pointsman.routing.plugins import Admitter
from pointsman.routing.queue import FlowControl, InFlightEviction, SaturationDetector
from pointsman.routing.routes import BatchPolicy, Route


class DispatcherSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a dispatcher, whatever its plan. The only place that declares their defaults."""

    max_tries: int = 5
    """How often a request is sent, in all, before it is refused."""
    keep_records: int = 10_000
    """Decision records kept, the newest."""
    traced: bool = True
    """Keep the reasons of every decision."""
    seed: int = 0


DEFAULT_SETTINGS = DispatcherSettings()


class DispatchPlan(msgspec.Struct, frozen=True):
    """How requests are admitted, ordered and placed."""

    route: Route
    make_queue: Callable[[], FlowControl]
    """Makes the queue of one model."""
    policy: BatchPolicy | None = None
    """Decides by batch; `route` decides when it raises."""
    plugins: tuple[Any, ...] = ()
    """Each is called for the roles that it implements."""
    detector: SaturationDetector | None = None
    """Holds waiting requests back while it finds the pool saturated. None: only full instances do."""
    shedding: Admitter | None = None
    """The last of the admitters."""
    make_eviction: Callable[[], InFlightEviction] | None = None
    """Running requests of negative priority may be stopped for more important ones. None: never."""
    waits: bool = True
    """Whether requests may wait. If not, a request that cannot be sent at once is refused."""

    @property
    def strategy(self) -> str:
        """What decides, by name."""
        return self.route.name if self.policy is None else self.policy.name
