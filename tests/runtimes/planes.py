"""A manager on a manual clock, and short ways to call it."""

from typing import Any

from pointsman.routing.events import Outcome
from pointsman.runtimes.inprocess import ControlPlaneManager
from pointsman.strategies import SchedulingPolicy
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Plane:
    """A manager, its clock, and short ways to call it."""

    def __init__(self, policy: SchedulingPolicy | str = "fifo", *instances: ExecutionInstance, **settings: Any) -> None:
        self.clock = Clock()
        self.manager = ControlPlaneManager(policy, clock=self.clock, **settings)
        for one in instances:
            self.manager.register_instance(one)

    def submit(self, *names: str, **facts: Any) -> list[tuple[str, str]]:
        return sent(self.manager.submit(*(request(name, **facts) for name in names)))

    def refused(self) -> list[tuple[str, Outcome]]:
        return [(who.request_id, refusal.outcome) for who, refusal in self.manager.refusals()]

    def waiting(self) -> list[str]:
        return [unplaced.request.request_id for unplaced in self.manager.pending()]


def instance(name: str, limit: int | None = 1, **facts: Any) -> ExecutionInstance:
    told: dict[str, Any] = {"instance_id": name, "max_concurrency": limit, "model_name": "m"} | facts
    return ExecutionInstance(**told)


def request(name: str, **facts: Any) -> RequestMetadata:
    told: dict[str, Any] = {"request_id": name, "prompt": "hello", "model_name": "m"} | facts
    return RequestMetadata(**told)


def sent(decisions: list[SchedulingDecision]) -> list[tuple[str, str]]:
    return [(made.request_id, made.target_instance_id) for made in decisions]
