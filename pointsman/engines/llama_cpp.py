"""llama.cpp: its HTTP server, run by `pointsman.engines.llama_cpp_server`."""

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from pointsman.engines.base import BYTECODE, Engine, LaunchSpec, WeightFiles
from pointsman.engines.prometheus import Samples
from pointsman.parameters import Count, ExistingFile
from pointsman.placement.asks import EngineAbility, Place
from pointsman.routing.endpoints import Metrics

ALL_LAYERS = 999
"""More than any model has: llama.cpp then puts all layers on the GPU."""


class LlamaCpp(Engine):
    """The HTTP server of llama.cpp with GGUF weights."""

    name = "llama.cpp"
    serves_messages = True
    key_variable = "LLAMA_API_KEY"
    ability = EngineAbility(
        name="llama.cpp",
        vendors=frozenset({"nvidia", "amd", "apple", "intel"}),
        needs_gpu=False,
        tensor_parallel=False,
        distributed=False,
        partial_offload=True,
    )

    def __init__(
        self,
        model: ExistingFile,
        *,
        context_tokens: Count = 2048,
        slots: Count = 4,
        threads: Count = 1,
        batch_tokens: Count = 256,
        prompt_cache_mib: Annotated[int, msgspec.Meta(ge=0)] = 256,
        embeddings: bool = False,
        pooling: Literal["model", "mean", "cls", "last"] = "model",
        extra: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._options = {
            "--model": model,
            "--context-tokens": context_tokens,
            "--slots": slots,
            "--threads": threads,
            "--batch-tokens": batch_tokens,
            "--prompt-cache-mib": prompt_cache_mib,
        }
        self._pooling = pooling
        self._extra = dict(extra or {})
        self._env = dict(env or {})
        self._slots: int | None = slots
        self.longest_answer = context_tokens
        self.work = "embeddings" if embeddings else "completions"
        self.weights = WeightFiles(path=model, estimated_as="llama.cpp", context=context_tokens, concurrency=slots)

    @classmethod
    def of_endpoint(cls) -> Engine:
        adapter = cls("")
        adapter._slots = adapter.longest_answer = None
        return adapter

    def launch(self, model: str, host: str, port: int) -> LaunchSpec:
        argv = [sys.executable, "-P", "-m", "pointsman.engines.llama_cpp_server"]
        argv += ["--alias", model, "--host", host, "--port", str(port)]
        for option, value in self._options.items():
            argv += [option, str(value)]
        if self.work == "embeddings":
            argv += ["--embeddings", "--pooling", self._pooling]
        for name, value in self._extra.items():
            argv += ["--set", f"{name}={msgspec.json.encode(value).decode()}"]
        return LaunchSpec(tuple(argv), {**BYTECODE, **self._env})

    def placed(self, launch: LaunchSpec, place: Place) -> LaunchSpec:
        layers = place.gpu_layers if place.gpu_layers is not None else ALL_LAYERS
        launch = super().placed(launch, place)
        return msgspec.structs.replace(launch, argv=(*launch.argv, "--set", f"n_gpu_layers={layers}"))

    def metrics(self, samples: Samples) -> Metrics | None:
        return llama_cpp_metrics(samples, self._slots)

    @property
    def slots(self) -> int | None:
        return self._slots


def llama_cpp_metrics(samples: Samples, slots: int | None) -> Metrics | None:
    """Metrics of llama.cpp. It has no gauge of its KV cache: the share of busy slots stands for it."""
    running = samples.value("llamacpp:requests_processing")
    waiting = samples.value("llamacpp:requests_deferred")
    if running is None or waiting is None:
        return None
    return Metrics(waiting, running, min(running / slots, 1.0) if slots else 0.0)
