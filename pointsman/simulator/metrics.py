"""The metrics of the server, with vLLM's names and format."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from pointsman.simulator.performance import Pace

FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
WHOLE_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


class SimulatedHistogram:
    """Counts values by upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        yield f"# TYPE {name} histogram"
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}.0'
        yield f"{name}_count{{{labels}}} {total}.0"
        yield f"{name}_sum{{{labels}}} {self._sum!r}"


class SimulatedCounters:
    """Counters since the start of the server."""

    def __init__(self) -> None:
        self.requests = 0
        """For work: chat, completions, embeddings."""
        self.ended = {"stop": 0, "length": 0, "abort": 0}
        """abort: the client disconnected before the end."""
        self.prompt_tokens = 0
        self.written_tokens = 0
        self.faults: dict[str, int] = {}
        """How often each has struck."""
        self.first_token = SimulatedHistogram(FIRST_TOKEN_S)
        self.between_tokens = SimulatedHistogram(BETWEEN_TOKENS_S)
        self.whole = SimulatedHistogram(WHOLE_S)


def metrics_text(model: str, pace: Pace, counters: SimulatedCounters, block_size: int, blocks: int) -> str:
    """The body of /metrics."""
    escaped = model.replace("\\", "\\\\").replace('"', '\\"')
    labels = f'engine="0",model_name="{escaped}"'
    gauges = {
        "num_requests_running": pace.running,
        "num_requests_waiting": pace.waiting,
        "kv_cache_usage_perc": pace.kv_usage,
    }
    totals = {
        "prefix_cache_queries_total": pace.counts.prefix_queries,
        "prefix_cache_hits_total": pace.counts.prefix_hits,
        "num_preemptions_total": pace.counts.preemptions,
        "prompt_tokens_total": counters.prompt_tokens,
        "generation_tokens_total": counters.written_tokens,
    }
    lines: list[str] = []
    for kind, values in (("gauge", gauges), ("counter", totals)):
        for name, value in values.items():
            lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{labels}}} {float(value)!r}"]
    lines.append("# TYPE vllm:request_success_total counter")
    lines += [
        f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {float(count)}'
        for reason, count in counters.ended.items()
    ]
    lines += counters.first_token.lines("vllm:time_to_first_token_seconds", labels)
    lines += counters.between_tokens.lines("vllm:inter_token_latency_seconds", labels)
    lines += counters.whole.lines("vllm:e2e_request_latency_seconds", labels)
    lines.append("# TYPE vllm:cache_config_info gauge")
    lines.append(f'vllm:cache_config_info{{block_size="{block_size}",engine="0",num_gpu_blocks="{blocks}"}} 1.0')
    return "\n".join(lines) + "\n"
