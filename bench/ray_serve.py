"""`python -m bench.ray_serve`: `PointsmanRouter` against Serve's default router, in one run.

Deployments that differ only in their router answer over HTTP and through a handle, with 1, 8 and 32 clients. They take
short turns in many rounds, each round in another order, so that a machine that slows down favours none. A ratio is the
time per request with our router over that with Serve's, the median of the rounds; the target is at most 1.10. A second
deployment with Serve's router shows what chance does: its ratio would be 1.00.
"""

import argparse
import asyncio
import http.client
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, TypeAlias

from bench.gateway.processes import free_port

CLIENTS = (1, 8, 32)
TARGET = 1.10
SERVE, AGAIN = "serve", "serve-again"
Times: TypeAlias = dict[tuple[str, int, str], list[float]]
"""By way, number of clients and router: milliseconds per request, one value per round."""


def deployments() -> dict[str, Any]:
    from ray import serve

    from pointsman.integrations.ray_serve import pointsman_routing

    class Echo:
        async def __call__(self, given: Any = None) -> str:
            return "ok"

    def made(**options: Any) -> Any:
        """A limit above the number of clients: below it, Serve's requests back off instead of being woken."""
        return serve.deployment(Echo).options(
            num_replicas=2, max_ongoing_requests=100, ray_actor_options={"num_cpus": 0.1}, **options
        )

    return {
        SERVE: made().bind(),
        AGAIN: made().bind(),
        "power-of-two": made(request_router_config=pointsman_routing("power-of-two")).bind(),
        "slo-aware": made(request_router_config=pointsman_routing("slo-aware")).bind(),
    }


def over_http(port: int, path: str) -> Callable[[], Callable[[], None]]:
    def client() -> Callable[[], None]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

        def ask() -> None:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status

        return ask

    return client


def by_handle(handle: Any) -> Callable[[], Callable[[], None]]:
    def client() -> Callable[[], None]:
        def ask() -> None:
            assert handle.remote().result() == "ok"

        return ask

    return client


def per_request_ms(client: Callable[[], Callable[[], None]], clients: int, seconds: float) -> float:
    """Time per request and client."""
    end = time.monotonic() + seconds

    def run(ask: Callable[[], None]) -> int:
        count = 0
        while time.monotonic() < end:
            ask()
            count += 1
        return count

    with ThreadPoolExecutor(clients) as pool:
        done = sum(pool.map(run, [client() for _ in range(clients)]))
    return clients * seconds * 1000 / max(done, 1)


def measure(rounds: int, seconds: float, port: int) -> Times:
    from ray import serve

    handles = {
        name: serve.run(bound, name=name, route_prefix=f"/{name}", logging_config={"log_level": "WARNING"})
        for name, bound in deployments().items()
    }
    ways = {
        (how, name): over_http(port, f"/{name}") if how == "HTTP" else by_handle(handle)
        for name, handle in handles.items()
        for how in ("HTTP", "handle")
    }
    found: Times = {}
    for client in ways.values():
        per_request_ms(client, 8, 1.0)  # connections, imports and caches
    for number in range(rounds):
        for how in ("HTTP", "handle"):
            for clients in CLIENTS:
                names = list(handles)
                first = number % len(names)
                for name in names[first:] + names[:first]:
                    taken = per_request_ms(ways[how, name], clients, seconds)
                    found.setdefault((how, clients, name), []).append(taken)
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


def decision_us() -> float:
    """CPU time of our own part of a request, without Serve: reading it, choosing its replica, and its end."""
    from pointsman.integrations.ray_serve.lanes import Replica, ReplicaLane, RouterSettings
    from pointsman.types import RequestMetadata

    async def run(count: int = 3000) -> float:
        lane = ReplicaLane("bench", RouterSettings(policy="slo-aware"), asyncio.get_running_loop())
        lane.update([Replica(name=name, max_ongoing=100) for name in ("a", "b")])
        began = time.process_time()
        for number in range(count):
            request = RequestMetadata(f"r{number}", arrival_time=lane.now(), slo_deadline_ms=500.0)
            lane.choose(request).result()
            lane.ended(request.request_id)
        return (time.process_time() - began) / count * 1e6

    return min(asyncio.run(run()) for _ in range(5))


def ratios(found: Times) -> dict[tuple[str, str], list[float]]:
    """By way and router: time per request / that with Serve's router, for each round and number of clients."""
    made: dict[tuple[str, str], list[float]] = {}
    for (how, clients, name), times in found.items():
        if name != SERVE:
            theirs = found[how, clients, SERVE]
            made.setdefault((how, name), []).extend(ours / other for ours, other in zip(times, theirs, strict=True))
    return made


def table(found: Times) -> str:
    lines = ["| way | clients | Serve ms | router | ms | ratio |", "|---|---:|---:|---|---:|---:|"]
    for (how, clients, name), times in found.items():
        if name != SERVE:
            theirs = found[how, clients, SERVE]
            ratio = median(ours / other for ours, other in zip(times, theirs, strict=True))
            lines.append(f"| {how} | {clients} | {median(theirs):.2f} | {name} | {median(times):.2f} | {ratio:.2f} |")
    return "\n".join(lines)


def on_serve(rounds: int, seconds: float) -> Times:
    """Start Ray and Serve, and measure."""
    # A separate token, so that Ray leaves none in the home folder.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
    import ray
    from ray import serve

    port = free_port()
    with tempfile.TemporaryDirectory(prefix="br-", ignore_cleanup_errors=True) as folder:
        ray.init(
            _node_ip_address="127.0.0.2", num_cpus=16, include_dashboard=False, log_to_driver=False, _temp_dir=folder
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            return measure(rounds, seconds, port)
        finally:
            ray.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ray_serve", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.6, help="of each measurement")
    options = parser.parse_args()
    print(table(on_serve(options.rounds, options.seconds)))
    print(f"target: at most {TARGET:.2f}; CPU time of a decision and its end: {decision_us():.0f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
