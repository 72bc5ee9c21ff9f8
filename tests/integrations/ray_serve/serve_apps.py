"""Applications and policies for the tests: imported by Serve's own processes, too."""

import asyncio
import time
from typing import Any, cast

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig

from pointsman.integrations.ray_serve import pointsman_routing
from pointsman.strategies import SchedulingPolicy
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision

SMALL = {"num_cpus": 0.1}


@ray.remote(num_cpus=0)
class Gate:
    """Lets requests through once it is open, and knows in which order they came."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Event] = {}
        self._came: dict[str, list[str]] = {}

    async def pass_through(self, gate: str, who: str) -> None:
        self._came.setdefault(gate, []).append(who)
        await self._open.setdefault(gate, asyncio.Event()).wait()

    async def open(self, gate: str) -> None:
        self._open.setdefault(gate, asyncio.Event()).set()

    async def came(self, gate: str) -> list[str]:
        return self._came.get(gate, [])


def gate() -> Any:
    actor: Any = Gate
    return actor.options(name="gate", namespace="tests", get_if_exists=True, lifetime="detached").remote()


@serve.deployment(max_ongoing_requests=1, ray_actor_options=SMALL)
class Gated:
    """Answers one request at a time, once the gate of its name is open."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._gate = gate()

    async def __call__(self, request: Any) -> str:
        await self._gate.pass_through.remote(self._name, request.headers["x-request-id"])
        return self._name


@serve.deployment(num_replicas=2, max_ongoing_requests=8, ray_actor_options=SMALL)
class Named:
    """Answers with the id of its replica."""

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self._me, self._reports = str(context.replica_id.unique_id), context.deployment == "affine"

    async def __call__(self, *args: Any, **kwargs: Any) -> str:
        return self._me

    @serve.multiplexed(max_num_models_per_replica=4)  # type: ignore[untyped-decorator]
    async def model(self, name: str) -> str:
        return name

    async def infer(self, what: str) -> str:
        await self.model(serve.get_multiplexed_model_id())
        return self._me

    def record_routing_stats(self) -> dict[str, float]:
        """Once there are two, the replica with the smaller id says that its cache is full."""
        if not self._reports:
            return {}
        ids = ray.get(board().ids.remote(self._me))
        return {"kv_cache_usage": 0.9 if len(ids) == 2 and min(ids) == self._me else 0.1}


@serve.deployment(num_replicas=2, max_ongoing_requests=4, ray_actor_options=SMALL)
class Held:
    """Answers with the id of its replica, once the gate is open."""

    def __init__(self, gate_name: str) -> None:
        self._name, self._gate = gate_name, gate()
        self._me = str(serve.get_replica_context().replica_id.unique_id)

    async def __call__(self, prompt: str) -> str:
        await self._gate.pass_through.remote(self._name, self._me)
        return self._me


@ray.remote(num_cpus=0)
class Board:
    def __init__(self) -> None:
        self._ids: set[str] = set()

    def ids(self, mine: str = "") -> set[str]:
        self._ids |= {mine} - {""}
        return self._ids


def board() -> Any:
    actor: Any = Board
    return actor.options(name="board", namespace="tests", get_if_exists=True, lifetime="detached").remote()


class Raises(SchedulingPolicy):
    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        raise ZeroDivisionError("of the policy")


class Sleeps(SchedulingPolicy):
    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        time.sleep(3600)
        return []


class Empty(SchedulingPolicy):
    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        return []


HERE = "tests.integrations.ray_serve.serve_apps"
BROKEN = {name: f"{HERE}:{name.title()}" for name in ("raises", "sleeps", "empty")}

AFFINE: dict[str, Any] = {
    "plugins": [
        {"type": "session-affinity-scorer"},
        {"type": "prefix-cache-scorer"},
        {"type": "kv-cache-utilization-scorer"},
    ],
    "schedulingProfiles": [
        {
            "name": "default",
            "plugins": [
                {"pluginRef": "session-affinity-scorer", "weight": 4},
                {"pluginRef": "prefix-cache-scorer", "weight": 2},
                {"pluginRef": "kv-cache-utilization-scorer"},
            ],
        }
    ],
}


@serve.deployment(ray_actor_options=SMALL)
class Front:
    """An ingress, so that all deployments are one application."""

    def __init__(self, *behind: Any) -> None:
        self._behind = dict(zip([*BROKEN, "affine"], behind, strict=True))

    async def __call__(self, request: Any) -> list[str]:
        name, count = request.query_params["of"], int(request.query_params["count"])
        return list(await asyncio.gather(*(self._behind[name].remote(number) for number in range(count))))


def zoo() -> Any:
    """A deployment for each policy, behind one ingress."""
    named, front = cast(Any, Named), cast(Any, Front)
    broken = [
        named.options(name=name, num_replicas=1, request_router_config=pointsman_routing(policy)).bind()
        for name, policy in BROKEN.items()
    ]
    routing = pointsman_routing(config=AFFINE, stats_period_s=0.5)
    return front.bind(*broken, named.options(name="affine", request_router_config=routing).bind())


# Scaling


def raises(view: Any) -> int:
    raise ZeroDivisionError("of the scaling policy")


def empty(view: Any) -> Any:
    """Returns no number."""


def sleeps(view: Any) -> int:
    time.sleep(3600)
    return 3


@serve.deployment(max_ongoing_requests=1, ray_actor_options=SMALL)
class Working:
    """Takes 50 ms for each request, one at a time."""

    async def __call__(self, request: Any) -> str:
        await asyncio.sleep(0.05)
        return "done"


def scaled(scaling: Any) -> Any:
    """With this scaling policy, from 1 to 3 replicas."""
    config = AutoscalingConfig(
        min_replicas=1,
        max_replicas=3,
        initial_replicas=1,
        upscale_delay_s=0,
        downscale_delay_s=600,
        metrics_interval_s=0.5,
        look_back_period_s=1,
        policy=scaling,
    )
    working: Any = Working
    return working.options(autoscaling_config=config, request_router_config=pointsman_routing()).bind()
