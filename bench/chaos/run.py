"""One run: a plane up, load on it, strikes, and then the count."""

import http.client
import json
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bench.chaos.clients import counted, word_for_word
from bench.chaos.load import Load
from bench.chaos.mischief import GARBAGE, HUNG, KILLED, Mischief
from bench.chaos.planes import LivePlane
from bench.chaos.report import FailedTry, Outcome
from pointsman.engines import Samples

ENGINES: dict[str, dict[str, Any]] = {
    "simulated": {"type": "simulated", "parameters": {"tokensPerSecond": 50, "firstTokenMs": 40, "maxNumSeqs": 8}},
    "llama.cpp": {"type": "llama.cpp", "parameters": {"slots": 4, "contextTokens": 256}},
}
"""Real engines cannot be told to answer garbage."""
LIFECYCLE = {
    "probeInterval": "300ms",
    "probeTimeout": "800ms",
    "failuresUntilUnhealthy": 2,
    "stopGrace": "2s",
    "backoff": "200ms",
    "backoffMax": "1s",
}
"""Short, so that a minute holds many lives; nothing else differs from how a plane runs by itself."""
SETTLING_S = 30.0
LEAVERS = 0.05
"""Of the clients of streams, this share goes away in the middle."""


class Settings(NamedTuple):
    """What can be said on the command line."""

    seconds: float = 60.0
    seed: int = 1
    every_s: float = 2.0
    instances: int = 4
    clients: int = 12
    engine: str = "simulated"
    weights: str = ""
    """Of llama.cpp: a GGUF file."""
    policy: str = ""
    """Who decides; empty: the default profile."""


def manifest(settings: Settings) -> str:
    """JSON is YAML."""
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
    # A request may meet every ill instance before it finds the one that lives.
    gateway = {"listen": "127.0.0.1:0", "upstream": {"maxTries": settings.instances + 1}}
    return json.dumps({"kind": "Pointsman", "deployments": [deployment], "gateway": gateway})


def run(settings: Settings, folder: Path) -> Outcome:
    """Everything that happened. No process is left."""
    plane = LivePlane(folder)
    try:
        plane.up(manifest(settings))
        simulated = settings.engine == "simulated"
        mischief = Mischief(plane, settings.seed, [KILLED, HUNG, *([GARBAGE] if simulated else [])])
        check = word_for_word if simulated else counted
        with Load(plane.url, ["m"], clients=settings.clients, seed=settings.seed, check=check, leavers=LEAVERS) as load:
            mischief.go_on(settings.seconds, settings.every_s)
        settled_s = _settled(plane)
        return Outcome(load.samples, mischief, _failed_tries(plane), *_counts(plane), settled_s)
    finally:
        plane.close()


def _settled(plane: LivePlane) -> float | None:
    began = time.monotonic()
    try:
        plane.until(plane.is_settled, "every instance ready again", SETTLING_S)
    except AssertionError:
        return None
    return time.monotonic() - began


def _failed_tries(plane: LivePlane) -> list[FailedTry]:
    listed = plane.admin.get("requests", limit=1_000_000)["requests"]
    told = [
        plane.admin.get("requests", one["request_id"])
        for one in listed
        if one["tries"] > 1 or one["state"] == "refused"
    ]
    return [
        FailedTry(one["request_id"], failed["instance"], failed["why"])
        for one in told
        for failed in one["failed_tries"]
    ]


def _counts(plane: LivePlane) -> tuple[int, int]:
    """Requests that the gateway counts as ended, and as under way."""
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
