"""The simulated model server (`pointsman.simulator`)."""

import sys
from typing import Annotated, Literal

import msgspec

from pointsman.engines.base import BYTECODE, Engine, LaunchSpec
from pointsman.engines.prometheus import Samples
from pointsman.engines.vllm import vllm_metrics
from pointsman.errors import ConfigError
from pointsman.parameters import Above0, Amount, Count, Parameters
from pointsman.routing.endpoints import Metrics

MeasuredHardware = Literal[
    "8B|h100_sxm|vllm|tp1", "8B|a100_sxm|vllm|tp1", "8B|l40s|vllm|tp1", "8B|h200_sxm|vllm|tp1",
    "70B|h100_sxm|vllm|tp4", "70B|h100_sxm|vllm|tp8", "70B|a100_sxm|vllm|tp4", "70B|a100_sxm|vllm|tp8",
    "Qwen3-32B|h100_sxm|vllm|tp2", "Qwen3-32B|h200_sxm|vllm|tp2", "Qwen3-8B|h100_sxm|vllm|tp1",
    "Qwen3-8B|a100_sxm|vllm|tp1", "8B|l4|roofline|tp1",
]  # fmt: skip
"""Names of measured hardware: model|accelerator|engine|tensor parallel size."""
Fault = Literal[
    "hang", "reset", "cut", "end", "garbage", "drip", "crash",
    "status", "garbage-body", "short-body", "long-body", "slow-headers", "slow-tokens", "stale",
    "refuse",
]  # fmt: skip
MID_RESPONSE = ("hang", "reset", "cut", "end", "garbage", "drip", "crash")
"""Faults that can happen in the middle of a response."""


class FaultSpec(Parameters, frozen=True, omit_defaults=True):
    """A fault, which requests it affects, and when; without count, probability or seconds: always."""

    fault: Fault
    on: Literal["work", "health", "metrics", "models", "all"] = "work"
    count: Count | None = None
    probability: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    seconds: Amount | None = None
    after_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    delay_ms: Amount | None = None
    status: Annotated[int, msgspec.Meta(ge=100, le=599)] | None = None
    retry_after: Annotated[int, msgspec.Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        if self.after_tokens is not None and self.fault not in MID_RESPONSE:
            raise ValueError(f"{self.fault} cannot happen after tokens; these can: {', '.join(MID_RESPONSE)}")
        if self.fault == "refuse" and (self.on != "work" or self.count is not None or self.probability is not None):
            raise ValueError("refuse affects the whole server; its only parameter is seconds")


class Simulated(Engine):
    """Emits made-up tokens at the pace of measured hardware, and fails on demand."""

    name = "simulated"

    def __init__(
        self,
        *,
        hardware: MeasuredHardware = "8B|h100_sxm|vllm|tp1",
        time_scale: Above0 = 1.0,
        tokens_per_second: Above0 | None = None,
        first_token_ms: Amount | None = None,
        max_num_seqs: Count = 256,
        max_num_batched_tokens: Count = 8192,
        block_size: Count = 16,
        kv_tokens: Count | None = None,
        context_tokens: Count = 32_768,
        output_tokens: Count = 128,
        start_seconds: Amount = 0.0,
        seed: int = 0,
        faults: list[FaultSpec] | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError([f"maxNumBatchedTokens must be at least maxNumSeqs, which is {max_num_seqs}"])
        self._options = {
            "--hardware": hardware,
            "--time-scale": time_scale,
            "--tokens-per-second": tokens_per_second,
            "--first-token-ms": first_token_ms,
            "--max-num-seqs": max_num_seqs,
            "--max-num-batched-tokens": max_num_batched_tokens,
            "--block-size": block_size,
            "--kv-tokens": kv_tokens,
            "--context-tokens": context_tokens,
            "--output-tokens": output_tokens,
            "--start-seconds": start_seconds,
            "--seed": seed,
        }
        self._faults = list(faults or ())
        self._slots = max_num_seqs
        self.longest_answer = min(output_tokens, context_tokens)

    def launch(self, model: str, host: str, port: int) -> LaunchSpec:
        argv = [sys.executable, "-P", "-m", "pointsman.simulator"]
        argv += ["--model", model, "--host", host, "--port", str(port)]
        for option, value in self._options.items():
            if value is not None:
                argv += [option, str(value)]
        for fault in self._faults:
            argv += ["--fault", msgspec.json.encode(fault).decode()]
        return LaunchSpec(tuple(argv), dict(BYTECODE))

    def metrics(self, samples: Samples) -> Metrics | None:
        return vllm_metrics(samples)

    @property
    def slots(self) -> int | None:
        return self._slots
