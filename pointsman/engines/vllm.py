"""vLLM: `vllm serve`, or its module with a given Python."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from pointsman.engines.base import BYTECODE, DEFAULT_CONCURRENCY, Engine, LaunchSpec, WeightFiles
from pointsman.engines.options import Options
from pointsman.engines.prometheus import Samples, share, whole
from pointsman.errors import ConfigError
from pointsman.parameters import Amount, Count, FileOrName, Share
from pointsman.placement.asks import EngineAbility, EngineDemand, Place
from pointsman.routing.endpoints import Metrics

PARTITION = "VLLM_PP_LAYER_PARTITION"
"""The environment variable with the number of layers in each pipeline stage."""
SHORT = MappingProxyType(
    {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size", "-q": "quantization"}
)
GIB = 1 << 30


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of vLLM that placement needs. Each comes from a parameter or from an option."""

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    swap_space: float | None = None
    kv_offloading_size: float | None = None
    draft: str = ""

    @classmethod
    def read(cls, options: Options, **given: Any) -> "VllmSettings":
        """The settings from options and parameters. Raises ConfigError if a parameter and an option differ."""
        kinds = {field.name: field.type for field in msgspec.structs.fields(cls) if field.name != "draft"}
        settled = {name: options.agreed(name, given.get(name), name.replace("_", "-")) for name in kinds}
        speculative = options.json("speculative-config")
        draft = speculative.get("model") or options.text("speculative-model") or ""
        unread = [name for name, value in settled.items() if not _is_of(value, kinds[name])]
        settled |= dict.fromkeys(unread)  # such as --max-model-len auto: vLLM decides these values
        return cls(**settled, draft=draft if isinstance(draft, str) else "")

    def demand(self, stage_layers: tuple[int, ...] = ()) -> EngineDemand:
        return EngineDemand(
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            data_parallel_size=self.data_parallel_size or 1,
            stage_layers=stage_layers,
            gpu_utilization=self.gpu_memory_utilization,
            host_bytes=int((self.kv_offloading_size or 0.0) * GIB),
            host_bytes_per_gpu=int((self.swap_space or 0.0) * GIB),
        )

    def weights(self, model: str) -> WeightFiles:
        return WeightFiles(
            path=model,
            estimated_as="vllm",
            context=self.max_model_len,
            concurrency=self.max_num_seqs or DEFAULT_CONCURRENCY,
            kv_dtype=self.kv_cache_dtype or "auto",
            batch_tokens=self.max_num_batched_tokens,
            max_sequences=self.max_num_seqs,
            quantization=self.quantization or "",
            draft=self.draft,
        )


def _is_of(value: Any, kind: Any) -> bool:
    if value is None:
        return True
    if kind == int | None:
        return isinstance(value, int) and value > 0
    return isinstance(value, int | float) and value >= 0 if kind == float | None else isinstance(value, str)


class Vllm(Engine):
    """The OpenAI server of vLLM."""

    name = "vllm"
    serves_messages = True
    key_variable = "VLLM_API_KEY"
    ability = EngineAbility(name="vllm")
    short_options = SHORT

    def __init__(
        self,
        model: FileOrName,
        *,
        args: Sequence[str] = (),
        executable: str = "",
        python: str = "",
        tensor_parallel_size: Count | None = None,
        pipeline_parallel_size: Count | None = None,
        data_parallel_size: Count | None = None,
        gpu_memory_utilization: Share | None = None,
        max_model_len: Count | None = None,
        max_num_seqs: Count | None = None,
        max_num_batched_tokens: Count | None = None,
        kv_cache_dtype: str | None = None,
        quantization: str | None = None,
        swap_space: Amount | None = None,
        embeddings: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if executable and python:
            raise ConfigError(["write executable (started as EXECUTABLE serve) or python (its module), not both"])
        module = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", model)
        self._start = module if python else (executable or "vllm", "serve", model)
        pip = f"{python} -m pip" if python else "pip"
        self.remedy = f"run: {pip} install vllm; or set executable or python of the engine to one that has it"
        self._args = tuple(args)
        self._given = {
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "data_parallel_size": data_parallel_size,
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "kv_cache_dtype": kv_cache_dtype,
            "quantization": quantization,
            "swap_space": swap_space,
        }
        self._env = dict(env or {})
        settings = VllmSettings.read(Options(self._args, SHORT), **self._given)
        self._max_num_seqs = settings.max_num_seqs
        self.longest_answer = settings.max_model_len
        self.work = "embeddings" if embeddings else "completions"
        self.weights = settings.weights(model)
        self.demand = settings.demand(_partition(self._env.get(PARTITION, "")))

    @classmethod
    def of_endpoint(cls) -> Engine:
        return cls("")

    def launch(self, model: str, host: str, port: int) -> LaunchSpec:
        argv = [*self._start, "--served-model-name", model, "--host", host, "--port", str(port)]
        given = self._words_of(self._given, self._args)
        return LaunchSpec((*argv, *given, *self._args), {**BYTECODE, **self._env})

    def placed(self, launch: LaunchSpec, place: Place) -> LaunchSpec:
        share = place.largest_gpu_share  # vLLM's default is 90 % of the GPU, whatever the model needs
        launch = self._with_options(
            super().placed(launch, place),
            tensor_parallel_size=place.tensor_parallel_size if place.tensor_parallel_size > 1 else None,
            pipeline_parallel_size=place.pipeline_parallel_size if place.pipeline_parallel_size > 1 else None,
            gpu_memory_utilization=None if share is None else f"{share:.3f}",
            max_model_len=place.context or None,
        )
        if len(set(place.stage_layers)) < 2:
            return launch
        layers = ",".join(map(str, place.stage_layers))  # by default vLLM divides the layers evenly
        return msgspec.structs.replace(launch, env={PARTITION: layers, **launch.env})

    def metrics(self, samples: Samples) -> Metrics | None:
        return vllm_metrics(samples)

    @property
    def slots(self) -> int | None:
        return self._max_num_seqs


def vllm_metrics(samples: Samples) -> Metrics | None:
    """Metrics of vLLM. If one address serves several engines (data parallel), they are read as one engine."""
    running = samples.value("vllm:num_requests_running")
    waiting = samples.value("vllm:num_requests_waiting")
    if running is None or waiting is None:
        return None
    usage = samples.mean("vllm:kv_cache_usage_perc")
    if usage is None:
        usage = samples.mean("vllm:gpu_cache_usage_perc")  # the name of this gauge until 0.10
    lora = samples.newest_labels("vllm:lora_requests_info")
    caches = samples.labels("vllm:cache_config_info")
    return Metrics(
        waiting_queue_size=waiting,
        running_requests_size=running,
        kv_cache_usage=share(usage),
        active_models=_names(lora.get("running_lora_adapters", "")),
        waiting_models=_names(lora.get("waiting_lora_adapters", "")),
        max_active_models=whole(lora.get("max_lora")),
        block_size=whole(caches[0].get("block_size")) if caches else 0,
        num_blocks=sum(whole(cache.get("num_gpu_blocks")) for cache in caches),
    )


def _partition(written: str) -> tuple[int, ...]:
    words = [word.strip() for word in written.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError([f"{PARTITION} lists the layers of each stage, such as 20,12; found {written}"])
    return tuple(map(int, words))


def _names(listed: str) -> frozenset[str]:
    return frozenset(name.strip() for name in listed.split(",") if name.strip())
