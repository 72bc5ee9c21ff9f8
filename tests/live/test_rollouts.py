"""Applications that change, and replicas that die, under load: only what differs is touched, and nobody notices."""

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
BROKEN = CODE.replace("self.val = val", "raise RuntimeError('the weights are not there')")


class Load:
    """Clients that ask for one thing again and again; every answer is kept."""

    def __init__(self, url: str, body: Any, clients: int = 4) -> None:
        self.answers: list[tuple[int, str]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(url, body)) for _ in range(clients)]

    def _ask(self, url: str, body: Any) -> None:
        with httpx.Client(timeout=30) as client:
            while not self._stop.is_set():
                answer = client.post(url, json=body)
                self.answers.append((answer.status_code, answer.text))

    def until_more(self, count: int = 50) -> None:
        """Let so many more requests be answered."""
        enough, deadline = len(self.answers) + count, time.monotonic() + 60
        while len(self.answers) < enough:
            assert time.monotonic() < deadline, "nobody is answered any more"
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

    def bad(self, *fine: str) -> list[tuple[int, str]]:
        return [answer for answer in self.answers if answer[0] != 200 or answer[1] not in fine]


@pytest.fixture
def running(plane: LivePlane) -> LivePlane:
    """A plane with the diamond on it."""
    plane.up(manifest())
    deployed(plane, build(plane))
    return plane


def build(plane: LivePlane, code: str = CODE, change: Callable[[str], str] = lambda text: text) -> Path:
    """Write the code, and what `pointsman build` makes of it, a little changed."""
    (plane.folder / "diamond.py").write_text(code, encoding="utf-8")
    built = subprocess.run(
        [sys.executable, "-m", "pointsman.cli.main", "build", "diamond.py:dag", "-o", "diamond.yaml"],
        cwd=plane.folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    file = plane.folder / "diamond.yaml"
    file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")
    return file


def deployed(plane: LivePlane, file: Path, code: int = 0) -> str:
    done = plane.pointsman("deploy", file)
    assert done.returncode == code, done.stdout + done.stderr + plane.said()
    return done.stdout + done.stderr


def with_option(node: str, option: str) -> Callable[[str], str]:
    return lambda text: text.replace(f"- name: {node}\n", f"- name: {node}\n  {option}\n")


def is_replaced(plane: LivePlane, name: str, before: int) -> bool:
    return plane.pids().get(name, before) != before and plane.is_settled()


def test_building_deploying_and_reading_back_is_the_same(running: LivePlane) -> None:
    text = (running.folder / "diamond.yaml").read_text(encoding="utf-8")
    assert load_application(text, running.folder).text == text
    assert running.admin.get("applications", "diamond")["yaml"] == text
    before = running.pids()
    assert "nothing changed" in deployed(running, running.folder / "diamond.yaml")
    assert running.pids() == before


def test_replicas_and_user_config_are_changed_lightly(running: LivePlane) -> None:
    before = running.pids()
    deployed(running, build(running, change=with_option("m1", "replicas: 3")))
    after = running.pids()
    assert len(running.pids("diamond.m1")) == 3
    assert {name: after[name] for name in before} == before
    deployed(running, build(running, change=with_option("m1", "replicas: 3\n  userConfig: {val: 10}")))
    url = f"{running.url}/diamond"
    running.until(lambda: all(httpx.post(url, json=[1, 2, 3]).json() == 17 for _ in range(6)), "all reconfigured")
    assert running.pids() == after


def test_a_rolling_upgrade_of_one_node_fails_no_request(running: LivePlane) -> None:
    before = running.pids()
    with Load(f"{running.url}/diamond", [1, 2, 3]).running() as load:
        deployed(running, build(running, change=lambda text: text.replace("args: [1]", "args: [11]")))
        load.until_more()
    assert load.bad("8", "18") == []
    assert load.answers[-1][1] == "18"
    after = running.pids()
    assert {name for name in before if after.get(name) == before[name]} >= {"diamond.m2-1", "diamond.ensemble-1"}
    assert before["diamond.m1-1"] not in after.values()
    with Load(f"{running.url}/diamond", [1, 2, 3]).running() as load:
        done = running.pointsman("rollback", "diamond")
        assert done.returncode == 0, done.stderr
    assert load.bad("8", "18") == []
    assert load.answers[-1][1] == "8"


def test_a_broken_version_leaves_the_old_one_serving(running: LivePlane) -> None:
    before = running.pids()
    with Load(f"{running.url}/diamond", [1, 2, 3]).running() as load:
        told = deployed(running, build(running, BROKEN), code=1)
        assert "the weights are not there" in told
    assert load.bad("8") == []
    after = running.pids()
    assert [after[name] for name in ("diamond.m1-1", "diamond.m2-1")] == [
        before["diamond.m1-1"],
        before["diamond.m2-1"],
    ]
    status = running.pointsman("status", "diamond").stdout
    assert "rollout stopped" in status
    assert "the weights are not there" in status
    deployed(running, build(running))
    assert running.is_settled()


def test_a_replica_that_is_killed_is_replaced_and_no_request_fails(running: LivePlane) -> None:
    deployed(running, build(running, change=with_option("m1", "replicas: 2")))
    with Load(f"{running.url}/diamond", [1, 2, 3]).running() as load:
        for name in ("diamond.m1-1", "diamond.m2-1", "diamond.ensemble-1"):
            before = running.pids()[name]
            os.kill(before, signal.SIGKILL)
            running.until(partial(is_replaced, running, name, before), f"{name} replaced")
            load.until_more(20)
    assert load.bad("8") == []


def test_an_application_outlives_its_plane_and_is_deleted(running: LivePlane) -> None:
    before = running.pids()
    running.kill()
    running.up()
    assert running.pids() == before, "its replicas were taken over"
    url = f"{running.url}/diamond"
    assert httpx.post(url, json=[1, 2, 3]).json() == 8
    done = running.pointsman("delete", "diamond")
    assert done.returncode == 0, done.stderr
    running.until(lambda: not running.pids(), "its replicas stopped")
    assert httpx.post(url, json=[1, 2, 3]).status_code == 404


def test_a_state_directory_with_a_long_path(tmp_path: Path) -> None:
    """The path of a unix socket is short: handles of replicas must get there all the same."""
    plane = LivePlane(tmp_path / ("deep-" * 12) / ("down-" * 12))
    plane.folder.mkdir(parents=True)
    try:
        plane.up(manifest())
        (plane.folder / "asking.py").write_text(ASKING, encoding="utf-8")
        built = subprocess.run(
            [sys.executable, "-m", "pointsman.cli.main", "build", "asking.py:dag", "-o", "asking.yaml"],
            cwd=plane.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert built.returncode == 0, built.stderr
        deployed(plane, plane.folder / "asking.yaml")
        assert httpx.post(f"{plane.url}/asking", json=4).json() == 12
    finally:
        plane.close()


ASKING = """
import pointsman as pm


@pm.deployment
class Model:
    def forward(self, value):
        return 3 * value


@pm.deployment
class Asks:
    def __init__(self, model):
        self.model = model

    async def __call__(self, value):
        return await self.model.forward(value)


dag = Asks.bind(Model.bind())
"""
