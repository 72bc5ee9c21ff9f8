"""What candidates cost: CPU per request of a dispatcher with and without them, in turns.

    python -m bench.shadow

A request is its arrival, first token and end, on eight instances with the default policy and prompts of 8 KB that share
half. Candidates run where a gateway lets them: after each request. The ratio is the median over
turns, each against the turn without candidates beside it; times are of this machine.
"""

import argparse
import time
from collections.abc import Callable
from operator import truediv
from statistics import median
from typing import Any

from pointsman.config import load_manifest
from pointsman.config.plan import DeploymentPlan
from pointsman.routing.canary import Watcher
from pointsman.routing.candidates import STALL, CandidatePolicy
from pointsman.routing.dispatcher import Dispatcher, watch
from pointsman.routing.events import Arrived, Ended, FirstToken, Joined
from pointsman.routing.shadow import Shadow
from pointsman.routing.user_code import Containment
from pointsman.runtimes.policy_runner import Watchdog
from pointsman.types import ExecutionInstance, RequestMetadata

MANIFEST = """
kind: Pointsman
deployments:
- name: chat
  model: m
  endpoints: [{{url: "http://127.0.0.1:1"}}]
  scheduling:
    config: {config}
    shadow: {shadow}
    shadowBudget: {budget}
"""
DEFAULT = "{}"
LOADED = (
    "{plugins: [{type: queue-scorer}], schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}]}]}"
)
CASES = {
    "none": ("[]", 0.1),
    "1 candidate, budget 10 %": ("[fifo]", 0.1),
    "3 candidates, budget 10 %": (f"[fifo, slo-aware, {{name: queue, config: {LOADED}}}]", 0.1),
    "1 candidate, budget 100 %": ("[fifo]", 1.0),
}


class Soon:
    """`ShadowClock`: calls are made after each request."""

    def __init__(self) -> None:
        self.due: list[Callable[..., None]] = []
        self.now = time.monotonic

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self.due.append(call)


class Subject:
    """A dispatcher with some candidates."""

    def __init__(self, plan: DeploymentPlan) -> None:
        self.clock = Soon()
        self.dispatcher = Dispatcher(plan.dispatch_plan())
        for number in range(8):
            instance = ExecutionInstance(instance_id=f"i{number}", max_concurrency=64)
            self.dispatcher.handle(Joined(instance), time.monotonic())
        self.shadow: Shadow | None = None
        if plan.shadow:
            made = []
            for one in plan.shadow:
                guard = Containment(Watchdog(time.monotonic), plan.time_limit_s, STALL)
                guard.contain(one.scheduling_code)
                made.append(CandidatePolicy(one.name, one.dispatch_plan(), time.perf_counter, time.monotonic, guard))
            self.shadow = Shadow(made, plan.shadow_budget, time.perf_counter, self.clock)
            watch(self.dispatcher, Watcher(self.shadow))
        self.count = 0

    def run(self, requests: int) -> float:
        """CPU microseconds per request."""
        handle, due, shared = self.dispatcher.handle, self.clock.due, b"system " * 585
        made = []
        for _ in range(requests):
            self.count += 1
            own = f"{self.count} ".encode() * 700
            made.append(RequestMetadata(f"r{self.count}", shared + own[:4096], arrival_time=time.monotonic()))
        began = time.process_time()
        for request in made:
            now = time.monotonic()
            handle(Arrived((request,)), now)
            handle(FirstToken(request.request_id), now + 0.02)
            handle(Ended(request.request_id, 20), now + 0.1)
            while due:
                due.pop(0)()
        return (time.process_time() - began) / requests * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300, help="of each turn")
    parser.add_argument("--turns", type=int, default=60)
    args = parser.parse_args()
    subjects = {
        name: Subject(load_manifest(MANIFEST.format(config=DEFAULT, shadow=shadow, budget=budget)).deployments[0])
        for name, (shadow, budget) in CASES.items()
    }
    figures: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(args.turns):
        for name, subject in subjects.items():
            figures[name].append(subject.run(args.requests))
    plain = figures["none"]
    ratios = {name: median(map(truediv, found, plain)) for name, found in figures.items()}
    best = {name: min(found) for name, found in figures.items()}
    print(f"{'candidates':28} {'us/request':>10} {'ratio':>7} {'sampled':>8} {'share of decision time':>23}")
    for name, subject in subjects.items():
        told = None if subject.shadow is None else subject.shadow.told().report()
        sampled = "-" if told is None else f"{told['sampled_share']:.1%}"
        share = "-" if told is None else f"{told['cpu_share']:.1%}"
        print(f"{name:28} {best[name]:10.1f} {ratios[name]:7.3f} {sampled:>8} {share:>23}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
