"""What should run, as one frozen value. Equal values are the same wish: applying one twice does nothing."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from pointsman.parameters import Count, Time
from pointsman.placement.asks import Ask


class Lifecycle(msgspec.Struct, frozen=True, kw_only=True):
    """How long things may take, in seconds, and how often they may fail."""

    start_timeout_s: Time = 120.0
    """From launch to the first completion."""
    probe_interval_s: Time = 2.0
    probe_timeout_s: Time = 5.0
    """An instance that does not answer within this has failed the probe."""
    failures_until_unhealthy: Count = 2
    """Probes in a row."""
    drain_timeout_s: Time = 60.0
    """Requests under way get this long to end before the instance is stopped."""
    stop_grace_s: Time = 10.0
    """From the request to end until the process is killed."""
    backoff_s: Time = 0.5
    """Before the first restart after a crash; doubles each time, back to this after `backoff_max_s` without one."""
    backoff_max_s: Time = 60.0
    start_attempts: Count = 3
    """So often in a row one of a new recipe may fail to start while older ones serve; then its rollout is stopped."""


class DesiredEngine(msgspec.Struct, frozen=True):
    """Which engine runs, with the parameters as they were written."""

    type: str
    parameters: Mapping[str, Any] = {}


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int
    tls: bool


class DesiredEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A server that somebody else started."""

    name: str
    url: str
    """http://host:port or https://host:port, without a path."""
    engine: str = "openai"
    """Whose metrics it speaks: vllm, llama.cpp, sglang, simulated; openai: none."""
    max_concurrency: Count | None = None
    labels: Mapping[str, str] = {}

    @property
    def address(self) -> Address:
        """What its URL says; config has checked that it says something."""
        scheme, _, rest = self.url.rpartition("://")
        host, colon, port = rest.partition("/")[0].rpartition(":")
        tls = scheme == "https"
        if not colon or not port.isdecimal():
            return Address(rest.partition("/")[0].strip("[]"), 443 if tls else 80, tls)
        return Address(host.strip("[]"), int(port), tls)


class DesiredDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """A named set of equal instances of one model."""

    name: str
    model: str
    """What clients call it."""
    aliases: tuple[str, ...] = ()
    replicas: int = 1
    """Instances of `engine` to run; 0 without an engine."""
    engine: DesiredEngine | None = None
    endpoints: tuple[DesiredEndpoint, ...] = ()
    max_concurrency: int | None = None
    """Requests at once on each instance; None: what the engine says."""
    engine_slots: int | None = None
    """What the engine says: how many requests each instance of it runs at once; None: it says nothing."""
    labels: Mapping[str, str] = {}
    lifecycle: Lifecycle = Lifecycle()
    ask: Ask | None = None
    """What is asked of the placer for each instance, but for its name; None: it is started wherever that may be."""

    @property
    def recipe(self) -> str:
        """What an instance was started from. Where it differs, the instance must be replaced."""
        return msgspec.json.encode([self.model, self.engine], order="sorted").decode()


class Desired(msgspec.Struct, frozen=True):
    """All deployments, by name."""

    deployments: Mapping[str, DesiredDeployment] = {}

    def with_replicas(self, targets: Mapping[str, int]) -> "Desired":
        """The same with these numbers of replicas."""
        changed = {
            name: msgspec.structs.replace(self.deployments[name], replicas=replicas)
            for name, replicas in targets.items()
            if name in self.deployments
        }
        return Desired({**self.deployments, **changed})
