"""llama.cpp: its HTTP server, run by `pointsman.engines.llama_cpp_server`."""

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from pointsman.engines.base import BYTECODE, Engine, LaunchSpec, WeightFiles
from pointsman.engines.options import split_shares
from pointsman.engines.prometheus import Samples
from pointsman.errors import ConfigError
from pointsman.parameters import Count, ExistingFile
from pointsman.placement.asks import EngineAbility, EngineDemand, Place
from pointsman.routing.endpoints import Metrics

_PLACED = ("n_gpu_layers", "tensor_split")
KV_TYPES = {0: "f32", 1: "auto", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl", 30: "bf16"}
"""Data types of the KV cache, by their numbers in ggml."""
ALL_LAYERS = 999
"""More layers than any model has. With this number, llama.cpp puts all layers on the GPU."""


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
        layer_split=True,
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
        gpu_layers: Annotated[int, msgspec.Meta(ge=-1)] | None = None,
        tensor_split: Sequence[float] = (),
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
        told = {"n_gpu_layers": gpu_layers, "tensor_split": list(tensor_split) or None}
        told |= {"n_ctx": context_tokens * slots, "n_parallel": slots}
        for name, value in told.items():
            given = self._extra.get(name, value)
            if value is not None and given != value:
                why = f"extra sets {name} to {given}, which is {value} by the other parameters; keep one of them"
                raise ConfigError([why])
            self._extra |= {name: value} if value is not None and name in _PLACED else {}
        self._env = dict(env or {})
        self._slots: int | None = slots
        self.longest_answer = context_tokens
        self.work = "embeddings" if embeddings else "completions"
        self.weights = WeightFiles(
            path=model,
            estimated_as="llama.cpp",
            context=context_tokens,
            concurrency=slots,
            kv_dtype=KV_TYPES.get(self._extra.get("cache_type_k", 1), "auto"),
            batch_tokens=batch_tokens,
        )
        self.demand = layer_demand(self._extra.get("n_gpu_layers"), self._extra.get("tensor_split") or ())

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
        launch, told = super().placed(launch, place), {"n_gpu_layers": layers}
        split = tensor_split_of(place)
        settings: dict[str, Any] = told | ({"tensor_split": split} if split else {})
        words = [f"{name}={msgspec.json.encode(value).decode()}" for name, value in settings.items()]
        added = [word for word in words if word.partition("=")[0] not in self._extra]
        return msgspec.structs.replace(launch, argv=(*launch.argv, *(one for word in added for one in ("--set", word))))

    def metrics(self, samples: Samples) -> Metrics | None:
        return llama_cpp_metrics(samples, self._slots)

    @property
    def slots(self) -> int | None:
        return self._slots


def layer_demand(gpu_layers: object, split: str | Sequence[float]) -> EngineDemand:
    """The demand of a number of GPU layers and a tensor split. -1, or more layers than any model has, means all."""
    told = gpu_layers if isinstance(gpu_layers, int) else None
    layers = ALL_LAYERS if told is not None and told < 0 else told
    shares = split_shares(split) if split else ()
    return EngineDemand(gpu_layers=layers, stage_shares=tuple(share for share in shares if share))


def tensor_split_of(place: Place) -> list[int]:
    """Shares with which llama.cpp puts as many layers on each GPU as the place says; empty for one GPU.

    If all layers are on GPUs, llama.cpp counts the output as one more layer, which is on the last GPU.
    """
    *others, last = place.stage_layers or (0,)
    return [*others, last + (place.gpu_layers is None)] if others else []


def llama_cpp_metrics(samples: Samples, slots: int | None) -> Metrics | None:
    """Metrics of llama.cpp. It has no gauge for its KV cache, so the share of busy slots is used instead."""
    running = samples.value("llamacpp:requests_processing")
    waiting = samples.value("llamacpp:requests_deferred")
    if running is None or waiting is None:
        return None
    return Metrics(waiting, running, min(running / slots, 1.0) if slots else 0.0)
