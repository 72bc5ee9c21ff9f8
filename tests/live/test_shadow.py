"""Candidates on a real plane: a better one is promoted, a worse one goes back, bad ones harm nothing."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any
from urllib.request import Request, urlopen

import pytest

from bench.chaos.planes import LivePlane
from tests.live.manifests import manifest, simulated

POLICIES = """
import time

from pointsman import SchedulingDecision, SchedulingPolicy


class Herd(SchedulingPolicy):
    def schedule(self, requests, instances):
        first = min(instances, key=lambda one: one.instance_id)
        return [SchedulingDecision(one.request_id, first.instance_id) for one in requests]


class Raises(SchedulingPolicy):
    def schedule(self, requests, instances):
        raise LookupError("no idea")


class Hangs(SchedulingPolicy):
    def schedule(self, requests, instances):
        time.sleep(60)
"""
CLIENTS = 6


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlane]:
    plane = LivePlane(tmp_path_factory.mktemp("plane"))
    (plane.folder / "my_candidates.py").write_text(POLICIES, encoding="utf-8")
    bad = ["my_candidates:Raises", "my_candidates:Hangs"]
    # With every request on the first of three instances, all but one wait there.
    engine = {"parameters": {"maxNumSeqs": 1, "outputTokens": 8, "tokensPerSecond": 400, "firstTokenMs": 5}}
    scheduling = {"policy": "my_candidates:Herd", "shadow": ["fifo", *bad], "shadowBudget": 1.0}
    plane.up(
        manifest(simulated("chat", 3, maxConcurrency=99, scheduling=scheduling, **engine), processes=request.param)
    )
    plane.until(lambda: all(one["url"] for one in plane.status()["gateways"]), "all gateways listen")
    yield plane
    plane.close()


def ask(url: str) -> bool:
    body = {"model": "chat", "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"content-type": "application/json"}
    with urlopen(Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers), timeout=60) as answer:
        return bool(answer.read().endswith(b"data: [DONE]\n\n"))


@contextmanager
def load(live: LivePlane) -> Iterator[list[bool]]:
    """Clients that send one request after the other. What became of each."""
    url, over, served = live.url, Event(), list[bool]()

    def client() -> None:
        while not over.is_set():
            try:
                served.append(ask(url))
            except OSError:
                served.append(False)
                raise

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client) for _ in range(CLIENTS)]
        try:
            yield served
        finally:
            over.set()
            for one in clients:
                one.result()


def promote(live: LivePlane, candidate: str, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "pointsman", "promote", candidate, "--json", "--state", str(live.state), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=live.folder)
    told: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if told["state"] == "promoted" else 1), done.stderr
    return told


def errors_of(live: LivePlane) -> list[int]:
    [chat] = live.admin.get("shadow")["deployments"]
    return [one["errors"] for one in chat["candidates"]]


def test_candidates_watch_and_the_better_one_is_promoted(live: LivePlane) -> None:
    with load(live) as served:
        live.until(lambda: len(served) >= 150 or not all(served), "some requests")
        assert all(served)
        # Candidates decide when there is time; one that fails is called again after a pause.
        live.until(lambda: errors_of(live)[1] >= 3 and errors_of(live)[2] >= 1, "errors of the broken candidates")
        [before] = live.admin.get("shadow")["deployments"]
        told = promote(live, "fifo", "--if", "ttft_p90 < -5%", "--canary", "50%", "--for", "4s")
        # What is worse goes back by itself: everything on one instance again.
        live.admin.post("apply", body={"text": _with_herd(live), "folder": str(live.folder), "file": "m.yaml"})
        back = promote(live, "herd", "--if", "ttft_p90 < -5%", "--canary", "50%", "--for", "20s")
    assert served
    assert all(served)
    fifo, raises, hangs = before["candidates"]
    assert fifo["decided"] > 0
    assert fifo["errors"] == 0
    assert (raises["decided"], hangs["decided"]) == (0, 0)
    assert told["state"] == "promoted", told["why"]
    assert told["why"]["code"] == "condition-met"
    history = live.admin.get("history")["manifests"]
    assert "promoted fifo in chat" in history[1]["summary"]
    assert back["state"] == "rolled back", back["why"]
    [chat] = live.status()["deployments"]
    assert chat["strategy"] == "fifo"


def _with_herd(live: LivePlane) -> str:
    """The manifest in force, which has fifo now, with the policy from before as a candidate."""
    document = json.loads((live.folder / "manifest.yaml").read_text(encoding="utf-8"))
    document["deployments"][0]["scheduling"] = {"policy": "fifo", "shadow": ["my_candidates:Herd"]}
    return json.dumps(document)
