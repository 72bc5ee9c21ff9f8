"""vLLM: `vllm serve`, or its module with a given Python."""

from collections.abc import Mapping, Sequence

from pointsman.engines.base import BYTECODE, DEFAULT_CONCURRENCY, Engine, LaunchSpec, WeightFiles, whole_option
from pointsman.engines.prometheus import Samples, share, whole
from pointsman.errors import ConfigError
from pointsman.parameters import Count, FileOrName
from pointsman.placement.asks import EngineAbility, Place
from pointsman.routing.endpoints import Metrics


class Vllm(Engine):
    """The OpenAI server of vLLM."""

    name = "vllm"
    serves_messages = True
    key_variable = "VLLM_API_KEY"
    ability = EngineAbility(name="vllm")

    def __init__(
        self,
        model: FileOrName,
        *,
        args: Sequence[str] = (),
        executable: str = "",
        python: str = "",
        tensor_parallel_size: Count = 1,
        max_num_seqs: Count | None = None,
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
        self._tensor_parallel_size = tensor_parallel_size
        self._max_num_seqs = max_num_seqs
        self._env = dict(env or {})
        self.longest_answer = whole_option(self._args, "--max-model-len")
        self.work = "embeddings" if embeddings else "completions"
        self.weights = WeightFiles(path=model, estimated_as="vllm", concurrency=max_num_seqs or DEFAULT_CONCURRENCY)

    @classmethod
    def of_endpoint(cls) -> Engine:
        return cls("")

    def launch(self, model: str, host: str, port: int) -> LaunchSpec:
        argv = [*self._start, "--served-model-name", model, "--host", host, "--port", str(port)]
        if self._tensor_parallel_size > 1:
            argv += ["--tensor-parallel-size", str(self._tensor_parallel_size)]
        if self._max_num_seqs is not None:
            argv += ["--max-num-seqs", str(self._max_num_seqs)]
        return LaunchSpec((*argv, *self._args), {**BYTECODE, **self._env})

    def placed(self, launch: LaunchSpec, place: Place) -> LaunchSpec:
        share = place.largest_gpu_share  # its default is 90 % of the GPU, whatever it needs
        return self._with_options(
            super().placed(launch, place),
            tensor_parallel_size=place.tensor_parallel_size if place.tensor_parallel_size > 1 else None,
            pipeline_parallel_size=place.pipeline_parallel_size if place.pipeline_parallel_size > 1 else None,
            gpu_memory_utilization=None if share is None else f"{share:.3f}",
            max_model_len=place.context or None,
        )

    def metrics(self, samples: Samples) -> Metrics | None:
        return vllm_metrics(samples)

    @property
    def slots(self) -> int | None:
        return self._max_num_seqs


def vllm_metrics(samples: Samples) -> Metrics | None:
    """Metrics of vLLM. Several engines behind one address (data parallel) are read as one."""
    running = samples.value("vllm:num_requests_running")
    waiting = samples.value("vllm:num_requests_waiting")
    if running is None or waiting is None:
        return None
    usage = samples.mean("vllm:kv_cache_usage_perc")
    if usage is None:
        usage = samples.mean("vllm:gpu_cache_usage_perc")  # its name until 0.10
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


def _names(listed: str) -> frozenset[str]:
    return frozenset(name.strip() for name in listed.split(",") if name.strip())
