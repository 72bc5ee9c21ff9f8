"""Any OpenAI-compatible server that a command starts."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Literal

from pointsman.engines.base import Engine, LaunchSpec, ProbeRequest, WeightFiles, Work
from pointsman.engines.llama_cpp import ALL_LAYERS, LlamaCpp, layer_demand, llama_cpp_metrics, tensor_split_of
from pointsman.engines.options import Options
from pointsman.engines.prometheus import Samples
from pointsman.engines.sglang import Sglang, sglang_metrics
from pointsman.engines.vllm import Vllm, vllm_metrics
from pointsman.errors import ConfigError
from pointsman.parameters import Count
from pointsman.placement.asks import EngineAbility, Place
from pointsman.routing.endpoints import Metrics

_PLACEHOLDER = re.compile(r"\{(?:port|host|model)\}")
_ABILITIES = {engine.name: engine.ability for engine in (LlamaCpp, Sglang, Vllm)}
"""The abilities of a server, by the dialect of its metrics."""


class Command(Engine):
    """A server started by a command in which {port}, {host} and {model} are filled in."""

    name = "command"
    key_variable = ""
    remedy = "install it, or correct the command of the engine"

    def __init__(
        self,
        command: Sequence[str] | str,
        *,
        health: str = "/health",
        metrics: Literal["none", "vllm", "llama.cpp", "sglang"] = "none",
        metrics_path: str = "/metrics",
        slots: Count | None = None,
        work: Work = "completions",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._argv = _words(command) if isinstance(command, str) else list(command)
        if not any("{port}" in word for word in self._argv):
            written = shlex.join(self._argv)
            raise ConfigError([f"the command must contain {{port}}, which is filled in when it is started: {written}"])
        self.health = ProbeRequest("GET", health)
        self.metrics_path = "" if metrics == "none" else metrics_path
        self._dialect = metrics
        self.serves_messages = metrics in ("vllm", "llama.cpp")
        program = _program(self._argv)
        self.ability = _ABILITIES.get(program or metrics, EngineAbility(needs_gpu=False))
        self._told = _READERS[program](self._argv) if program else None
        if self._told is not None:
            self.weights, self.demand = self._told.weights, self._told.demand
            self.short_options = self._told.short_options
        self._slots = slots
        self._env = dict(env or {})
        self.work = work

    def launch(self, model: str, host: str, port: int) -> LaunchSpec:
        # Not str.format: arguments may contain JSON with braces.
        filled = {"{port}": str(port), "{host}": host, "{model}": model}
        argv = tuple(_PLACEHOLDER.sub(lambda found: filled[found[0]], word) for word in self._argv)
        return LaunchSpec(argv, self._env)

    def placed(self, launch: LaunchSpec, place: Place) -> LaunchSpec:
        """The command, with the options of a place if the program is known."""
        if self._told is None:
            return super().placed(launch, place)
        return self._told.placed(launch, place)

    def metrics(self, samples: Samples) -> Metrics | None:
        match self._dialect:
            case "vllm":
                return vllm_metrics(samples)
            case "llama.cpp":
                return llama_cpp_metrics(samples, self._slots)
            case "sglang":
                return sglang_metrics(samples)
        return None

    @property
    def slots(self) -> int | None:
        return self._slots


class LlamaServer(LlamaCpp):
    """The options of a llama-server that a command starts."""

    short_options = MappingProxyType(
        {"-ngl": "n-gpu-layers", "gpu-layers": "n-gpu-layers", "-ts": "tensor-split", "-c": "ctx-size", "-m": "model"}
        | {"-np": "parallel", "-md": "model-draft", "-ctk": "cache-type-k", "-ub": "ubatch-size"}
    )

    def __init__(self, argv: Sequence[str]) -> None:
        options = Options(argv, self.short_options)
        super().__init__(options.text("model") or "")
        slots = options.whole("parallel") or 1
        context = options.whole("ctx-size")
        self.weights = WeightFiles(
            path=options.text("model") or "",
            estimated_as="llama.cpp",
            context=context // slots if context else None,
            concurrency=slots,
            kv_dtype=options.text("cache-type-k") or "auto",
            batch_tokens=options.whole("ubatch-size") or LLAMA_SERVER_STEP,
            draft=options.text("model-draft") or "",
        )
        written = options.text("n-gpu-layers")
        layers = -1 if written == "all" else options.whole("n-gpu-layers")
        self.demand = layer_demand(layers, options.text("tensor-split") or "")

    def placed(self, launch: LaunchSpec, place: Place) -> LaunchSpec:
        layers = place.gpu_layers if place.gpu_layers is not None else ALL_LAYERS
        split = ",".join(map(str, tensor_split_of(place)))
        launch = Engine.placed(self, launch, place)
        return self._with_options(launch, n_gpu_layers=layers, tensor_split=split or None)


LLAMA_SERVER_STEP = 512
"""The default number of tokens in one step."""


def _program(argv: Sequence[str]) -> str:
    """The type of the server that the words of a command start; empty if the type is unknown."""
    names = [PurePath(word).name for word in argv[:4]]
    if "llama-server" in names:
        return "llama.cpp"
    if "sglang.launch_server" in argv:
        return "sglang"
    return "vllm" if names[:1] == ["vllm"] or "vllm.entrypoints.openai.api_server" in argv else ""


def _vllm(argv: Sequence[str]) -> Engine:
    """The adapter of a vLLM command. Its model is the word after `serve`, or an option."""
    serve = list(argv).index("serve") + 1 if "serve" in argv else len(argv)
    first = argv[serve] if serve < len(argv) and not argv[serve].startswith("-") else ""
    return Vllm(Options(argv, Vllm.short_options).text("model") or first, args=argv)


def _sglang(argv: Sequence[str]) -> Engine:
    options = Options(argv, Sglang.short_options)
    return Sglang(options.text("model-path") or options.text("model") or "", args=argv)


_READERS: Mapping[str, Callable[[Sequence[str]], Engine]] = {
    "vllm": _vllm, "sglang": _sglang, "llama.cpp": LlamaServer,
}  # fmt: skip


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        why = f"the command cannot be split into words ({error}); write it as a list: {command}"
        raise ConfigError([why]) from None
