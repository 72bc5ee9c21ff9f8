"""Replicas as real processes, and helpers to call them."""

import http.client
import json
import os
import select
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pointsman.engines.python import Python
from pointsman.wire import (
    CallHead,
    Form,
    HttpHead,
    decode_value,
    encode_call,
    encode_plain,
    encode_value,
    placeholder,
    template,
)
from pointsman.wire.shared_memory import SharedBuffers
from tests.simulator.servers import TIMEOUT_S, until

SECRET = "open sesame"


class Response(NamedTuple):
    status: int
    kind: str
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def value(self, shared: SharedBuffers | None = None) -> Any:
        assert self.status == 200, self.body
        return decode_value(self.body, shared)


class Replica:
    """A running replica with a keep-alive connection."""

    def __init__(self, process: subprocess.Popen[str], port: int, shared: SharedBuffers) -> None:
        self.process = process
        self.port = port
        self.shared = shared
        self._kept: http.client.HTTPConnection | None = None

    def fetch(self, method: str, path: str, body: bytes | None = None, secret: str = SECRET) -> Response:
        """Send one request on a new connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            return _fetched(connection, method, path, body, secret)
        finally:
            connection.close()

    def call(self, method: str, *args: Any, **head: Any) -> Response:
        """Make one call on a new connection."""
        return self.fetch("POST", "/call", call(method, *args, shared=self.shared, **head))

    def call_again(self, method: str, *args: Any, **head: Any) -> Response:
        """Make one call on the keep-alive connection."""
        if self._kept is None:
            self._kept = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        return _fetched(self._kept, "POST", "/call", call(method, *args, shared=self.shared, **head), SECRET)

    def input(self, body: bytes, paths: list[Any], **http_head: Any) -> Response:
        """Call an ingress."""
        head = HttpHead(http_head.pop("method", "POST"), "/app", **http_head)
        sent = CallHead(method="input", kwargs=template({"paths": paths}), http=head)
        return self.fetch("POST", "/call", encode_call(sent, [encode_plain(body)]))

    def value(self, method: str, *args: Any, **head: Any) -> Any:
        return self.call(method, *args, **head).value(self.shared)

    def send(self, method: str, *args: Any, **head: Any) -> socket.socket:
        """Send a call without reading its response."""
        body = call(method, *args, shared=self.shared, **head)
        lines = (
            f"POST /call HTTP/1.1\r\nhost: test\r\nx-pointsman-secret: {SECRET}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        client = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)
        client.sendall(lines.encode() + body)
        return client

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()


def call(method: str, *args: Any, shared: SharedBuffers | None = None, **head: Any) -> bytes:
    """A call with each argument as a blob."""
    names = head.pop("kwargs", {})
    sent = CallHead(
        method=method,
        args=template([placeholder(index) for index in range(len(args))]),
        kwargs=template({name: placeholder(len(args) + index) for index, name in enumerate(names)}),
        **head,
    )
    return encode_call(sent, [encode_value(value, shared) for value in (*args, *names.values())])


def launch(folder: Path, environment: Mapping[str, str] | None = None, **recipe: Any) -> subprocess.Popen[str]:
    engine = Python(**({"kind": "class", "app": "app", "node": "node", "folder": str(folder)} | recipe))
    started = engine.launch("app.node", "127.0.0.1", 0)
    shared = folder / "shm"
    shared.mkdir(exist_ok=True)
    ours = {"POINTSMAN_SECRET": SECRET, "POINTSMAN_SHM": str(shared), "POINTSMAN_SOCKET": str(folder / "gateway")}
    merged = {**os.environ, **started.env, **ours, **(environment or {})}
    known = {name: value for name, value in merged.items() if value is not None}
    return subprocess.Popen(started.argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=known, text=True)


@contextmanager
def replica(
    folder: Path, environment: Mapping[str, str] | None = None, ready: bool = True, **recipe: Any
) -> Iterator[Replica]:
    """Run a replica on a free port for the duration of a block."""
    process = launch(folder, environment, **recipe)
    running = None
    try:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        assert readable, "the replica did not report that it is up"
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, process.communicate()[1]
        running = Replica(process, int(line.rpartition(":")[2]), SharedBuffers(folder / "shm"))
        if ready:
            until(lambda: is_ready(running))
        yield running
    finally:
        if running is not None:
            running.close()
            running.shared.close()
        process.kill()
        process.communicate()


def is_ready(running: Replica) -> bool:
    assert running.process.poll() is None, running.process.communicate()[1]
    return running.fetch("GET", "/ready").status == 200


def last_line(folder: Path, *, exit_code: int = os.EX_CONFIG, **recipe: Any) -> str:
    """The last line of output of a replica that must fail to start. `exit_code`: by default, for good."""
    process = launch(folder, **recipe)
    try:
        _, output = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == exit_code, output
    return output.splitlines()[-1].replace(str(folder), "FOLDER")


def _fetched(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, secret: str
) -> Response:
    connection.request(method, path, body, {"x-pointsman-secret": secret})
    answer = connection.getresponse()
    return Response(answer.status, answer.headers.get("content-type", ""), answer.read())


__all__ = ["SECRET", "Response", "Form", "Replica", "call", "is_ready", "last_line", "launch", "replica", "until"]
