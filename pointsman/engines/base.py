"""What Pointsman must know about each kind of model server: how to start it, probe it and read its metrics.

An adapter is a class whose `__init__` arguments are the parameters of `engine:` in a manifest. It performs no I/O: it
returns commands and requests, and parses text. A runtime does everything else.
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
"""The environment of servers that run Python: without compiled bytecode, vLLM takes three times as long to start."""
DEFAULT_CONCURRENCY = 16
"""The number of concurrent requests to reserve memory for if the engine has no setting for this number."""
VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


class LaunchSpec(msgspec.Struct, frozen=True):
    """A process to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str | None] = {}
    """Variables to add to the environment of the plane; a variable with None is removed from it."""


# Servers that exit before they are ready

CANNOT_START = 78
"""The exit code (EX_CONFIG of sysexits.h) of a server that cannot start as it is configured."""
NOT_FOUND = (126, 127)
"""Exit codes of shells for a command that cannot be run, and for a command that does not exist."""
USAGE = 2
"""The exit code of programs that are started with wrong options. A Go program that panics has the same exit code."""
_NO_MODULE = re.compile(
    r"(?:^ModuleNotFoundError|\(ModuleNotFoundError|^\S*python[\w.]*): No module named '?([\w.]+)'?\)?$"
)
_IN_USE = "address already in use"
PORT_LINES = 20
"""The number of last lines that are searched for a report of an address in use. Some servers continue for a while
without the address before they exit."""
_NO_MODEL = "is not a local folder and is not a valid model identifier"


class ProcessEnd(msgspec.Struct, frozen=True):
    """The end of an instance's process before it was ready."""

    code: int
    lines: Sequence[str]
    """The last lines that the process wrote, without empty lines."""
    port_is_free: bool
    """Whether the port that the process was given is free. If so, and an address was in use, that was another port."""


class WeightFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a model, with the context and concurrency for which its memory is estimated."""

    path: str
    """A local file or folder, the name of a remote model, or package:NAME/FILE."""
    estimated_as: Literal["vllm", "llama.cpp"]
    context: int | None = None
    """Context in tokens; None if it is not configured."""
    concurrency: int = 1
    kv_dtype: str = "auto"
    batch_tokens: int | None = None
    max_sequences: int | None = None
    quantization: str = ""
    """How weights are quantised when they are loaded; empty if they stay as in the files."""
    draft: str = ""
    """The files of the model's draft model; empty if there is no draft model."""


class ProbeRequest(msgspec.Struct, frozen=True):
    """A request that succeeds if a server answers it with 2xx."""

    method: str
    path: str
    body: bytes = b""
    """The body as JSON."""

    def failure(self, status: int, body: bytes, *, is_work: bool) -> str:
        """What is wrong with an answer, including the request and the server's message; empty if nothing is wrong. If
        `is_work` is set, the answer must be a JSON object."""
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
    """A server's error text: only the message if the error has the form of a known API, else the whole text."""
    told = _decoded(body)
    for name in ("error", "detail", "message") if isinstance(told, dict) else ():
        found = told.get(name)
        found = found.get("message") if isinstance(found, dict) else found
        if isinstance(found, str) and found:
            return found
    return body[: 4 * MAX_SAID].decode("utf-8", "replace")


def _decoded(body: bytes) -> Any:
    """Data from JSON; None if the text is not JSON."""
    try:
        return msgspec.json.decode(body) if body else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class Engine(ABC):
    """One kind of model server, with the parameters of one deployment."""

    name: ClassVar[str]
    """`type:` in a manifest."""
    serves_messages: bool = False
    """Whether the server has Anthropic's API at /v1/messages. If not, its requests for that API are translated."""
    key_variable: ClassVar[str | None] = None
    """The environment variable from which the server reads the API key of its clients. Empty if the command passes the
    key itself; None if the server cannot be started with a key."""
    remedy: str = "install what it needs"
    """What to do if the server's program, or a package that the program needs, is missing."""
    launchable: ClassVar[bool] = True
    """Whether Pointsman can start the server. False if the adapter is only for endpoints that are managed elsewhere."""
    health: ProbeRequest = ProbeRequest("GET", "/health")
    """A request that the server answers while it is alive, even under load."""
    metrics_path: str = "/metrics"
    """The path of the server's metrics; empty if the server has no metrics."""
    work: Work = "completions"
    """The kind of request that shows whether the server is ready."""
    ability: EngineAbility = EngineAbility(needs_gpu=False)
    """How the server can use GPUs and workers."""
    weights: WeightFiles | None = None
    """The files that the server loads, from which its memory is estimated; None if they are not known."""
    demand: EngineDemand = EngineDemand()
    """The properties of the server's places that follow from its parameters."""

    short_options: Mapping[str, str] = MappingProxyType({})
    """Other forms of the server's options, with the name that each form stands for."""
    longest_answer: int | None = None
    """Maximum tokens of an answer if a request sets no limit. The parameters determine it; None if it is unknown."""

    @classmethod
    def of_endpoint(cls) -> "Engine":
        """The adapter for a server that is managed elsewhere. The server is probed and its metrics are read, but it is
        never launched."""
        return cls()

    def why_final(self, end: ProcessEnd) -> Reason | None:
        """Why a further start can succeed only after a change; None if a start may succeed without one."""
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
        """The same process, on the GPUs of a place and split over them as the place says."""
        gpus = ",".join(str(index) for worker, index in place.gpus if worker == place.home)
        visible = {**dict.fromkeys(VISIBLE_GPUS, gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # the order of the driver
        return msgspec.structs.replace(launch, env={**launch.env, **visible})

    def _with_options(self, launch: LaunchSpec, **options: object) -> LaunchSpec:
        """Adds command-line options that the command does not have yet. Options with the value None are left out."""
        words = self._words_of(options, launch.argv)
        return msgspec.structs.replace(launch, argv=(*launch.argv, *words))

    def _words_of(self, options: Mapping[str, object], beside: Sequence[str]) -> list[str]:
        """Options as words of a command line, without those that are None or that `beside` already has."""
        named = {name.replace("_", "-"): value for name, value in options.items() if value is not None}
        there = Options(beside, self.short_options)
        return [word for name, value in named.items() if name not in there for word in (f"--{name}", str(value))]

    def readiness(self, model: str) -> ProbeRequest:
        """A small real request: a healthy server may still crash on its first token."""
        if self.work == "embeddings":
            return _post("/v1/embeddings", model=model, input="Hello")
        if self.work == "chat":
            messages = [{"role": "user", "content": "Hello"}]
            return _post("/v1/chat/completions", model=model, messages=messages, max_tokens=1, temperature=0)
        return _post("/v1/completions", model=model, prompt="Hello", max_tokens=1, temperature=0)

    def metrics(self, samples: Samples) -> Metrics | None:
        """The load of the server, from its metrics; None if they cannot be read."""
        return None

    @property
    def slots(self) -> int | None:
        """The number of requests that the server runs concurrently; None if the number is not known."""
        return None


def _post(path: str, **body: object) -> ProbeRequest:
    return ProbeRequest("POST", path, msgspec.json.encode(body))
