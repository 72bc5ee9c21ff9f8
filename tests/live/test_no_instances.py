"""Models that no instance serves: clients wait while there is something to wait for, and are told at once if not."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx

from bench.chaos.planes import LivePlane
from pointsman.engines import Simulated
from pointsman.runtimes.machine.detection.system import this_machine
from tests.live.manifests import LIFECYCLE, manifest, simulated
from tests.simulator.servers import serving

QUICK = {"max": 1, "min": 0, "interval": "200ms"}
AT_ONCE_S = 3.0
"""An answer takes a few milliseconds; the rest is for a busy machine. It must come within a second."""


def ask(plane: LivePlane, model: str, tokens: int = 3) -> tuple[httpx.Response, float]:
    """The answer, and how long it took."""
    began = time.monotonic()
    body = {"model": model, "prompt": "hello", "max_tokens": tokens}
    return httpx.post(f"{plane.url}/v1/completions", json=body, timeout=90), time.monotonic() - began


def assert_told_at_once(plane: LivePlane, model: str, *words: str) -> None:
    answer, taken_s = ask(plane, model)
    print(f"\n{model}: {answer.status_code} after {taken_s:.3f} s: {answer.json()['error']['message']}")
    assert answer.status_code == 503, answer.text
    error = answer.json()["error"]
    assert error["reason"]["code"] == "none-expected"
    for word in words:
        assert word in error["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert taken_s < AT_ONCE_S


@contextmanager
def free_port() -> Iterator[int]:
    """A port where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def external(name: str, *urls: str, **fields: Any) -> dict[str, Any]:
    endpoints = [{"name": f"{name}-{number}", "url": url, "engine": "simulated"} for number, url in enumerate(urls)]
    return {"name": name, "model": name, "endpoints": endpoints, "lifecycle": LIFECYCLE, **fields}


BROKEN = {
    "name": "broken",
    "model": "broken",
    "engine": {"type": "command", "parameters": {"command": ["sh", "-c", "exit 7; {port}"]}},
    "lifecycle": {**LIFECYCLE, "startAttempts": 2, "backoff": "100ms", "backoffMax": "60s"},
}
HUGE = {"cpus": this_machine().cpus * 4, "resources": {"gpus": 0, "memory": "64Mi"}}


def test_nothing_to_wait_for(plane: LivePlane) -> None:
    with free_port() as port:
        down = f"http://127.0.0.1:{port}"
        plane.up(
            manifest(
                external("down", down),
                external("both", down, down),
                simulated("none", replicas=0),
                simulated("huge", replicas=1, placement=HUGE),
                {key: value for key, value in simulated("scaled", placement=HUGE).items() if key != "replicas"}
                | {"scaling": QUICK},
                BROKEN,
            ),
            wait=False,
        )
        plane.until(plane.is_reachable, "the gateway")

        def probed() -> bool:
            return all(one["reason"] for name in ("down", "both") for one in plane.instances(name).values())

        plane.until(probed, "the first probes have failed")
        plane.until(lambda: any(one["restarts"] >= 2 for one in plane.instances("broken").values()), "failed starts")
        assert_told_at_once(plane, "down", "does not answer")
        assert_told_at_once(plane, "both", 'no instance of "both" is', "none of its 2 endpoints answers")
        assert_told_at_once(plane, "none", "has no instances and no endpoints now")
        assert_told_at_once(plane, "huge", "there is no place for huge-1")
        assert_told_at_once(plane, "broken", "broken-1 has ")  # failed, or been starting: it restarts now and then
        ask(plane, "scaled")  # it is tried, and found to fit on no worker
        assert_told_at_once(plane, "scaled", "there is no place for scaled-1")
        plane.pointsman("scale", "scaled", "--replicas", "0")
        plane.until(lambda: not plane.instances("scaled"), "no instance")
        assert_told_at_once(plane, "scaled", "has no instances and no endpoints now")


def test_waiting_requests_are_refused_when_no_instance_is_expected_any_more(plane: LivePlane) -> None:
    """They wait for room on an external server, which then dies."""
    slow = Simulated(tokens_per_second=1.0, max_num_seqs=1)
    with serving(slow, "m") as server, ThreadPoolExecutor() as clients:
        plane.up(manifest(external("m", f"http://127.0.0.1:{server.port}", maxConcurrency=1)))
        asked = [clients.submit(ask, plane, "m", 60) for _ in range(5)]
        plane.until(lambda: plane.status()["deployments"][0]["waiting"] == 4, "four requests that wait")
        server.process.kill()
        killed_at = time.monotonic()
        answers = [one.result()[0] for one in asked]
        taken_s = time.monotonic() - killed_at
    print(f"\ntold {taken_s:.2f} s after the server died")
    assert {answer.status_code for answer in answers} <= {502, 503}
    waited = [answer.json()["error"] for answer in answers if answer.status_code == 503]
    assert len(waited) >= 3
    assert {error["reason"]["code"] for error in waited} == {"none-expected"}
    assert "m-0 does not answer" in waited[0]["message"]
    assert taken_s < AT_ONCE_S


def test_requests_wait_for_an_instance_that_restarts(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", replicas=1)))
    os.kill(plane.pids()["m-1"], signal.SIGKILL)
    plane.until(lambda: "m-1" not in plane.pids() or plane.instances()["m-1"]["restarts"], "its death")
    assert ask(plane, "m")[0].status_code == 200
