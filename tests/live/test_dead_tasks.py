"""Every background task of every process of a plane is killed: it begins again, `status` and metrics name it."""

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

import pointsman as pm
from bench.chaos.clients import Verdict
from bench.chaos.load import Load
from bench.chaos.planes import LivePlane
from tests.architecture.house import kept_in
from tests.live import pipeline_nodes as nodes
from tests.live.manifests import manifest, simulated
from tests.live.test_recovery import free_port

PLANE = "plane"
SERVING = ("gateway/gateway.py", "gateway/pipelines/results.py")
KEPT = {
    PLANE: (
        *SERVING,
        "cli/up.py",
        "gateway/owner.py",
        "runtimes/autoscaling.py",
        "runtimes/local/runtime.py",
        "runtimes/plane.py",
        "runtimes/promotions.py",
    ),
    "gateway-1": (*SERVING, "gateway/process.py"),
    "gateway-2": (*SERVING, "gateway/process.py"),
}
"""The modules whose tasks live in each process."""


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[LivePlane]:
    made = LivePlane(tmp_path, launcher="bench.chaos.launcher")
    yield made
    made.close()


def processes(plane: LivePlane) -> dict[str, int]:
    return {PLANE: plane.process.pid} | {one["name"]: one["pid"] for one in plane.status()["gateways"]}


def told(plane: LivePlane, process: str, what: str) -> list[str]:
    """The names behind this word in the output of a process."""
    log = plane.log() if process == PLANE else (plane.state / "logs" / f"@{process}.log").read_text(encoding="utf-8")
    return re.findall(rf"^{what} (.+)$", log, re.MULTILINE)


def number_of_signals(plane: LivePlane, process: str) -> int:
    return len(told(plane, process, "signal"))


def test_each_task_of_each_process_begins_again(plane: LivePlane) -> None:
    scaling = {"min": 2, "max": 2, "metrics": [{"name": "load", "url": "http://127.0.0.1:9", "query": "up"}]}
    chat = simulated("m", scaling=scaling, scheduling={"policy": "fifo", "shadow": ["power-of-two"]})
    del chat["replicas"]
    plane.up(manifest(chat, processes=2, listen=f"127.0.0.1:{free_port()}"))
    plane.until(lambda: all(one["url"] for one in plane.status()["gateways"]), "all gateways listen")
    text = pm.build(nodes.diamond(), name="diamond", folder=plane.folder).to_yaml()
    plane.admin.post("applications", body={"text": text, "folder": str(plane.folder)})
    plane.until(plane.is_settled, "replicas ready")
    promoted = {"candidate": "power-of-two", "deployment": "m", "for_s": 600.0, "canary": 0.1}
    plane.admin.post("promotions", body=promoted)
    pids = processes(plane)
    for number in (1, 2):
        for name, pid in pids.items():
            os.kill(pid, signal.SIGUSR1)
            plane.until(lambda have=(name, number): number_of_signals(plane, have[0]) == have[1], "the signal")  # type: ignore[misc]
            killed = Counter(told(plane, name, "killed"))
            plane.until(
                lambda name=name, killed=killed: Counter(told(plane, name, "again")) == killed,  # type: ignore[misc]
                f"every task of {name} has begun again",
            )
    for name in pids:
        _were_killed_and_are_named(plane, name)
    assert processes(plane) == pids, "no process was replaced"
    _serves_and_repairs(plane)


def _were_killed_and_are_named(plane: LivePlane, process: str) -> None:
    killed = Counter(told(plane, process, "killed"))
    patterns = {pattern for file in KEPT[process] for pattern in kept_in(file)}
    assert {one for one in patterns if not any(re.fullmatch(one, name) for name in killed)} == set(), "not killed"
    assert told(plane, process, "unkept") == [], "nothing starts them again"
    whose = None if process == PLANE else process

    def unnamed() -> list[str]:
        failed = [one["facts"] for one in plane.status()["problems"] if one["code"] == "task-failed"]
        counts = {one["task"]: one["failures"] for one in failed if one.get("gateway") == whose}
        return [name for name, count in killed.items() if counts.get(name) != count]

    plane.until(lambda: unnamed() == [], f"status names every task of {process}")
    page = httpx.get(f"{plane.url}/metrics", timeout=20).text
    counts = dict(re.findall(r'^pointsman_background_failures_total{task="(.+)"} (\S+)$', page, re.MULTILINE))
    assert {name for name, count in killed.items() if float(counts.get(name, 0)) < count} == set(), "not counted"


def _serves_and_repairs(plane: LivePlane) -> None:
    before = plane.pids("m")
    with Load(plane.url, ["m"], clients=8) as load:
        plane.until(lambda: len(load.samples) > 60, "load")
        os.kill(before["m-1"], signal.SIGSTOP)  # only tasks can find it and replace it
        plane.until(lambda: plane.pids("m").get("m-1", before["m-1"]) != before["m-1"], "a stopped engine is replaced")
        count = len(load.samples)
        plane.until(lambda: len(load.samples) > count + 60, "load after that")
    assert load.unexpected(Verdict.INTERRUPTED) == []
    assert httpx.post(f"{plane.url}/diamond", json=[1, 2, 3], timeout=30).json() == 8
    last = load.samples[-1].request.request_id
    plane.until(lambda: plane.admin.get("requests", last)["state"] == "served", "its record")
