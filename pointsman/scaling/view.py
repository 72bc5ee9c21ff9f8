"""What a scaling policy sees: a deployment as it is now, as it was, and what it may cost."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec


class Window(msgspec.Struct, frozen=True):
    """One quantity over the last while. Without any sample, everything is None."""

    seconds: float
    """How far back it looks."""
    mean: float | None = None
    max: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    last: float | None = None
    count: int = 0
    """Samples."""


class Rate(msgspec.Struct, frozen=True):
    """Arrivals in one bin of the history."""

    began: float
    """On the clock of `now`."""
    per_second: float


class DeploymentView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known of one deployment. Numbers that nobody has measured are None."""

    name: str
    now: float
    """Seconds since the epoch: schedules and seasons need the time of day."""
    replicas: int
    """That take requests now."""
    starting: int = 0
    """On their way: launched, or waiting for a place."""
    unplaced: int = 0
    """Of those, how many have no place: the fleet is full."""
    target: int
    """What was last decided."""
    min_replicas: int = 0
    max_replicas: int = 1
    max_concurrency: int | None = None
    """Requests that one replica takes at once."""
    ongoing: float = 0.0
    """Requests on replicas now; those that wait; each with its windows of the last 30 s, 5 min and 1 h."""
    queued: float = 0.0
    ongoing_windows: Mapping[float, Window] = {}
    queued_windows: Mapping[float, Window] = {}
    arrivals_per_s: Mapping[float, float] = {}
    """Requests per second over the last so many seconds: 30, 300, 3600."""
    history: tuple[Rate, ...] = ()
    """Arrivals in bins of equal length, the oldest first: as far back as is kept (14 days by default)."""
    bin_s: float = 600.0
    """How long a bin of the history is."""
    ttft_ms: Window = Window(300.0)
    """First token, time per token, whole answer: of requests that ended in the last 5 minutes."""
    tpot_ms: Window = Window(300.0)
    latency_ms: Window = Window(300.0)
    slo_attainment: float | None = None
    """Share of requests with a deadline that met it, over the last 5 minutes."""
    kv_usage: Window = Window(300.0)
    """Of the KV cache, mean over replicas, 0 to 1."""
    gpu_usage: Window = Window(300.0)
    """Of the GPUs that a replica has, the share of time in which they compute, mean over replicas, 0 to 1."""
    tokens_per_s: float | None = None
    """In and out, over the last 5 minutes."""
    metrics: Mapping[str, Window] = {}
    """Custom ones: pushed by replicas (`pm.record_metric`) or read from Prometheus."""
    start_up_s: float | None = None
    """From launch to the first request, as seen so far (the median); None: nobody has started yet."""
    cost_per_replica_hour: float | None = None
    since_up_s: float | None = None
    """Since the target last went up; down. None: never."""
    since_down_s: float | None = None
    idle_s: float | None = None
    """Since the last request was here; None: there is one now, or there never was one."""
    state: MutableMapping[str, Any] = {}
    """The policy's own notes: plain data, kept between calls and over restarts. The only thing here that may change."""

    @property
    def load(self) -> float:
        """Requests that are here: on replicas, and waiting."""
        return self.ongoing + self.queued


class ApplicationView(msgspec.Struct, frozen=True, kw_only=True):
    """All deployments of one application, by the names of their nodes."""

    name: str
    now: float
    deployments: Mapping[str, DeploymentView]
    state: MutableMapping[str, Any] = {}
