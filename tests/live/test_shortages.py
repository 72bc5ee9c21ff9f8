"""A plane that has no file descriptor left: no engine is killed for it, and all is well once there are some again."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.planes import LivePlane
from tests.gateway.wire import HEALTH, Client, chat
from tests.live.manifests import LIFECYCLE, manifest, simulated
from tests.shortages import no_descriptors


class Aloof(BaseHTTPRequestHandler):
    """Answers every request, and closes the connection: each probe and each request needs a new one."""

    server: "AloofServer"

    def do_GET(self) -> None:
        self.server.answered += 1
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"choices": []}')

    do_POST = do_GET  # noqa: N815

    def log_message(self, *args: object) -> None: ...


class AloofServer(ThreadingHTTPServer):
    answered = 0

    @property
    def endpoint(self) -> dict[str, str]:
        return {"name": "aloof", "url": f"http://127.0.0.1:{self.server_port}"}


@pytest.fixture
def aloof() -> Iterator[AloofServer]:
    with AloofServer(("127.0.0.1", 0), Aloof) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class OpenedBefore:
    """Asks a plane on a connection that was made while it had descriptors."""

    def __init__(self, connected: socket.socket) -> None:
        self._client = Client(connected)

    def is_accepted(self) -> None:
        assert self._client.fetch(HEALTH.replace(b"host: gateway", b"host: localhost")).status == 200

    def status(self) -> dict[str, Any]:
        got = self._client.fetch(b"GET /admin/v1/status HTTP/1.1\r\nhost: plane\r\n\r\n")
        assert got.status == 200
        status: dict[str, Any] = json.loads(got.body)
        return status

    def instances(self) -> dict[str, dict[str, Any]]:
        return {one["id"]: one for deployment in self.status()["deployments"] for one in deployment["instances"]}

    def chat(self) -> int:
        return self._client.fetch(chat().replace(b"host: gateway", b"host: localhost")).status


@contextmanager
def connected(family: int, address: Any) -> Iterator[OpenedBefore]:
    """A connection that the plane has accepted: the system connects a client earlier, and accepting it takes a
    descriptor."""
    with socket.socket(family) as opened:
        opened.connect(str(address) if isinstance(address, Path) else address)
        client = OpenedBefore(opened)
        client.is_accepted()
        yield client


def test_no_engine_is_killed_while_the_plane_has_no_descriptors(plane: LivePlane, aloof: AloofServer) -> None:
    plane.up(manifest(simulated("m", 2, endpoints=[aloof.endpoint])))
    before = plane.pids()
    untouched = dict.fromkeys(["m-1", "m-2", "aloof"], ("ready", 0))
    with connected(socket.AF_UNIX, plane.state / "admin.sock") as asked:
        assert asked.status()["problems"] == []
        with no_descriptors(plane.process.pid):
            plane.until(lambda: any("ulimit -n" in one["text"] for one in asked.status()["problems"]), "the problem")
            answered = aloof.answered
            until = asked.status()["uptime_s"] + 3.0
            while asked.status()["uptime_s"] < until:  # many probe intervals
                found = {name: (one["phase"], one["restarts"]) for name, one in asked.instances().items()}
                assert found == untouched
            assert aloof.answered == answered, "it could not be probed"
        plane.until(lambda: aloof.answered > answered and not asked.status()["problems"], "a probe")
        assert {name: (one["phase"], one["restarts"]) for name, one in asked.instances().items()} == untouched
    assert plane.pids() == before


def test_an_engine_that_dies_meanwhile_is_started_as_soon_as_there_are_descriptors(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 2)))
    before = plane.pids()
    [supervisor] = plane.supervisors()
    with connected(socket.AF_UNIX, plane.state / "admin.sock") as asked:
        for name, short_of_files in (("m-1", plane.process.pid), ("m-2", supervisor)):

            def instance(name: str = name) -> dict[str, Any]:
                return asked.instances()[name]

            with no_descriptors(short_of_files):
                os.kill(before[name], signal.SIGKILL)
                plane.until(lambda: "ulimit -n" in instance()["reason"], "the reason")
                until = asked.status()["uptime_s"] + 1.0
                while asked.status()["uptime_s"] < until:  # several attempts
                    assert (instance()["restarts"], instance()["halted"]) == (1, False)
            plane.until(lambda: instance()["phase"] == "ready", "its next process")
            assert instance()["restarts"] == 1


def test_requests_are_refused_until_there_are_descriptors(plane: LivePlane, aloof: AloofServer) -> None:
    plane.up(manifest({"name": "m", "model": "m", "lifecycle": LIFECYCLE, "endpoints": [aloof.endpoint]}))
    host, _, port = plane.url.partition("://")[2].partition(":")
    with connected(socket.AF_INET, (host, int(port))) as client:
        assert client.chat() == 200
        with no_descriptors(plane.process.pid):
            assert {client.chat() for _ in range(20)} == {503}
        assert {client.chat() for _ in range(20)} == {200}
    [instance] = plane.instances().values()
    assert (instance["phase"], instance["restarts"]) == ("ready", 0)
    assert any(one["code"] == "requests-not-sent" for one in plane.status()["problems"])
