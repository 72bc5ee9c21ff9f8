"""What should run, as one frozen value. Applying an equal value twice does nothing."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from pointsman.parameters import Above0, Amount, Count, ExistingFile, Number, Part, Time, key_source
from pointsman.placement.asks import Ask

PYTHON = "python"
"""The engine type of replicas."""


class Lifecycle(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts, in seconds, and limits on failures."""

    start_timeout_s: Time = 120.0
    """Maximum time from launch to the first completion."""
    probe_interval_s: Time = 2.0
    probe_timeout_s: Time = 5.0
    """A probe that is not answered in this time has failed."""
    failures_until_unhealthy: Count = 2
    """Failed probes in a row."""
    drain_timeout_s: Time = 60.0
    """How long requests in flight may take to end before the instance is stopped."""
    stop_grace_s: Time = 10.0
    """Time between asking the process to end and killing it."""
    backoff_s: Time = 0.5
    """Delay before the first restart. It doubles with each failure, and is reset after `backoff_max_s` without any."""
    backoff_max_s: Time = 60.0
    start_attempts: Count = 3
    """Failed starts in a row after which a rollout is stopped, if instances of the earlier recipe serve."""
    ejection_s: Time = 5.0
    """How long an instance with more errors than its peers gets no requests. The time doubles with each ejection, and
    is reset after `ejection_max_s` without an ejection."""
    ejection_max_s: Time = 300.0
    max_ejected: Part = 0.5
    """Maximum share of a deployment's instances that are ejected at once. If there are several instances, one may
    always be ejected. With 0, no instance is ejected."""


class EngineAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What a server requires of requests."""

    served_model: str = ""
    """The server's name for the model; if empty, the deployment's name for it."""
    api_key_env: str = ""
    """The environment variable with its API key."""
    api_key_file: ExistingFile = ""
    """The file with its API key."""
    messages_api: Literal["", "native", "translated"] = ""
    """Whether the server serves Anthropic's API or gets such requests translated; if empty, the adapter decides."""

    @property
    def key(self) -> str:
        """Where the API key of the server is found, for `read_key`; empty if the server needs no key."""
        return key_source(self.api_key_env, self.api_key_file)

    def names(self, model: str, aliases: Sequence[str]) -> dict[str, str]:
        """The server's name of the model, for each client's name that differs."""
        served = self.served_model or model
        names = {name: served for name in (model, *aliases) if name != served}
        return {**names, "": served} if self.served_model else names


class DesiredEngine(EngineAccess, frozen=True, omit_defaults=True):
    """An engine, and its parameters as written."""

    type: str
    parameters: Mapping[str, Any] = {}


class Address(NamedTuple):
    host: str
    port: int
    tls: bool
    key: str = ""
    """Where its API key is found, for `read_key`."""


class DesiredEndpoint(EngineAccess, frozen=True, kw_only=True):
    """A server that was started elsewhere."""

    name: str
    url: str
    """http://host:port or https://host:port, without a path."""
    engine: str = "openai"
    """The engine whose metrics the server has: vllm, llama.cpp, sglang or simulated; openai if it has no metrics."""
    max_concurrency: Count | None = None
    labels: Mapping[str, str] = {}
    gpus: Number = 1
    """Number of GPUs that the server runs on, for its price; 0 if it runs on CPUs."""
    price_per_hour: Amount | None = None
    """Price of the whole server; if None, the price of the deployment determines it."""
    tokens_per_second: Above0 | None = None
    """The throughput of the server until it is measured; if None, the throughput of the deployment."""

    @property
    def address(self) -> Address:
        """The address in its URL, which config has validated."""
        return _address(self.url, self.key)


@lru_cache(maxsize=4096)
def _address(url: str, key: str) -> Address:
    scheme, _, rest = url.rpartition("://")
    host, colon, port = rest.partition("/")[0].rpartition(":")
    tls = scheme == "https"
    if not colon or not port.isdecimal():
        return Address(rest.partition("/")[0].strip("[]"), 443 if tls else 80, tls, key)
    return Address(host.strip("[]"), int(port), tls, key)


CPU_TOKENS_PER_S, GPU_TOKENS_PER_S = 50.0, 1000.0
"""Throughputs that are assumed until they are measured: of an instance on CPUs, and of each GPU of other instances."""


class HourlyPrice(msgspec.Struct, frozen=True, kw_only=True):
    """The price of an instance."""

    per_gpu_hour: float | None = None
    per_instance_hour: float | None = None
    tokens_per_second: float | None = None
    """Throughput of an instance until it is measured; if None, a value is assumed."""

    def of_instance(self, gpus: int) -> float | None:
        """The price of an instance per hour; None if unknown."""
        if self.per_instance_hour is not None:
            return self.per_instance_hour
        return None if self.per_gpu_hour is None or not gpus else self.per_gpu_hour * gpus

    def throughput(self, gpus: int) -> float | None:
        """The initial throughput in tokens per second; None if costs do not matter."""
        if self.tokens_per_second is not None:
            return self.tokens_per_second
        if self.of_instance(gpus) is None:
            return None
        return GPU_TOKENS_PER_S * gpus if gpus else CPU_TOKENS_PER_S


class DesiredDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """A named set of equal instances of one model."""

    name: str
    model: str
    """The name that clients use."""
    aliases: tuple[str, ...] = ()
    """Other names for it, which engines do not accept."""
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters, which engines accept."""
    replicas: int = 1
    """Instances of `engine` to run; 0 without an engine."""
    engine: DesiredEngine | None = None
    endpoints: tuple[DesiredEndpoint, ...] = ()
    max_concurrency: int | None = None
    """Concurrent requests per instance; if None, the engine determines the number."""
    engine_slots: int | None = None
    """Concurrent requests per instance according to the engine; None if unknown."""
    labels: Mapping[str, str] = {}
    price: HourlyPrice = HourlyPrice()
    lifecycle: Lifecycle = Lifecycle()
    ask: Ask | None = None
    """The ask for the placer, without the instance's name; None if instances need no place."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may use."""
        return (self.model, *self.aliases, *self.adapters)

    @property
    def recipe(self) -> str:
        """The recipe of its instances. An instance of another recipe must be replaced."""
        engine = None if self.engine is None else msgspec.structs.replace(self.engine, messages_api="")
        return msgspec.json.encode([self.model, engine], order="sorted").decode()


class Desired(msgspec.Struct, frozen=True):
    """All deployments, by name."""

    deployments: Mapping[str, DesiredDeployment] = {}

    def with_replicas(self, targets: Mapping[str, int]) -> "Desired":
        changed = {
            name: msgspec.structs.replace(self.deployments[name], replicas=replicas)
            for name, replicas in targets.items()
            if name in self.deployments
        }
        return Desired({**self.deployments, **changed})
