"""What Pointsman needs for each kind of model server: how to start it, probe it and read its metrics.

An adapter is a class whose `__init__` arguments are the parameters of `engine:` in a manifest. It is pure: it returns
commands and requests, and parses text; a runtime does the rest.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import msgspec

from pointsman.engines.options import Options
from pointsman.engines.prometheus import Samples
from pointsman.errors import shown
from pointsman.placement.asks import EngineAbility, EngineDemand, Place
from pointsman.reasons import Reason
from pointsman.render.text import one_line
from pointsman.routing.endpoints import Metrics

Work = Literal["completions", "chat", "embeddings"]
BYTECODE: Mapping[str, str | None] = MappingProxyType({"PYTHONDONTWRITEBYTECODE": None})
"""The environment of servers in Python: without compiled bytecode vLLM takes three times as long to start."""
DEFAULT_CONCURRENCY = 16
"""Concurrent requests to reserve memory for, if the engine has no setting for it."""
VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


class LaunchSpec(msgspec.Struct, frozen=True):
    """A process to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str | None] = {}
    """Added to the environment of the plane; None removes a variable."""


# Servers that exit before they are ready

CANNOT_START = 78
"""The exit code (EX_CONFIG of sysexits.h) of a server that cannot start as it is configured."""
NOT_FOUND = (126, 127)
"""Exit codes of shells: a command cannot be run, or does not exist."""
USAGE = 2
"""The exit code of programs with wrong options. Go programs that panic have the same."""
_NO_MODULE = re.compile(
    r"(?:^ModuleNotFoundError|\(ModuleNotFoundError|^\S*python[\w.]*): No module named '?([\w.]+)'?\)?$"
)
_IN_USE = "address already in use"
PORT_LINES = 20
"""Number of last lines that are searched for an address in use: some servers continue for a while without it."""
_NO_MODEL = "is not a local folder and is not a valid model identifier"


class ProcessEnd(msgspec.Struct, frozen=True):
    """The end of an instance's process before it was ready."""

    code: int
    lines: Sequence[str]
    """The last lines that it wrote, without empty ones."""
    port_is_free: bool
    """Whether the port that it was given is free: then it failed to bind another one."""


class WeightFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a model, and the context and concurrency to estimate its memory for."""

    path: str
    """A local file or folder, the name of a remote model, or package:NAME/FILE."""
    estimated_as: Literal["vllm", "llama.cpp"]
    context: int | None = None
    """None: not configured."""
    concurrency: int = 1
    kv_dtype: str = "auto"
    batch_tokens: int | None = None
    max_sequences: int | None = None
    quantization: str = ""
    """How weights are quantised when they are loaded; empty: as in the files."""
    draft: str = ""
    """The files of its draft model; empty: it has none."""


class ProbeRequest(msgspec.Struct, frozen=True):
    """A request that succeeds if a server answers it with 2xx."""

    method: str
    path: str
    body: bytes = b""
    """JSON."""

    def failure(self, status: int, body: bytes, *, is_work: bool) -> str:
        """What is wrong with an answer, including the request and what the server says; empty if nothing is. With
        `is_work`, it must be a JSON object."""
        if 200 <= status < 300 and not (is_work and not isinstance(_decoded(body), dict)):
            return ""
        asked, model = _decoded(self.body), ""
        if isinstance(asked, dict) and asked.get("model"):
            model = f' for model "{shown(str(asked["model"]))}"'
        what = f"{self.method} {self.path}{model} was answered with"
        said = one_line(_said(body), MAX_SAID)
        if status < 300:
            return f"{what} something else than JSON: {said}"
        advice = _ADVICE.get(status, "") if model or status != 404 else ""
        return "".join([f"{what} {status}", f": {said}" if said else "", advice])


MAX_SAID = 200
"""Maximum characters of a server's error text."""
_KEY = "; apiKeyEnv or apiKeyFile must name the key that it asks for"
_ADVICE = {401: _KEY, 403: _KEY, 404: "; if it serves the model by another name, set servedModel"}


def _said(body: bytes) -> str:
    """A server's error text: the message, if it has the form of a known API; else the whole text."""
    told = _decoded(body)
    for name in ("error", "detail", "message") if isinstance(told, dict) else ():
        found = told.get(name)
        found = found.get("message") if isinstance(found, dict) else found
        if isinstance(found, str) and found:
            return found
    return body[: 4 * MAX_SAID].decode("utf-8", "replace")


def _decoded(body: bytes) -> Any:
    """Data from JSON; None if it is not JSON."""
    try:
        return msgspec.json.decode(body) if body else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class Engine(ABC):
    """One kind of model server, with the parameters of one deployment."""

    name: ClassVar[str]
    """`type:` in a manifest."""
    serves_messages: bool = False
    """Whether it serves Anthropic's API at /v1/messages; an instance without it gets requests in translation."""
    key_variable: ClassVar[str | None] = None
    """The environment variable in which it gets the API key that it asks clients for; empty: its command passes the key
    itself; None: it cannot be started with one."""
    remedy: str = "install what it needs"
    """What to do if its program, or a package that it needs, is missing."""
    launchable: ClassVar[bool] = True
    """False: only for endpoints that are managed elsewhere."""
    health: ProbeRequest = ProbeRequest("GET", "/health")
    """A request that the server answers while it is alive, even under load."""
    metrics_path: str = "/metrics"
    """Empty if it has no metrics."""
    work: Work = "completions"
    """The kind of request that shows that it is ready."""
    ability: EngineAbility = EngineAbility(needs_gpu=False)
    """How it can use GPUs and workers."""
    weights: WeightFiles | None = None
    """The files that it loads, to estimate its memory; None: not known."""
    demand: EngineDemand = EngineDemand()
    """The properties of its places that its parameters determine."""

    short_options: Mapping[str, str] = MappingProxyType({})
    """Other forms of its options, and the names that they stand for."""
    longest_answer: int | None = None
    """Maximum tokens of an answer if a request sets no limit, by its parameters; None if unknown."""

    @classmethod
    def of_endpoint(cls) -> "Engine":
        """The adapter of a server that is managed elsewhere: it is probed and read, never launched."""
        return cls()

    def why_final(self, end: ProcessEnd) -> Reason | None:
        """Why no further start can succeed before something is changed; None if one may."""
        last = end.lines[-1] if end.lines else f"exit code {end.code}"
        missing = _NO_MODULE.search(last)
        if end.code == CANNOT_START:
            return Reason("refuses-to-start", {"why": last})
        if end.code in NOT_FOUND:
            return Reason("no-program", {"program": "its command", "why": last, "folder": "", "remedy": self.remedy})
        if end.code == USAGE and any(line.lower().startswith("usage") for line in end.lines):
            return Reason("wrong-options", {"why": last})
        if missing is not None and end.code == 1:
            return Reason("no-package", {"package": missing[1], "remedy": self.remedy})
        unknown = [line for line in end.lines if _NO_MODEL in line]
        if unknown:
            return Reason("unknown-model", {"why": unknown[-1]})
        in_use = [line for line in end.lines[-PORT_LINES:] if _IN_USE in line.lower()]
        return Reason("port-taken", {"why": in_use[-1]}) if in_use and end.port_is_free else None

    @abstractmethod
    def launch(self, model: str, host: str, port: int) -> LaunchSpec:
        """The process that serves `model` at this address."""

    def placed(self, launch: LaunchSpec, place: Place) -> LaunchSpec:
        """The same process on the GPUs of a place, split as the place says."""
        gpus = ",".join(str(index) for worker, index in place.gpus if worker == place.home)
        visible = {**dict.fromkeys(VISIBLE_GPUS, gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # the order of the driver
        return msgspec.structs.replace(launch, env={**launch.env, **visible})

    def _with_options(self, launch: LaunchSpec, **options: object) -> LaunchSpec:
        """Adds command-line options that are not given already; those with None are left out."""
        words = self._words_of(options, launch.argv)
        return msgspec.structs.replace(launch, argv=(*launch.argv, *words))

    def _words_of(self, options: Mapping[str, object], beside: Sequence[str]) -> list[str]:
        """Options as words, without those that are None or already there."""
        named = {name.replace("_", "-"): value for name, value in options.items() if value is not None}
        there = Options(beside, self.short_options)
        return [word for name, value in named.items() if name not in there for word in (f"--{name}", str(value))]

    def readiness(self, model: str) -> ProbeRequest:
        """A small real request: a server may be healthy and crash on its first token."""
        if self.work == "embeddings":
            return _post("/v1/embeddings", model=model, input="Hello")
        if self.work == "chat":
            messages = [{"role": "user", "content": "Hello"}]
            return _post("/v1/chat/completions", model=model, messages=messages, max_tokens=1, temperature=0)
        return _post("/v1/completions", model=model, prompt="Hello", max_tokens=1, temperature=0)

    def metrics(self, samples: Samples) -> Metrics | None:
        """Its load, from /metrics; None if there are no readable metrics."""
        return None

    @property
    def slots(self) -> int | None:
        """The number of requests that it runs concurrently; None: not known."""
        return None


def _post(path: str, **body: object) -> ProbeRequest:
    return ProbeRequest("POST", path, msgspec.json.encode(body))
