"""One run: start a plane, load it, inject faults, then check the counts."""

import http.client
import json
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bench.chaos.clients import check_text, check_token_count
from bench.chaos.faults import GARBAGE, HUNG, KILLED, FaultInjector
from bench.chaos.load import Load
from bench.chaos.planes import LivePlane
from bench.chaos.report import FailedTry, Outcome
from pointsman.engines import Samples

ENGINES: dict[str, dict[str, Any]] = {
    "simulated": {"type": "simulated", "parameters": {"tokensPerSecond": 50, "firstTokenMs": 40, "maxNumSeqs": 8}},
    "llama.cpp": {"type": "llama.cpp", "parameters": {"slots": 4, "contextTokens": 256}},
}
LIFECYCLE = {
    "probeInterval": "300ms",
    "probeTimeout": "800ms",
    "failuresUntilUnhealthy": 2,
    "stopGrace": "2s",
    "backoff": "200ms",
    "backoffMax": "1s",
}
"""Shorter than the defaults, so that many instances restart within a minute."""
SETTLE_TIMEOUT_S = 30.0
DISCONNECT_SHARE = 0.05
"""Share of streams whose client disconnects."""


class Settings(NamedTuple):
    """The options of the command line."""

    seconds: float = 60.0
    seed: int = 1
    every_s: float = 2.0
    instances: int = 4
    clients: int = 12
    engine: str = "simulated"
    weights: str = ""
    """GGUF file for llama.cpp."""
    policy: str = ""
    """Scheduling policy; the default profile if empty."""


def manifest(settings: Settings) -> str:
    """The manifest as JSON, which is valid YAML."""
    engine = ENGINES[settings.engine]
    if settings.weights:
        engine = {**engine, "parameters": {**engine["parameters"], "model": settings.weights}}
    deployment: dict[str, Any] = {
        "name": "m",
        "model": "m",
        "replicas": settings.instances,
        "engine": engine,
        "lifecycle": LIFECYCLE,
    }
    if settings.policy:
        deployment["scheduling"] = {"policy": settings.policy}
    # A request may try every faulty instance before the healthy one.
    gateway = {"listen": "127.0.0.1:0", "upstream": {"maxTries": settings.instances + 1}}
    return json.dumps({"kind": "Pointsman", "deployments": [deployment], "gateway": gateway})


def run(settings: Settings, folder: Path) -> Outcome:
    """Run once. No process is left behind."""
    plane = LivePlane(folder)
    try:
        plane.up(manifest(settings))
        simulated = settings.engine == "simulated"
        kinds = [KILLED, HUNG, GARBAGE] if simulated else [KILLED, HUNG]
        injector = FaultInjector(plane, settings.seed, kinds)
        with Load(
            plane.url,
            ["m"],
            clients=settings.clients,
            seed=settings.seed,
            check=check_text if simulated else check_token_count,
            disconnect_share=DISCONNECT_SHARE,
        ) as load:
            injector.run(settings.seconds, settings.every_s)
        settled_s = _settled(plane)
        return Outcome(load.samples, injector, _failed_tries(plane), *_counts(plane), settled_s)
    finally:
        plane.close()


def _settled(plane: LivePlane) -> float | None:
    began = time.monotonic()
    try:
        plane.until(plane.is_settled, "all instances ready again", SETTLE_TIMEOUT_S)
    except AssertionError:
        return None
    return time.monotonic() - began


def _failed_tries(plane: LivePlane) -> list[FailedTry]:
    listed = plane.admin.get("requests", limit=1_000_000)["requests"]
    records = [
        plane.admin.get("requests", one["request_id"])
        for one in listed
        if one["tries"] > 1 or one["state"] == "refused"
    ]
    return [
        FailedTry(one["request_id"], failed["instance"], failed["why"])
        for one in records
        for failed in one["failed_tries"]
    ]


def _counts(plane: LivePlane) -> tuple[int, int]:
    """Numbers of ended requests and of requests in flight, as the gateway counts them."""
    connection = http.client.HTTPConnection(urlsplit(plane.url).netloc, timeout=10.0)
    try:
        connection.request("GET", "/metrics")
        samples = Samples(connection.getresponse().read())
    finally:
        connection.close()
    ended = ("requests_total", "broken_off_answers_total", "abandoned_requests_total")
    now = ("waiting_requests", "running_requests")
    return (
        round(sum(samples.value(f"pointsman_{name}") or 0.0 for name in ended)),
        round(sum(samples.value(f"pointsman_{name}") or 0.0 for name in now)),
    )
