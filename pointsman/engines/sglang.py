"""SGLang: `python -m sglang.launch_server`."""

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pointsman.engines.base import BYTECODE, DEFAULT_CONCURRENCY, Engine, LaunchSpec, WeightFiles
from pointsman.engines.options import Options
from pointsman.engines.prometheus import Samples, share, whole
from pointsman.parameters import Count, FileOrName, Share
from pointsman.placement.asks import EngineAbility, EngineDemand, Place
from pointsman.routing.endpoints import Metrics


class Sglang(Engine):
    """The OpenAI server of SGLang."""

    name = "sglang"
    ability = EngineAbility(name="sglang")
    short_options = MappingProxyType(
        {"tensor-parallel-size": "tp-size", "pipeline-parallel-size": "pp-size", "data-parallel-size": "dp-size"}
        | {"tp": "tp-size", "pp": "pp-size", "dp": "dp-size"}
    )

    def __init__(
        self,
        model: FileOrName,
        *,
        args: Sequence[str] = (),
        python: str = "",
        tensor_parallel_size: Count | None = None,
        pipeline_parallel_size: Count | None = None,
        data_parallel_size: Count | None = None,
        mem_fraction_static: Share | None = None,
        context_length: Count | None = None,
        kv_cache_dtype: str | None = None,
        quantization: str | None = None,
        max_running_requests: Count | None = None,
        embeddings: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._model = model
        self._args = tuple(args)
        self._python = python or sys.executable
        self.remedy = f"run: {self._python} -m pip install sglang; or set python of the engine to one that has it"
        self._given = {
            "tp_size": tensor_parallel_size,
            "pp_size": pipeline_parallel_size,
            "dp_size": data_parallel_size,
            "mem_fraction_static": mem_fraction_static,
            "context_length": context_length,
            "max_running_requests": max_running_requests,
            "kv_cache_dtype": kv_cache_dtype,
            "quantization": quantization,
        }
        options = Options(self._args, self.short_options)
        told = {name: options.agreed(name, value, name.replace("_", "-")) for name, value in self._given.items()}
        self._max_running_requests: int | None = told["max_running_requests"]
        self._env = dict(env or {})
        self.longest_answer = told["context_length"]
        self.work = "embeddings" if embeddings else "completions"
        self.weights = WeightFiles(
            path=model,
            estimated_as="vllm",
            context=told["context_length"],
            concurrency=self._max_running_requests or DEFAULT_CONCURRENCY,
            kv_dtype=told["kv_cache_dtype"] or "auto",
            max_sequences=self._max_running_requests,
            quantization=told["quantization"] or "",
            draft=options.text("speculative-draft-model-path") or "",
        )
        self.demand = EngineDemand(
            tensor_parallel_size=told["tp_size"],
            pipeline_parallel_size=told["pp_size"],
            data_parallel_size=1 if "enable-dp-attention" in options else told["dp_size"] or 1,
            gpu_utilization=told["mem_fraction_static"],
            host_bytes_per_gpu=int((options.number("hicache-size") or 0.0) * 10**9),
        )

    @classmethod
    def of_endpoint(cls) -> Engine:
        return cls("")

    def launch(self, model: str, host: str, port: int) -> LaunchSpec:
        argv = [self._python, "-m", "sglang.launch_server", "--model-path", self._model, "--served-model-name", model]
        argv += ["--host", host, "--port", str(port), "--enable-metrics"]
        argv += self._words_of(self._given, self._args)
        if self.work == "embeddings":
            argv += ["--is-embedding"]
        return LaunchSpec((*argv, *self._args), {**BYTECODE, **self._env})

    def placed(self, launch: LaunchSpec, place: Place) -> LaunchSpec:
        share = place.largest_gpu_share
        return self._with_options(
            super().placed(launch, place),
            tp_size=place.tensor_parallel_size if place.tensor_parallel_size > 1 else None,
            pp_size=place.pipeline_parallel_size if place.pipeline_parallel_size > 1 else None,
            mem_fraction_static=None if share is None else f"{share:.3f}",
            context_length=place.context or None,
        )

    def metrics(self, samples: Samples) -> Metrics | None:
        return sglang_metrics(samples)

    @property
    def slots(self) -> int | None:
        return self._max_running_requests


def sglang_metrics(samples: Samples) -> Metrics | None:
    running = samples.value("sglang:num_running_reqs")
    waiting = samples.value("sglang:num_queue_reqs")
    if running is None or waiting is None:
        return None
    # These values are gauges since 0.5.11, and labels in older versions.
    cache = next(iter(samples.labels("sglang:cache_config_info")), {})
    return Metrics(
        waiting_queue_size=waiting,
        running_requests_size=running,
        kv_cache_usage=share(samples.mean("sglang:token_usage")),
        block_size=int(samples.mean("sglang:page_size") or whole(cache.get("page_size"))),
        num_blocks=int(samples.value("sglang:num_pages") or whole(cache.get("num_pages"))),
    )
