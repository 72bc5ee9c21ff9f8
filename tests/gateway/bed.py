"""A test bed: a real gateway on a real loop in its own thread, with real sockets on both sides.

Closing it fails if a request is in flight, an exception was raised on the loop, or a socket is open.
"""

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from pointsman.config import PointsmanPlan, load_manifest
from pointsman.control.desired import EngineAccess
from pointsman.gateway import gateway as timing
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.listeners import Listeners
from pointsman.gateway.pages import add_pages
from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.records import Record
from pointsman.runtimes.traffic import Lane
from pointsman.types import ExecutionInstance
from tests.gateway.backends import OK, Backend, Script, answers
from tests.gateway.wire import TIMEOUT_S, Client, Message, wait_for

T = TypeVar("T")

timing.SWEEP_S = 0.02  # keeps tests of timeouts short

CHAT_DEPLOYMENT: Mapping[str, Any] = {
    "name": "chat",
    "model": "m",
    "aliases": ["other-name"],
    "endpoints": [{"url": "http://127.0.0.1:1"}],
}


def plan_of(gateway: Mapping[str, Any] | None = None, *deployments: Mapping[str, Any]) -> PointsmanPlan:
    """The plan of a manifest; by default with one chat deployment."""
    manifest = {
        "gateway": {"listen": "127.0.0.1:0", "allowedHosts": ["gateway", "x"], **(gateway or {})},
        "deployments": [dict(one) for one in deployments or (CHAT_DEPLOYMENT,)],
    }
    return load_manifest(json.dumps(manifest))


class LoopThread:
    """An event loop in a thread. Records its exceptions."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self.errors: list[dict[str, Any]] = []
        """Contexts passed to the loop's exception handler."""
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the loop."""

        async def called() -> T:
            return function()

        return self.run(called())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop to its end."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(TIMEOUT_S)

    def close(self) -> None:
        self.run(self._settle())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    @staticmethod
    async def _settle() -> None:
        """Let transports finish closing."""
        for _ in range(5):
            await asyncio.sleep(0)


class Bed:
    """The gateway, its backends and its clients."""

    def __init__(self, gateway: Mapping[str, Any] | None = None, *deployments: Mapping[str, Any]) -> None:
        self._sockets_before = open_sockets()
        self.plan = plan_of(gateway, *deployments)
        self.thread = LoopThread()
        self.backends: list[Backend] = []
        self._clients: list[Client] = []
        self.is_ready = True
        self.gateway, self.listeners = self.thread.run(self._open())
        self.closing: list[Callable[[], None]] = []
        host, _, port = self.listeners.url.partition("://")[2].rpartition(":")
        self.address = (host, int(port))

    async def _open(self) -> tuple[Gateway, Listeners]:
        gateway = Gateway(self.plan.gateway, self.thread.loop)
        add_pages(gateway, lambda: self.is_ready)
        gateway.traffic.configure(self.plan.deployments)
        listeners = Listeners(gateway)
        await listeners.bind(self.plan.gateway)
        await listeners.open()
        return gateway, listeners

    # Backends and clients

    def backend(self, *scripts: Script, deployment: str = "chat", **facts: Any) -> Backend:
        """Add an instance that runs these scripts; by default it answers every request."""
        backend = Backend(scripts or (answers(OK),))
        self.backends.append(backend)
        self.admit(backend.port, deployment=deployment, **facts)
        return backend

    def admit(self, port: int, *, deployment: str = "chat", **facts: Any) -> str:
        """Add a ready instance at this port. Returns its name."""
        plan = next(plan for plan in self.plan.deployments if plan.name == deployment)
        name = f"{deployment}-{len(self.dispatcher(deployment).fleet)}"
        defaults = {
            "instance_id": name,
            "host": "127.0.0.1",
            "port": port,
            "model_name": plan.model,
            "adapters": frozenset(plan.names[1:]),
            "engine_names": EngineAccess().names(plan.model, plan.desired.aliases),
        }
        instance = ExecutionInstance(**{**defaults, **facts})
        self.thread.call(lambda: self.gateway.traffic.admit(deployment, instance))
        return instance.instance_id

    def client(self, *, narrow: bool = False) -> Client:
        """A new connection to the gateway; with small socket buffers if `narrow`."""
        connected = socket.socket()
        if narrow:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        listening = self.listeners._servers[0].sockets[0]  # type: ignore[attr-defined]
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384 if narrow else 1_000_000)
        connected.connect(self.address)
        client = Client(connected)
        client.settle = lambda: self.thread.call(lambda: None)
        self._clients.append(client)
        return client

    def local_client(self, path: Path) -> Client:
        """A new connection to the local socket."""
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(str(path))
        client = Client(connected)
        self._clients.append(client)
        return client

    def fetch(self, request: bytes) -> Message:
        """Send one request on a new connection."""
        client = self.client()
        try:
            return client.fetch(request)
        finally:
            client.close()

    # State

    def lane(self, deployment: str = "chat") -> Lane:
        return self.gateway.traffic._lane(deployment)

    def dispatcher(self, deployment: str = "chat") -> Dispatcher:
        return self.lane(deployment).dispatcher

    def record(self, request_id: str, deployment: str = "chat") -> Record:
        found = self.dispatcher(deployment).records.get(request_id)
        assert found is not None, f"no record of {request_id}"
        return found

    def newest(self, deployment: str = "chat") -> Record:
        return self.dispatcher(deployment).records.newest()[0]

    def waiting(self, deployment: str = "chat") -> int:
        dispatcher = self.dispatcher(deployment)
        return len(dispatcher) - dispatcher.running

    def running(self, deployment: str = "chat") -> int:
        return self.dispatcher(deployment).running

    def unfinished_requests(self) -> dict[str, Any]:
        """Requests that have not ended, by the table that has them."""
        gateway = self.gateway
        tables: dict[str, Any] = {
            "in flight": list(gateway.upstream.in_flight),
            "in dispatchers": {lane.plan.name: len(lane.dispatcher) for lane in gateway.traffic.all_lanes()},
            "in ledgers": {lane.plan.name: len(lane.dispatcher.ledger) for lane in gateway.traffic.all_lanes()},
        }
        return {
            table: left for table, left in tables.items() if (any(left.values()) if isinstance(left, dict) else left)
        }

    # Closing

    def close(self) -> None:
        """Close everything. Raises AssertionError if anything is left over."""
        with ExitStack() as stack:
            stack.callback(self.thread.close)
            stack.callback(wait_for, lambda: open_sockets() <= self._sockets_before, "sockets were left open", 5.0)
            for backend in self.backends:
                stack.callback(backend.close)
            stack.callback(self.thread.call, self.gateway.close)
            for close in (*self.closing, self.listeners.close):
                stack.callback(self.thread.call, close)
            for client in self._clients:
                client.close()
            self._assert_soon(lambda: not self.gateway.clients, "connections are left after all clients disconnected")
            self._assert_soon(
                lambda: not self.unfinished_requests(), lambda: f"requests are left over: {self.unfinished_requests()}"
            )
        assert self.thread.errors == []

    def _assert_soon(self, condition: Callable[[], bool], message: str | Callable[[], str]) -> None:
        try:
            wait_for(condition, timeout_s=5.0)
        except AssertionError:
            raise AssertionError(message if isinstance(message, str) else message()) from None


def open_sockets() -> int:
    """Number of open sockets of this process."""
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return 0
    found = 0
    for name in os.listdir(folder):  # noqa: PTH208 (a Path per entry is too slow)
        try:
            found += os.readlink(folder / name).startswith("socket:")  # noqa: PTH115
        except OSError:
            continue  # the descriptor of the folder itself
    return found


MakeBed = Callable[..., Bed]
"""Makes a bed that is closed after the test."""
