"""Model servers as real processes, and helpers to call them."""

import http.client
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pointsman.engines import Samples
from pointsman.engines.base import Engine, ProbeRequest
from pointsman.routing.endpoints import Metrics

TINY = Path(__file__).parents[1] / "models" / "tiny-pydoc-q8_0.gguf"
MODEL = "tiny"
JSON = "application/json"
TIMEOUT_S = 30.0


class Response(NamedTuple):
    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of the events of a stream. The last must be [DONE] and is left out."""
        lines = [line.removeprefix(b"data: ") for line in self.body.split(b"\n\n") if line]
        assert lines[-1] == b"[DONE]"
        return [json.loads(line) for line in lines[:-1]]


class Served:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    def fetch(self, path: str, body: object = None, method: str = "", timeout_s: float = TIMEOUT_S) -> Response:
        """Send one request on a new connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method or ("GET" if body is None else "POST"), path, data, {"content-type": JSON})
            answer = connection.getresponse()
            return Response(answer.status, answer.read())
        finally:
            connection.close()

    def probe(self, probe: ProbeRequest) -> Response:
        return self.fetch(probe.path, probe.body or None, probe.method)

    def metrics(self, engine: Engine) -> Metrics:
        found = engine.metrics(Samples(self.fetch(engine.metrics_path).body))
        assert found is not None
        return found

    def send(self, path: str, body: object) -> socket.socket:
        """Send a request without reading its response."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: {JSON}\r\ncontent-length: {len(data)}\r\n\r\n"
        client = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)
        client.sendall(head.encode() + data)
        return client


@contextmanager
def serving(engine: Engine, model: str = MODEL) -> Iterator[Served]:
    """Run an adapter's server process on a free port for the duration of a block."""
    launch = engine.launch(model, "127.0.0.1", 0)
    environment = {name: value for name, value in (os.environ | launch.env).items() if value is not None}
    process = subprocess.Popen(launch.argv, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        assert ready, "the server does not say that it is up"
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, f"the server ended with {process.wait()}"
        yield Served(process, int(line.rpartition(":")[2]))
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def last_line(module: str, *arguments: str, exit_code: int = os.EX_CONFIG) -> str:
    """The last line of output of a process that must fail. `exit_code`: by default, for good."""
    command = [sys.executable, "-m", f"pointsman.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == exit_code, done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Wait for a condition. Raises AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it has not come about"
        time.sleep(0.005)


def read_all(client: socket.socket) -> bytes:
    """Read until the server closes."""
    pieces = []
    while piece := client.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def read_until(client: socket.socket, end: bytes) -> bytes:
    """Read up to these bytes."""
    read = b""
    while not read.endswith(end):
        piece = client.recv(65536)
        assert piece, f"the server closed the connection after {read!r}"
        read += piece
    return read
