"""One run of a scenario: start a plane, load it, inject the fault, then check the counts."""

import http.client
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.chaos.clients import check_text, check_token_count
from bench.chaos.load import Load
from bench.chaos.planes import LivePlane
from bench.chaos.report import Outcome
from bench.chaos.scenarios import SCENARIOS, Scenario, Settings
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
"""Shorter than the defaults, so that instances restart within seconds."""
SETTLE_TIMEOUT_S = 30.0
DISCONNECT_SHARE = 0.05
"""Share of streams whose client disconnects."""


def manifest(scenario: Scenario) -> str:
    """The manifest as JSON, which is valid YAML."""
    settings = scenario.settings
    engine = ENGINES[settings.engine]
    if settings.weights:
        engine = {**engine, "parameters": {**engine["parameters"], "model": settings.weights}}
    deployment: dict[str, Any] = {
        "name": "m",
        "model": "m",
        "replicas": settings.instances + scenario.managed,
        "engine": engine,
        "endpoints": scenario.endpoints,
        "lifecycle": LIFECYCLE,
    }
    if settings.policy:
        deployment["scheduling"] = {"policy": settings.policy}
    # A request may try every faulty instance before the healthy one.
    upstream = {"maxTries": settings.instances + 1, **scenario.gateway.get("upstream", {})}
    gateway = {"listen": "127.0.0.1:0", **scenario.gateway, "upstream": upstream}
    return json.dumps({"kind": "Pointsman", "deployments": [deployment], "gateway": gateway})


def run(name: str, settings: Settings, folder: Path) -> Outcome:
    """Run a scenario once. No process, mount or connection is left behind."""
    scenario = SCENARIOS[name](settings)
    if why := scenario.unavailable():
        return Outcome(scenario, skipped=why)
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        plane = scenario.open(folder, stack)
        plane.up(manifest(scenario))
        plane.until(lambda: all(one["url"] for one in plane.status()["gateways"]), "gateways in other processes listen")
        with Load(
            plane.url,
            ["m"],
            clients=settings.clients,
            seed=settings.seed,
            check=check_text if settings.is_simulated else check_token_count,
            disconnect_share=DISCONNECT_SHARE,
            key=scenario.key,
        ) as load:
            scenario.run(plane)
        scenario.end(plane)
        settled_s = _settled(plane)
        ended, in_flight = _counts(plane)
        return Outcome(
            scenario,
            load.samples,
            retried=_retried(plane),
            counted=ended if scenario.counts_survive else None,
            in_flight=in_flight,
            settled_s=settled_s,
        )


def _settled(plane: LivePlane) -> float | None:
    began = time.monotonic()
    try:
        plane.until(plane.is_settled, "all instances ready again", SETTLE_TIMEOUT_S)
    except AssertionError:
        return None
    return time.monotonic() - began


def _retried(plane: LivePlane) -> set[str]:
    """Ids of the requests that took more than one try."""
    listed = plane.admin.get("requests", limit=1_000_000)["requests"]
    return {one["request_id"] for one in listed if one["tries"] > 1}


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
