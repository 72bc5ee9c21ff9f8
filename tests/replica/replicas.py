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
from tests.simulator.servers import PATIENCE_S, until

SECRET = "open sesame"


class Answer(NamedTuple):
    status: int
    kind: str
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def value(self, shared: SharedBuffers | None = None) -> Any:
        assert self.status == 200, self.body
        return decode_value(self.body, shared)


class Replica:
    """A running replica, and a connection that is kept open."""

    def __init__(self, process: subprocess.Popen[str], port: int, shared: SharedBuffers) -> None:
        self.process = process
        self.port = port
        self.shared = shared
        self._kept: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, body: bytes | None = None, secret: str = SECRET) -> Answer:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            return _asked(connection, method, path, body, secret)
        finally:
            connection.close()

    def call(self, method: str, *args: Any, **head: Any) -> Answer:
        """One call on a connection of its own."""
        return self.ask("POST", "/call", call(method, *args, shared=self.shared, **head))

    def again(self, method: str, *args: Any, **head: Any) -> Answer:
        """One call on the connection that is kept."""
        if self._kept is None:
            self._kept = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        return _asked(self._kept, "POST", "/call", call(method, *args, shared=self.shared, **head), SECRET)

    def input(self, body: bytes, paths: list[Any], **http_head: Any) -> Answer:
        """A call of an ingress."""
        head = HttpHead(http_head.pop("method", "POST"), "/app", **http_head)
        sent = CallHead(method="input", kwargs=template({"paths": paths}), http=head)
        return self.ask("POST", "/call", encode_call(sent, [encode_plain(body)]))

    def value(self, method: str, *args: Any, **head: Any) -> Any:
        return self.call(method, *args, **head).value(self.shared)

    def send(self, method: str, *args: Any, **head: Any) -> socket.socket:
        """A call whose answer is not read yet."""
        body = call(method, *args, shared=self.shared, **head)
        lines = (
            f"POST /call HTTP/1.1\r\nhost: test\r\nx-pointsman-secret: {SECRET}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        client = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
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
        args=template([placeholder(place) for place in range(len(args))]),
        kwargs=template({name: placeholder(len(args) + place) for place, name in enumerate(names)}),
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
    """A replica on a free port, until the end of the block."""
    process = launch(folder, environment, **recipe)
    running = None
    try:
        assert process.stdout is not None
        said, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        assert said, "the replica does not say that it is up"
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
    return running.ask("GET", "/ready").status == 200


def last_words(folder: Path, **recipe: Any) -> str:
    """The last line of a replica that must fail to start."""
    process = launch(folder, **recipe)
    try:
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1, said
    return said.splitlines()[-1].replace(str(folder), "FOLDER")


def _asked(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, secret: str) -> Answer:
    connection.request(method, path, body, {"x-pointsman-secret": secret})
    answer = connection.getresponse()
    return Answer(answer.status, answer.headers.get("content-type", ""), answer.read())


__all__ = ["SECRET", "Answer", "Form", "Replica", "call", "is_ready", "last_words", "launch", "replica", "until"]
