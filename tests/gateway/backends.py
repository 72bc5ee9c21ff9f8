"""Fake instances: TCP servers that run a script on each connection."""

import errno
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType

from tests.gateway.wire import Closed, Message, Wire, received, wait_for


class BackendConnection(Wire):
    """A connection from the gateway to a backend, as its script sees it."""

    def __init__(self, connected: socket.socket, backend: "Backend") -> None:
        super().__init__(connected)
        self.backend = backend
        self.piece = 0
        """Data is sent in pieces of this many bytes; 0 to send it whole."""
        self.closed = False
        """The script has ended, or the gateway has closed the connection."""

    def send(self, data: bytes, *, piece: int = 0) -> None:
        super().send(data, piece=piece or self.piece)

    def request(self) -> Message | None:
        """The next request; None if the gateway has closed the connection instead."""
        request = received(self)
        if request is not None:
            self.backend.received.append(request)
        return request

    def wait_for_close(self) -> None:
        """Send nothing until the gateway closes."""
        while self.more():
            pass


Script = Callable[[BackendConnection], None]


class Backend:
    """A listening socket with a script per connection; the last script serves all further connections."""

    def __init__(self, scripts: Sequence[Script], tls: ssl.SSLContext | None = None) -> None:
        self.received: list[Message] = []
        self.connections: list[BackendConnection] = []
        self._scripts = scripts
        self._tls = tls
        self._failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listening.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listening.accept()
            except OSError as error:
                if error.errno == errno.EMFILE:  # a test takes all descriptors for a while
                    time.sleep(0.002)
                    continue
                return
            if self._tls is not None:
                try:
                    connected = self._tls.wrap_socket(connected, server_side=True)
                except OSError:  # the client does not trust our certificate
                    connected.close()
                    continue
            line = BackendConnection(connected, self)
            script = self._scripts[min(len(self.connections), len(self._scripts) - 1)]
            self.connections.append(line)
            thread = threading.Thread(target=self._run, args=(script, line))
            self._threads.append(thread)
            thread.start()

    def _run(self, script: Script, connection: BackendConnection) -> None:
        try:
            script(connection)
        except (Closed, ConnectionError):
            pass  # the gateway may disconnect at any time
        except BaseException as failure:
            if connection.socket.fileno() >= 0 or not isinstance(failure, OSError):
                self._failures.append(failure)
        finally:
            connection.closed = True
            connection.close()

    def all_closed(self) -> bool:
        """Whether every connection has ended."""
        return all(line.closed for line in self.connections)

    def stop_listening(self) -> None:
        """Refuse new connections; existing ones stay."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._accepting.join()

    def close(self) -> None:
        """Close everything. Raises if a script failed."""
        if self._accepting.is_alive():
            self.stop_listening()
        for line in self.connections:
            if not line.closed:
                with suppress(OSError):
                    line.socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for failure in self._failures:
            raise failure

    def __enter__(self) -> "Backend":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@contextmanager
def never_accepting() -> Iterator[int]:
    """A port where connecting never completes: the listener does not accept, and its backlog is full."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=0)
    pending = [socket.socket() for _ in range(3)]
    try:
        for one in pending:
            one.setblocking(False)
            one.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]
    finally:
        for one in (listening, *pending):
            one.close()


# Responses


def answer(body: object, status: int = 200, headers: Iterable[str] = ("content-type: application/json",)) -> bytes:
    """A response with a content-length, as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = "".join(f"{line}\r\n" for line in headers).encode()
    return b"HTTP/1.1 %d Reason\r\n%bcontent-length: %d\r\n\r\n%b" % (status, lines, len(data), data)


def completion(text: str = "Hi", output: int = 2) -> dict[str, object]:
    """An engine's response to a chat request."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": output, "total_tokens": 5 + output},
    }


OK = answer(completion())
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(number: int = 0, end: bytes = b"\n\n") -> bytes:
    """An event with one token."""
    return b'data: {"choices":[{"index":0,"delta":{"content":"t%d"}}]}%b' % (number, end)


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


LAST_CHUNK = chunk(b"")


def stream(*events: bytes) -> bytes:
    """A complete stream with one event per chunk."""
    return STREAM + b"".join(chunk(one) for one in events) + LAST_CHUNK


# Scripts


def answers(*responses: bytes, piece: int = 0) -> Script:
    """Send these responses in order, the last one repeatedly, and keep the connection open."""

    def script(connection: BackendConnection) -> None:
        turn = 0
        while connection.request() is not None:
            connection.send(responses[min(turn, len(responses) - 1)], piece=piece)
            turn += 1

    return script


def sends(*parts: bytes, piece: int = 0) -> Script:
    """Send these bytes in response to one request, and close."""

    def script(connection: BackendConnection) -> None:
        if connection.request() is not None:
            for part in parts:
                connection.send(part, piece=piece)

    return script


def resets(*parts: bytes) -> Script:
    """Send these bytes in response to one request, and reset the connection."""

    def script(connection: BackendConnection) -> None:
        if connection.request() is not None:
            for part in parts:
                connection.send(part)
            connection.reset()

    return script


def hangs(*parts: bytes) -> Script:
    """Send these bytes in response to one request, then nothing until the gateway closes."""

    def script(connection: BackendConnection) -> None:
        if connection.request() is not None:
            for part in parts:
                connection.send(part)
            connection.wait_for_close()

    return script


def drips(first: bytes, drip: bytes) -> Script:
    """Send these bytes, then more every few milliseconds until the gateway closes."""

    def script(connection: BackendConnection) -> None:
        if connection.request() is None:
            return
        connection.send(first)
        connection.socket.settimeout(0.01)
        while True:
            connection.send(drip)
            with suppress(TimeoutError):
                if not connection.more():
                    return

    return script


def silent(connection: BackendConnection) -> None:
    """Accept the connection and never read or send anything."""
    connection.wait_for_close()


class Gate:
    """Holds responses back until it is opened."""

    def __init__(self, then: bytes = OK, first: bytes = b"") -> None:
        self._open = threading.Event()
        self._then = then
        self._first = first

    def open(self) -> None:
        self._open.set()

    def __call__(self, connection: BackendConnection) -> None:
        while connection.request() is not None:
            connection.send(self._first)
            wait_for(self._open.is_set, "the gate was not opened")
            connection.send(self._then)
