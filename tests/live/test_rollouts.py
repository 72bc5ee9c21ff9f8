"""Rolling out applications and killing replicas under load: only what differs changes, and no request fails."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from bench.chaos.planes import LivePlane
from pointsman.config import load_application
from tests.live.manifests import manifest

CODE = """
import os
import pointsman as pm


@pm.deployment(idempotent=True)
class Model:
    def __init__(self, val):
        self.val = val

    def forward(self, value):
        return self.val * value

    def reconfigure(self, config):
        self.val = config["val"]


@pm.deployment(idempotent=True)
def ensemble(a, b, c):
    return a + b + c


with pm.InputNode() as dag_input:
    m1 = Model.bind(1)
    m2 = Model.bind(2)
    dag = ensemble.bind(m1.forward.bind(dag_input[0]), m2.forward.bind(dag_input[1]), dag_input[2])
"""
BROKEN = CODE.replace("self.val = val", "raise RuntimeError('the weights are missing')")


class Load:
    """Clients that repeat one request and keep every response."""

    def __init__(self, url: str, body: Any, clients: int = 4) -> None:
        self.answers: list[tuple[int, str]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(url, body)) for _ in range(clients)]

    def _send(self, url: str, body: Any) -> None:
        with httpx.Client(timeout=30) as client:
            while not self._stop.is_set():
                answer = client.post(url, json=body)
                self.answers.append((answer.status_code, answer.text))

    def until_more(self, count: int = 50) -> None:
        """Wait until `count` more requests are answered."""
        target, deadline = len(self.answers) + count, time.monotonic() + 60
        while len(self.answers) < target:
            assert time.monotonic() < deadline, "requests are no longer answered"
            time.sleep(0.005)

    @contextmanager
    def running(self) -> Iterator["Load"]:
        for thread in self._threads:
            thread.start()
        try:
            self.until_more()
            yield self
            self.until_more()
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    def unexpected(self, *expected: str) -> list[tuple[int, str]]:
        return [answer for answer in self.answers if answer[0] != 200 or answer[1] not in expected]


@pytest.fixture
def running(plane: LivePlane) -> LivePlane:
    """A plane that serves the diamond."""
    plane.up(manifest())
    deploy(plane, build(plane))
    return plane


def build(plane: LivePlane, code: str = CODE, change: Callable[[str], str] = lambda text: text) -> Path:
    """Write the code, run `pointsman build` on it, and apply `change` to the manifest that it writes."""
    (plane.folder / "diamond.py").write_text(code, encoding="utf-8")
    built = subprocess.run(
        [sys.executable, "-m", "pointsman.cli.main", "build", "diamond.py:dag", "-o", "diamond.yaml"],
        cwd=plane.folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    file = plane.folder / "diamond.yaml"
    file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")
    return file


def deploy(plane: LivePlane, file: Path, code: int = 0) -> str:
    result = plane.pointsman("deploy", file)
    assert result.returncode == code, result.stdout + result.stderr + plane.log_tail()
    return result.stdout + result.stderr


def with_option(node: str, option: str) -> Callable[[str], str]:
    return lambda text: text.replace(f"- name: {node}\n", f"- name: {node}\n  {option}\n")


def is_replaced(plane: LivePlane, name: str, before: int) -> bool:
    return plane.pids().get(name, before) != before and plane.is_settled()


def test_the_deployed_manifest_is_returned_unchanged(running: LivePlane) -> None:
    text = (running.folder / "diamond.yaml").read_text(encoding="utf-8")
    assert load_application(text, running.folder).text == text
    assert running.admin.get("applications", "diamond")["yaml"] == text
    before = running.pids()
    assert "no changes" in deploy(running, running.folder / "diamond.yaml")
    assert running.pids() == before


def test_replicas_and_user_config_change_without_a_restart(running: LivePlane) -> None:
    before = running.pids()
    deploy(running, build(running, change=with_option("m1", "replicas: 3")))
    after = running.pids()
    assert len(running.pids("diamond.m1")) == 3
    assert {name: after[name] for name in before} == before
    deploy(running, build(running, change=with_option("m1", "replicas: 3\n  userConfig: {val: 10}")))
    url = f"{running.url}/diamond"
    running.until(lambda: all(httpx.post(url, json=[1, 2, 3]).json() == 17 for _ in range(6)), "all reconfigured")
    assert running.pids() == after


def test_a_rolling_upgrade_and_a_rollback_fail_no_request(running: LivePlane) -> None:
    before = running.pids()
    with Load(f"{running.url}/diamond", [1, 2, 3]).running() as load:
        deploy(running, build(running, change=lambda text: text.replace("args: [1]", "args: [11]")))
        load.until_more()
    assert load.unexpected("8", "18") == []
    assert load.answers[-1][1] == "18"
    after = running.pids()
    assert {name for name in before if after.get(name) == before[name]} >= {"diamond.m2-1", "diamond.ensemble-1"}
    assert before["diamond.m1-1"] not in after.values()
    with Load(f"{running.url}/diamond", [1, 2, 3]).running() as load:
        done = running.pointsman("rollback", "diamond")
        assert done.returncode == 0, done.stderr
    assert load.unexpected("8", "18") == []
    assert load.answers[-1][1] == "8"


def test_a_broken_version_leaves_the_old_one_serving(running: LivePlane) -> None:
    before = running.pids()
    with Load(f"{running.url}/diamond", [1, 2, 3]).running() as load:
        output = deploy(running, build(running, BROKEN), code=1)
        assert "the weights are missing" in output
    assert load.unexpected("8") == []
    after = running.pids()
    assert [after[name] for name in ("diamond.m1-1", "diamond.m2-1")] == [
        before["diamond.m1-1"],
        before["diamond.m2-1"],
    ]
    status = running.pointsman("status", "diamond").stdout
    assert "rollout stopped" in status
    assert "the weights are missing" in status
    deploy(running, build(running))
    assert running.is_settled()


def test_a_killed_replica_is_replaced_and_no_request_fails(running: LivePlane) -> None:
    deploy(running, build(running, change=with_option("m1", "replicas: 2")))
    with Load(f"{running.url}/diamond", [1, 2, 3]).running() as load:
        for name in ("diamond.m1-1", "diamond.m2-1", "diamond.ensemble-1"):
            before = running.pids()[name]
            os.kill(before, signal.SIGKILL)
            running.until(partial(is_replaced, running, name, before), f"{name} replaced")
            load.until_more(20)
    assert load.unexpected("8") == []


def test_an_application_survives_a_restart_of_the_plane_until_it_is_deleted(running: LivePlane) -> None:
    before = running.pids()
    running.kill()
    running.up()
    assert running.pids() == before, "the new plane adopts the replicas"
    url = f"{running.url}/diamond"
    assert httpx.post(url, json=[1, 2, 3]).json() == 8
    done = running.pointsman("delete", "diamond")
    assert done.returncode == 0, done.stderr
    running.until(lambda: not running.pids(), "the replicas have stopped")
    assert httpx.post(url, json=[1, 2, 3]).status_code == 404


def test_handles_work_when_the_state_directory_has_a_long_path(tmp_path: Path) -> None:
    """The path of a Unix socket is limited to about 100 bytes."""
    plane = LivePlane(tmp_path / ("deep-" * 12) / ("down-" * 12))
    plane.folder.mkdir(parents=True)
    try:
        plane.up(manifest())
        (plane.folder / "caller.py").write_text(CALLER, encoding="utf-8")
        built = subprocess.run(
            [sys.executable, "-m", "pointsman.cli.main", "build", "caller.py:dag", "-o", "caller.yaml"],
            cwd=plane.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert built.returncode == 0, built.stderr
        deploy(plane, plane.folder / "caller.yaml")
        assert httpx.post(f"{plane.url}/caller", json=4).json() == 12
    finally:
        plane.close()


CALLER = """
import pointsman as pm


@pm.deployment
class Model:
    def forward(self, value):
        return 3 * value


@pm.deployment
class Caller:
    def __init__(self, model):
        self.model = model

    async def __call__(self, value):
        return await self.model.forward(value)


dag = Caller.bind(Model.bind())
"""
