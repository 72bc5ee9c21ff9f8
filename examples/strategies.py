"""Schedules one batch on a made-up fleet with each strategy, and prints the decisions and their reasons.

python examples/strategies.py
"""

from pointsman.render.text import text_table
from pointsman.strategies import (
    AdaptivePolicy,
    CostOptimizedPolicy,
    FIFOPolicy,
    PriorityPolicy,
    SLOAwarePolicy,
    Strategy,
)
from pointsman.types import ExecutionInstance, RequestMetadata, RequestPriority

MODEL = "llama-70b"

FLEET = [
    ExecutionInstance(
        instance_id="h100-a",
        model_name=MODEL,
        gpu_count=8,
        tensor_parallel_size=8,
        max_concurrency=4,
        current_load=3,
        avg_latency_ms=350,
        throughput_tokens_per_sec=3200,
    ),
    ExecutionInstance(
        instance_id="a100-b",
        model_name=MODEL,
        gpu_count=4,
        tensor_parallel_size=4,
        max_concurrency=4,
        avg_latency_ms=900,
        throughput_tokens_per_sec=1300,
    ),
    ExecutionInstance(
        instance_id="l40s-c",
        model_name=MODEL,
        gpu_count=2,
        tensor_parallel_size=2,
        max_concurrency=2,
        avg_latency_ms=2600,
        throughput_tokens_per_sec=900,
        price_per_gpu_hour=1.1,
    ),
    ExecutionInstance(instance_id="new-d", model_name=MODEL, gpu_count=4, max_concurrency=1),
    ExecutionInstance(instance_id="sick-e", model_name=MODEL, can_accept_request=False),
    ExecutionInstance(instance_id="small-f", model_name="llama-8b", max_concurrency=32),
]

BATCH = [
    RequestMetadata("report", "Summarise the quarter.", 800, MODEL, RequestPriority.BACKGROUND, arrival_time=0.0),
    RequestMetadata("chat-1", "Hello!", 100, MODEL, slo_deadline_ms=1500, arrival_time=0.1),
    RequestMetadata("chat-2", "And you?", 100, MODEL, slo_deadline_ms=400, arrival_time=0.2),
    RequestMetadata("pager", "Is the site down?", 50, MODEL, RequestPriority.CRITICAL, arrival_time=0.3),
    RequestMetadata("thrifty", "A haiku, please.", 60, MODEL, cost_budget=0.0001, arrival_time=0.4),
    *(RequestMetadata(f"bulk-{n}", "Translate.", 200, MODEL, RequestPriority.LOW, arrival_time=0.5) for n in range(4)),
]

STRATEGIES: list[Strategy] = [
    FIFOPolicy(),
    PriorityPolicy(),
    SLOAwarePolicy(),
    CostOptimizedPolicy(price_per_gpu_hour=2.5),
    AdaptivePolicy(),
]


def main() -> None:
    for strategy in STRATEGIES:
        decisions = strategy.schedule(BATCH, FLEET)
        rows = [
            [
                decision.request_id,
                decision.target_instance_id,
                "?" if decision.estimated_latency_ms is None else f"{decision.estimated_latency_ms:.0f}",
                "?" if decision.estimated_cost is None else f"{decision.estimated_cost:.6f}",
                str(decision.reason),
            ]
            for decision in decisions
        ]
        print(f"\n{strategy.name}")
        print(text_table(["request", "instance", "about ms", "cost", "why"], rows))
        for unplaced in strategy.unplaced:
            print(f"{unplaced.request.request_id} waits: {unplaced.why}")
    print("\nWhy no instance takes the last of them:")
    for instance, why in STRATEGIES[0].unplaced[-1].reasons().items():
        print(f"  {instance}: {why}")


if __name__ == "__main__":
    main()
