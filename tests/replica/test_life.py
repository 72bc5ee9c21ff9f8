"""The lifecycle of a replica: loading, health, configuration, draining."""

import contextlib
import signal
from pathlib import Path

import pytest

from pointsman.errors import ConfigError
from pointsman.replica.target import read_environment
from tests.replica.replicas import call, replica, until
from tests.simulator.servers import TIMEOUT_S, read_all

SLOW_TO_LOAD = """
import pathlib, time
gate = pathlib.Path(__file__).parent / "gate"
class Model:
    def __init__(self):
        while not gate.exists():
            time.sleep(0.005)
    def forward(self): return "done"
"""
CONFIGURED = """
class Model:
    def __init__(self): self.config, self.sick = None, False
    def reconfigure(self, config):
        if config == "bad":
            raise ValueError("what is bad?")
        self.config = config
    def check_health(self):
        if self.config == "sick":
            raise RuntimeError("a cold")
    def get(self): return self.config
    def sleep(self, seconds):
        import time
        time.sleep(seconds)
        return "slept"
"""


def test_a_loading_replica_is_alive_and_not_ready(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(SLOW_TO_LOAD)
    with replica(tmp_path, ready=False, code="m.py:Model") as running:
        assert running.fetch("GET", "/health").status == 200
        answer = running.fetch("GET", "/ready")
        assert (answer.status, answer.json()["message"]) == (503, "its code is loading")
        assert running.call("forward").status == 503
        (tmp_path / "gate").touch()
        until(lambda: running.fetch("GET", "/ready").status == 200)
        assert running.value("forward") == "done"


def test_stopped_while_loading(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(SLOW_TO_LOAD)
    with replica(tmp_path, ready=False, code="m.py:Model") as running:
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(TIMEOUT_S) == 0


def test_configuration_is_applied_at_the_start_and_on_change(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(CONFIGURED)
    with replica(tmp_path, {"POINTSMAN_USER_CONFIG": '{"a": 1}'}, code="m.py:Model") as running:
        assert running.value("get") == {"a": 1}
        assert running.fetch("POST", "/configure", b"[2]").status == 200
        assert running.value("get") == [2]
        answer = running.fetch("POST", "/configure", b'"bad"')
        assert (answer.status, answer.json()["message"]) == (500, "what is bad?")
        assert running.fetch("POST", "/configure", b"no json").status == 400
        assert running.value("get") == [2]


def test_objects_without_reconfigure_ignore_user_configs(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def f(): return 1")
    with replica(tmp_path, {"POINTSMAN_USER_CONFIG": "1"}, code="m.py:f", kind="function") as running:
        assert running.fetch("POST", "/configure", b"1").status == 200


def test_health_is_that_of_the_object(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(CONFIGURED)
    with replica(tmp_path, code="m.py:Model") as running:
        assert running.fetch("GET", "/health").status == 200
        running.fetch("POST", "/configure", b'"sick"')
        answer = running.fetch("GET", "/health")
        assert (answer.status, answer.json()["message"]) == (500, "a cold")
        with running.send("sleep", 0.5) as client:  # also while all threads are busy
            assert running.fetch("GET", "/health").status == 500
            assert b"slept" in client.recv(1000)


def test_a_stopping_replica_finishes_calls_and_refuses_new_ones(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(CONFIGURED)
    with replica(tmp_path, code="m.py:Model") as running:
        assert running.call_again("get").status == 200  # keeps a connection open
        with running.send("sleep", 0.7) as client, running.send("sleep", 0.1) as second:
            until(lambda: running.fetch("GET", "/ready").status == 200)
            running.process.send_signal(signal.SIGTERM)
            until(lambda: running.fetch("GET", "/ready").status == 503)
            answer = running.fetch("POST", "/call", call("get"))
            assert (answer.status, answer.json()["message"]) == (503, "it is stopping")
            assert running.fetch("GET", "/health").status == 200
            assert b"slept" in read_all(client)
            assert b"slept" in read_all(second)
        assert running.process.wait(TIMEOUT_S) == 0
    assert list((tmp_path / "shm").iterdir()) == []


def test_failed_and_abandoned_calls_do_not_delay_stopping(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(CONFIGURED + "    async def pieces(self, n):\n        yield n\n")
    with replica(tmp_path, code="m.py:Model") as running:
        for method in ("pieces", "sleep", "nothing"):
            assert running.call(method, 1, 2, 3).status in (500, 404)
        assert running.call("pieces", 1, form="events").status == 200
        running.send("sleep", 20.0).close()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(TIMEOUT_S) == 0


def test_an_idle_replica_stops_at_once(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(CONFIGURED)
    with replica(tmp_path, code="m.py:Model") as running:
        running.call_again("get")
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(TIMEOUT_S) == 0


def test_a_client_notices_that_the_replica_was_killed(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(CONFIGURED)
    with replica(tmp_path, code="m.py:Model") as running, running.send("sleep", 30) as client:
        until(lambda: running.fetch("GET", "/health").status == 200)
        running.process.kill()
        with contextlib.suppress(ConnectionResetError):
            assert read_all(client) == b""


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "POINTSMAN_REPLICA must say as JSON what to run"),
        ({"POINTSMAN_REPLICA": '{"kind": "thing"}'}, "POINTSMAN_REPLICA"),
        ({"POINTSMAN_REPLICA": '{"kind": "class"}'}, "POINTSMAN_SECRET must be set"),
    ],
)
def test_required_environment_variables(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_environment(environment)
