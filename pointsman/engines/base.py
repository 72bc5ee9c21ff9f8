"""What Pointsman must know of a kind of model server: how to start it, how to ask it, how to read it.

An adapter is a class whose `__init__` arguments are the parameters of `engine:` in a manifest. It is pure: it names
commands and requests, and reads text; a runtime does the rest.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

import msgspec

from pointsman.engines.prometheus import Samples
from pointsman.placement.asks import EngineAbility, Place
from pointsman.routing.endpoints import Metrics

Work = Literal["completions", "chat", "embeddings"]
BYTECODE: Mapping[str, str | None] = MappingProxyType({"PYTHONDONTWRITEBYTECODE": None})
"""For servers in Python: without compiled bytecode they start slowly, vLLM three times so."""
DEFAULT_CONCURRENCY = 16
"""Requests at once that room is kept for, where an engine does not say how many it takes."""
VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


class LaunchSpec(msgspec.Struct, frozen=True):
    """A process to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str | None] = {}
    """Added to the environment of the plane; None: taken out of it."""


class WeightFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a model, and how many tokens of how many requests are kept at once."""

    path: str
    """A file or folder on this machine, the name of something elsewhere, or package:NAME/FILE."""
    estimated_as: Literal["vllm", "llama.cpp"]
    """Whose use of memory is like its own."""
    context: int | None = None
    """None: not said."""
    concurrency: int = 1


class ProbeRequest(msgspec.Struct, frozen=True):
    """A request that tells something about a server by being answered with 2xx."""

    method: str
    path: str
    body: bytes = b""
    """JSON."""


class Engine(ABC):
    """One kind of model server, with the parameters of one deployment."""

    name: ClassVar[str]
    """What `type:` says in a manifest."""
    launchable: ClassVar[bool] = True
    """False: only for endpoints that somebody else started."""
    health: ProbeRequest = ProbeRequest("GET", "/health")
    """Answered while the server lives, also under load."""
    metrics_path: str = "/metrics"
    """Empty: it says nothing of itself."""
    work: Work = "completions"
    """What it is asked for to show that it is ready."""
    ability: EngineAbility = EngineAbility(needs_gpu=False)
    """What it can do with machines."""
    weights: WeightFiles | None = None
    """The files it loads, for whoever works out what it needs; None: not known."""

    @classmethod
    def of_endpoint(cls) -> "Engine":
        """The adapter of a server that somebody else started: it is asked and read, never launched."""
        return cls()

    @abstractmethod
    def launch(self, model: str, host: str, port: int) -> LaunchSpec:
        """The process that serves `model` there."""

    def placed(self, launch: LaunchSpec, place: Place) -> LaunchSpec:
        """The same process on the GPUs of a place, divided among them as the place says."""
        gpus = ",".join(str(index) for _, index in place.gpus)
        visible = {**dict.fromkeys(VISIBLE_GPUS, gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as the driver counts them
        return msgspec.structs.replace(launch, env={**launch.env, **visible})

    def _told(self, launch: LaunchSpec, **options: object) -> LaunchSpec:
        """With options of the command line that are not given already; None: nothing to say."""
        named = {f"--{name.replace('_', '-')}": value for name, value in options.items() if value is not None}
        given = {word.partition("=")[0] for word in launch.argv}
        words = [word for name, value in named.items() if name not in given for word in (name, str(value))]
        return msgspec.structs.replace(launch, argv=(*launch.argv, *words))

    def readiness(self, model: str) -> ProbeRequest:
        """One small piece of real work: a server may be healthy and die on its first token."""
        if self.work == "embeddings":
            return _post("/v1/embeddings", model=model, input="Hello")
        if self.work == "chat":
            messages = [{"role": "user", "content": "Hello"}]
            return _post("/v1/chat/completions", model=model, messages=messages, max_tokens=1, temperature=0)
        return _post("/v1/completions", model=model, prompt="Hello", max_tokens=1, temperature=0)

    def metrics(self, samples: Samples) -> Metrics | None:
        """What its /metrics says; None: nothing that we can read."""
        return None

    @property
    def slots(self) -> int | None:
        """How many requests it runs at once; None: not known."""
        return None


def _post(path: str, **body: object) -> ProbeRequest:
    return ProbeRequest("POST", path, msgspec.json.encode(body))
