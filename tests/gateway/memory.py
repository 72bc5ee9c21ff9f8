"""The gateway without sockets, on recording transports: fast enough for thousands of examples per second."""

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.gateway import Gateway
from pointsman.gateway.pages import add_pages
from pointsman.gateway.upstream import RetryBudget
from pointsman.http.heads import Bytes
from pointsman.http.pool import ClientConnection, ConnectionPool, Outbox, ResponseListener
from pointsman.types import ExecutionInstance
from tests.gateway.backends import OK
from tests.gateway.bed import plan_of

_HEAD = re.compile(
    rb"HTTP/1\.1 ([1-5][0-9][0-9]) [\t\x20-\x7e\x80-\xff]+\r\n((?:[!-9;-~]+: ?[\t\x20-\x7e\x80-\xff]*\r\n)*)\r\n"
)
_LENGTH = re.compile(rb"(?im)^content-length: ?([0-9]+)\r$")
_REQUEST = re.compile(
    rb"POST /v1/[a-z/]+(?:\?[\x21-\x7e]*)? HTTP/1\.1\r\n((?:[!-9;-~]+: ?[\t\x20-\x7e\x80-\xff]*\r\n)+)\r\n"
)


class ManualLoop:
    """A loop that the test runs step by step. Timers never fire; exceptions propagate to the test."""

    def __init__(self) -> None:
        self._soon: deque[Callable[[], object]] = deque()

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self._soon.append(lambda: callback(*args))

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> "Never":
        return Never()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise AssertionError(context) from context.get("exception")

    def turn(self) -> None:
        while self._soon:
            self._soon.popleft()()


class Never:
    """A timer that does not fire."""

    def cancel(self) -> None: ...


class FakeTransport(asyncio.Transport):
    """Records the written data."""

    def __init__(self, loop: ManualLoop, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self._loop = loop
        self._protocol = protocol
        self.written = bytearray()
        self.reads = True
        self.aborted = False
        self.finished = False
        """Whether write_eof was called."""
        self._closing = False

    def write(self, data: Any) -> None:
        if not self._closing:
            assert not self.finished, "write after write_eof"
            self.written += data

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.finished = True

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.aborted = True
        self.close()

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        assert not self._closing
        self.reads = False

    def resume_reading(self) -> None:
        assert not self._closing
        self.reads = True

    def get_write_buffer_size(self) -> int:
        return 0


class MemoryPool(ConnectionPool):
    """Connections to a fake instance whose responses the test provides."""

    def __init__(self, instance: ExecutionInstance, loop: ManualLoop, outbox: Outbox) -> None:
        super().__init__(instance, cast(asyncio.AbstractEventLoop, loop), outbox, 1.0)
        self.turned = loop
        self.made: list[tuple[ClientConnection, FakeTransport]] = []

    def send(self, listener: ResponseListener, head: bytes, body: Bytes, *, fresh: bool = False) -> Any:
        while self._idle and not fresh:
            if not self._idle[-1].transport.is_closing():
                return super().send(listener, head, body)
            self._idle.pop()
        connection = ClientConnection(self)
        transport = FakeTransport(self.turned, connection)
        connection.connection_made(transport)
        self.made.append((connection, transport))
        connection.send(listener, head, body)
        return connection


class Memory:
    """A gateway with one instance and client connections, all driven by the test."""

    def __init__(self, **gateway: Any) -> None:
        self.loop = ManualLoop()
        plan = plan_of(gateway)
        self.gateway = Gateway(plan.gateway, cast(asyncio.AbstractEventLoop, self.loop))
        self.gateway.upstream.retries = RetryBudget(1.0, reserve=1e9)  # examples must not affect each other
        add_pages(self.gateway, lambda: True)
        self.gateway.traffic.configure(plan.deployments)
        instance = ExecutionInstance(instance_id="i", host="127.0.0.1", port=1, model_name="m")
        self.gateway.traffic.admit("chat", instance)
        self.pool = MemoryPool(instance, self.loop, self.gateway.outbox)
        self.gateway.upstream.pools["i"] = self.pool

    def client(self) -> tuple[GatewayConnection, FakeTransport]:
        connection = GatewayConnection(self.gateway)
        transport = FakeTransport(self.loop, connection)
        connection.connection_made(transport)
        return connection, transport

    def answer_all(self, response: bytes = OK) -> None:
        """Send a response to every open request of the instance, once."""
        answered: set[ResponseListener | None] = {None}
        while open_connections := [c for c, t in self.pool.made if c.listener not in answered and not t.is_closing()]:
            for connection in open_connections:
                answered.add(connection.listener)
                connection.data_received(response)
            self.loop.turn()

    def disconnect_all(self) -> None:
        """Close all client connections and check that nothing is left of them."""
        made, idle = self.pool.made, self.pool._idle
        self.pool.made, self.pool._idle = [], []
        for client in list(self.gateway.clients):
            client.transport.abort()
        self.loop.turn()
        paused = [one for one, transport in made if one in idle and not transport.reads and not transport.is_closing()]
        assert paused == [], "an idle connection has reading paused"
        lane = self.gateway.traffic.lanes["chat"]
        left = (
            self.gateway.upstream.in_flight,
            len(lane.dispatcher),
            len(lane.dispatcher.ledger),
            self.gateway.clients,
        )
        assert left == ({}, 0, 0, set())


def statuses(written: bytes, *, cut: bool = False) -> list[int]:
    """The statuses of pipelined responses, checked strictly. `cut`: the last one may be incomplete."""
    found: list[int] = []
    at = 0
    while at < len(written):
        head = _HEAD.match(written, at)
        if head is None:
            assert cut, f"no head: {written[at : at + 200]!r}"
            return found
        status, at = int(head[1]), head.end()
        length = _LENGTH.search(head[2])
        if status < 200:
            continue
        found.append(status)
        if length is not None:
            at += int(length[1])
        elif b"transfer-encoding: chunked\r\n" in head[2]:
            while True:
                size, _, _ = written[at : at + 20].partition(b"\r\n")
                if not size or not re.fullmatch(rb"[0-9a-f]+", size):
                    assert cut, f"no chunk: {written[at : at + 50]!r}"
                    return found
                at += len(size) + 2 + int(size, 16) + 2
                if size == b"0":
                    break
        else:
            assert b"connection: close\r\n" in head[2] or status in (204, 304)
            at = len(written) if status not in (204, 304) else at
    assert at == len(written) or cut, "the last response is incomplete"
    return found


def requests(written: bytes) -> list[bytes]:
    """The bodies of pipelined requests, checked strictly."""
    found, at = [], 0
    while at < len(written):
        head = _REQUEST.match(written, at)
        assert head is not None, f"no request: {written[at : at + 200]!r}"
        lines = head[1].lower().split(b"\r\n")
        names = [line.partition(b":")[0] for line in lines]
        assert names.count(b"content-length") == names.count(b"host") == 1
        assert not {b"transfer-encoding", b"connection", b"upgrade", b"authorization", b"expect"} & set(names)
        [length] = [line.partition(b":")[2] for line in lines if line.startswith(b"content-length:")]
        at = head.end() + int(length)
        found.append(written[head.end() : at])
    assert at == len(written)
    return found


def read_into_buffers(client: GatewayConnection, data: bytes) -> int:
    """Deliver bytes as a transport does. Returns how many were read into the buffer of a body."""
    direct, at = 0, 0
    while at < len(data):
        space = client.get_buffer(-1)
        piece = data[at : at + len(space)]
        space[: len(piece)] = piece
        direct += client.parser.space is not None and len(piece)
        client.buffer_updated(len(piece))
        at += len(piece)
    return direct
