"""Deadlines decide on plain Ray Serve: which request goes next, and how many replicas there are.

    serve run examples.ray_serve.sla:app
    python -m examples.ray_serve.sla http://127.0.0.1:8000

The second command sends requests with and without deadlines, and prints how many were met, why one request went where
it did, and why Serve was scaled.
"""

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import Any
from urllib.request import Request, urlopen

from ray import serve
from ray.serve.config import AutoscalingConfig

from pointsman.integrations.ray_serve import explain, pointsman_routing, pointsman_scaling, status
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.scorers.speed import Fastest
from pointsman.scaling import DeploymentView, Wish
from pointsman.strategies import Rule, Strategy, rule
from pointsman.types import RequestMetadata

DEADLINE_MS = 150
"""One replica takes two requests at once, for 0.1 s each: four clients in a hurry need more than one."""


class LeastSlack(Strategy):
    """An SLA-driven scheduling policy: the request with the nearest deadline goes next, to the fastest replica."""

    def __init__(self) -> None:
        self._fastest = rule("fastest", Fastest())

    def order(self, request: RequestMetadata) -> float:
        deadline = request.deadline
        return float("inf") if deadline is None else deadline

    def rule_for(self, cycle: RequestCycle, endpoints: Endpoints) -> Rule:
        return self._fastest


def keep_deadlines(view: DeploymentView, target: float = 0.95) -> Wish:
    """An SLA-driven scaling policy: more replicas while deadlines are missed, in proportion to the load."""
    met = view.slo_attainment
    if met is None or met >= target or view.starting:
        return Wish(max(view.target, 1), "deadlines are met" if met is not None else "no deadlines yet")
    wanted = max(view.replicas + 1, ceil(view.load / 2))
    return Wish(wanted, f"{met:.0%} met their deadline, {target:.0%} wanted, {view.load:.0f} requests: {wanted}")


@serve.deployment(
    max_ongoing_requests=2,
    ray_actor_options={"num_cpus": 0.1},
    request_router_config=pointsman_routing(LeastSlack()),  # or pointsman_routing("slo-aware")
    autoscaling_config=AutoscalingConfig(
        min_replicas=1,
        max_replicas=3,
        upscale_delay_s=0,
        look_back_period_s=2,
        policy=pointsman_scaling(keep_deadlines),  # or pointsman_scaling("slo-attainment")
    ),
)
class Summary:
    """A model that takes 0.1 s."""

    async def __call__(self, request: Any) -> str:
        await asyncio.sleep(0.1)
        return "a summary"


def application() -> Any:
    summary: Any = Summary
    return summary.bind()


app = application()


def ask(url: str, name: str, deadline_ms: float | None = None) -> float:
    """How long a request took, in ms."""
    headers = {"x-request-id": name}
    if deadline_ms is not None:
        headers["x-pointsman-deadline-ms"] = str(deadline_ms)
    began = time.monotonic()
    with urlopen(Request(url, headers=headers), timeout=60) as answer:
        answer.read()
    return (time.monotonic() - began) * 1000


def load(url: str, rounds: int) -> tuple[int, int]:
    """(met, all) of the requests with a deadline; of eight clients, four send no deadline."""

    def client(number: int) -> tuple[int, int]:
        hurries = number % 2 == 0
        times = [ask(url, f"r-{number}-{turn}", DEADLINE_MS if hurries else None) for turn in range(rounds)]
        return (sum(one <= DEADLINE_MS for one in times), rounds) if hurries else (0, 0)

    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(client, range(8)))
    return sum(met for met, _ in counts), sum(every for _, every in counts)


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    for _ in range(3):
        met, every = load(url, 20)
        print(f"{met} of {every} requests met their deadline of {DEADLINE_MS} ms")
    print(explain("r-0-0"))
    for deployment, scaled in status()["scaled"].items():
        for record in scaled["records"]:
            print(f"{deployment}: {record['before']} -> {record['after']}: {record['why']}")


if __name__ == "__main__":
    main()
