"""What a scaling policy sees: the present and past load of a deployment, its replicas, and its limits."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec


class Window(msgspec.Struct, frozen=True):
    """One quantity over a time window that ends now. All statistics are None if there are no samples."""

    seconds: float
    """Length of the window."""
    mean: float | None = None
    max: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    last: float | None = None
    count: int = 0
    """Number of samples."""


class Rate(msgspec.Struct, frozen=True):
    """Arrivals in one bin of the history."""

    began: float
    """Start of the bin, in seconds since the epoch."""
    per_second: float


class DeploymentView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known of one deployment. Numbers that were not measured are None."""

    name: str
    now: float
    """Seconds since the epoch."""
    replicas: int
    """Ready replicas."""
    starting: int = 0
    """Launched, or waiting for a restart or a place."""
    unplaced: int = 0
    """How many of those have no place because the fleet is full."""
    target: int
    """The current target."""
    min_replicas: int = 0
    max_replicas: int = 1
    max_concurrency: int | None = None
    """Requests that one replica runs at once."""
    ongoing: float = 0.0
    """Requests that run now; `queued`: those that wait. Windows of the last 30 s, 5 min and 1 h follow."""
    queued: float = 0.0
    ongoing_windows: Mapping[float, Window] = {}
    queued_windows: Mapping[float, Window] = {}
    arrivals_per_s: Mapping[float, float] = {}
    """Requests per second, by length of window in seconds: 30, 300, 3600."""
    history: tuple[Rate, ...] = ()
    """Arrivals in bins of equal length, oldest first (default 14 days)."""
    bin_s: float = 600.0
    """Length of a bin of the history."""
    ttft_ms: Window = Window(300.0)
    """Time to first token, time per token and total latency of requests that ended in the last 5 minutes."""
    tpot_ms: Window = Window(300.0)
    latency_ms: Window = Window(300.0)
    slo_attainment: float | None = None
    """Share of requests with a deadline that met it, over the last 5 minutes."""
    kv_usage: Window = Window(300.0)
    """Share of the KV cache in use, mean over replicas, 0 to 1."""
    gpu_usage: Window = Window(300.0)
    """Share of time in which the GPUs of a replica compute, mean over replicas, 0 to 1."""
    tokens_per_s: float | None = None
    """Input and output tokens, over the last 5 minutes."""
    metrics: Mapping[str, Window] = {}
    """Custom metrics: recorded by replicas (`pm.record_metric`) or read from Prometheus."""
    start_up_s: float | None = None
    """Median time from launch to ready; None if no start was seen."""
    cost_per_replica_hour: float | None = None
    since_up_s: float | None = None
    """Since the target last went up; `since_down_s`: down. None if it never did."""
    since_down_s: float | None = None
    idle_s: float | None = None
    """Since the last request; None if there is one now, or never was one."""
    state: MutableMapping[str, Any] = {}
    """For the policy to write to: plain data, kept between calls and over restarts."""

    @property
    def load(self) -> float:
        """Requests that run or wait."""
        return self.ongoing + self.queued


class ApplicationView(msgspec.Struct, frozen=True, kw_only=True):
    """All deployments of one application, by node."""

    name: str
    now: float
    deployments: Mapping[str, DeploymentView]
    state: MutableMapping[str, Any] = {}
