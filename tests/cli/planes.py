"""A plane's admin API with answers made up beforehand: real HTTP over a real unix socket, or over TCP."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseServer, TCPServer, ThreadingMixIn, UnixStreamServer
from typing import Any, NamedTuple

import pytest

from pointsman.reasons import Reason, counted

CHANGES = {
    "changes": [
        {"what": "start", "subject": "chat-3", "why": "3 replicas are wanted, 2 there"},
        {"what": "policy", "subject": "chat", "why": "its scheduling has changed"},
    ],
    "text": "what    subject  why\n------  -------  ------------------------------\n"
    "start   chat-3   3 replicas are wanted, 2 there\npolicy  chat     its scheduling has changed",
}
NO_CHANGES: dict[str, Any] = {"changes": [], "text": ""}


class Asked(NamedTuple):
    """A request that the plane got."""

    method: str
    target: str
    body: Any
    key: str


class Plane:
    """Answers what it was told to answer. An answer that is a list is given item by item, the last one for ever."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], Any] = {}
        """(method, target without /admin/v1/) -> JSON, or (status, JSON)."""
        self.asked: list[Asked] = []
        self.server: BaseServer | None = None

    def answer(self, method: str, target: str) -> tuple[int, bytes]:
        known = self.answers.get((method, target))
        if isinstance(known, list):
            known = known.pop(0) if len(known) > 1 else known[0]
        if known is None:
            known = 404, {"error": {"message": f"there is no {method} {target}", "type": "x", "code": "not_found"}}
        status, said = known if isinstance(known, tuple) else (200, known)
        return status, said if isinstance(said, bytes) else json.dumps(said).encode()

    @contextmanager
    def on(self, server: type[BaseServer], address: Any) -> Iterator[Any]:
        """Serve there for a while; yields the address."""
        plane = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def do_DELETE(self) -> None:
                self._answer()

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                target = self.path.removeprefix("/admin/v1/")
                key = self.headers.get("authorization", "")
                plane.asked.append(Asked(self.command, target, json.loads(body) if body else None, key))
                status, said = plane.answer(self.command, target)
                self.send_response(status)
                self.send_header("content-length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)
                if target == "down":
                    threading.Thread(target=plane.stop).start()

            def log_message(self, *args: Any) -> None: ...

        self.server = server(address, Handler)
        thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self.server.server_address
        finally:
            self.stop()
            thread.join()

    def stop(self) -> None:
        """Stop listening."""
        assert self.server is not None
        self.server.shutdown()
        self.server.server_close()


class LocalServer(ThreadingMixIn, UnixStreamServer):
    """HTTP over a unix socket, whose path may be long."""

    daemon_threads = True

    def server_bind(self) -> None:
        path = Path(self.server_address)  # type: ignore[arg-type]
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            self.socket.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)

    def server_close(self) -> None:
        super().server_close()
        Path(self.server_address).unlink(missing_ok=True)  # type: ignore[arg-type]


class OpenServer(ThreadingMixIn, TCPServer):
    """HTTP over TCP."""

    daemon_threads = True


def pointsman(*args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "pointsman.cli.main", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **env})


def instance(name: str, phase: str = "ready", **facts: Any) -> dict[str, Any]:
    """As the status tells it."""
    told = {
        "id": name, "phase": phase, "url": "http://127.0.0.1:40001", "process": "4242", "restarts": 0, "reason": "",
        "since_s": 75.0, "in_flight": 1, "max_concurrency": 4, "waiting": 0.0, "running": 1.0, "kv_cache_usage": 0.25,
        "metrics_age_s": 0.4,
    }  # fmt: skip
    if facts.get("reason") and "cause" not in facts:
        told["cause"] = Reason("exited", {"why": facts["reason"]}).as_dict()
    return told | facts


def not_ready_yet(probe: str) -> dict[str, Any]:
    reason = Reason("not-ready-yet", {"probe": probe})
    return {"reason": str(reason), "cause": reason.as_dict()}


def without_memory(free: float) -> dict[str, Any]:
    """What the status says of an instance without a place."""
    lacking = Reason("too-little-memory", {"needed_bytes": 12 * 2**30, "free_bytes": free * 2**30})
    no_place = Reason("no-place", {"rejected": counted([("w0", lacking)])})
    return {"reason": str(no_place), "cause": no_place.as_dict(), "unplaced": True}


def deployment(name: str, desired: int, *instances: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """As the status tells it."""
    told: dict[str, Any] = {
        "name": name, "model": "smollm2", "aliases": [], "desired": desired,
        "ready": sum(one["phase"] == "ready" for one in instances), "strategy": "slo-miss", "waiting": 0,
        "running": 2, "instances": list(instances),
    }  # fmt: skip
    return told | facts


def status(*deployments: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """Of the whole plane."""
    told = {
        "ready": all(one["ready"] for one in deployments), "state_dir": "/state", "generation": 3, "uptime_s": 300.0,
        "worker": {"name": "here", "cpus": 2, "memory_bytes": 2**33}, "deployments": list(deployments), "problems": [],
    }  # fmt: skip
    return told | facts


READY = status(
    deployment("chat", 2, instance("chat-1"), instance("chat-2", url="http://127.0.0.1:40002", process="4243"))
)


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    """Runs in the state directory that the environment names."""
    made = Plane()
    made.answers["GET", "status"] = READY
    monkeypatch.setenv("POINTSMAN_STATE", str(tmp_path))
    monkeypatch.delenv("NO_COLOR", raising=False)
    with made.on(LocalServer, str(tmp_path / "admin.sock")):
        yield made
