"""The applications on Ray Serve: `python ray_apps.py APP PORT FOLDER`, with the Python of Ray's environment.

A separate program: it needs Ray and numpy, and nothing of this project. Serves until SIGTERM, then ends all of Ray.
"""

import signal
import sys
import time
from importlib import import_module
from typing import Any

import numpy as np

ray: Any = import_module("ray")
serve: Any = import_module("ray.serve")

AT_ONCE = 100
"""The default of 5 requests per replica makes waiting requests back off: with more clients, 5 to 10 times slower."""
deployment = serve.deployment(max_ongoing_requests=AT_ONCE)


@deployment
class Model:
    """Multiplies."""

    def __init__(self, val: int) -> None:
        self.val = val

    async def forward(self, value: int) -> int:
        return self.val * value


@deployment
class Ensemble:
    """Adds up."""

    async def __call__(self, a: int, b: int, c: int) -> int:
        return a + b + c


@deployment
class Diamond:
    """The ingress: both models at once, then the ensemble."""

    def __init__(self, m1: Any, m2: Any, ensemble: Any) -> None:
        self.m1, self.m2, self.ensemble = m1, m2, ensemble

    async def __call__(self, request: Any) -> int:
        a, b, c = await request.json()
        # Responses handed on as they are: a quarter faster at one client than to await both here first.
        total: int = await self.ensemble.remote(self.m1.forward.remote(a), self.m2.forward.remote(b), c)
        return total


@deployment
class Make:
    """Makes a large array."""

    async def __call__(self, count: int, value: float) -> dict[str, Any]:
        array = np.full(count, value)
        return {"made": time.monotonic(), "array": array}


@deployment
class Total:
    """Sums it up, and returns how long it took to arrive."""

    async def __call__(self, sent: dict[str, Any]) -> dict[str, float]:
        arrived = time.monotonic()
        total = float(sent["array"].sum())
        return {"handed_s": arrived - sent["made"], "read_s": time.monotonic() - sent["made"], "sum": total}


@deployment
class Chain:
    """The ingress: the array goes from replica to replica through Ray's object store, not through here."""

    def __init__(self, make: Any, total: Any) -> None:
        self.make, self.total = make, total

    async def __call__(self, request: Any) -> dict[str, float]:
        count, value = await request.json()
        found: dict[str, float] = await self.total.remote(self.make.remote(count, value))
        return found


def application(name: str) -> Any:
    model: Any = Model
    if name == "diamond":
        models = (model.options(name=f"m{val}").bind(val) for val in (1, 2))
        return bound(Diamond, *models, bound(Ensemble))
    return bound(Chain, bound(Make), bound(Total))


def bound(body: Any, *args: Any) -> Any:
    """Type checkers do not know that the decorator changes the class."""
    return body.bind(*args)


def main() -> None:
    name, port, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    ray.init(
        _node_ip_address="127.0.0.1",  # else it looks for an address that others can reach, and waits for it
        num_cpus=16,  # every replica asks for one; they share those that there are
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application(name), name=name, route_prefix=f"/{name}")
        signal.pause()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ray.shutdown()  # not Serve first: with HAProxy that waits for half a minute


if __name__ == "__main__":
    main()
