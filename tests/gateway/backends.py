"""Fake instances: TCP servers that run a script on each connection."""

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType

from tests.gateway.wire import Closed, Message, Wire, received, wait_for


class Line(Wire):
    """A connection of the gateway to a backend, as the script of the backend has it."""

    def __init__(self, connected: socket.socket, backend: "Backend") -> None:
        super().__init__(connected)
        self.backend = backend
        self.piece = 0
        """Send everything in pieces of this size; 0 for one piece."""
        self.over = False
        """The script has come to its end, or the gateway has closed the connection."""

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


Script = Callable[[Line], None]


class Backend:
    """A listening socket with a script for each connection: the first for the first, and the last for all others."""

    def __init__(self, scripts: Sequence[Script], tls: ssl.SSLContext | None = None) -> None:
        self.received: list[Message] = []
        self.lines: list[Line] = []
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
            except OSError:
                return
            if self._tls is not None:
                try:
                    connected = self._tls.wrap_socket(connected, server_side=True)
                except OSError:  # the client does not trust the certificate
                    connected.close()
                    continue
            line = Line(connected, self)
            script = self._scripts[min(len(self.lines), len(self._scripts) - 1)]
            self.lines.append(line)
            thread = threading.Thread(target=self._run, args=(script, line))
            self._threads.append(thread)
            thread.start()

    def _run(self, script: Script, line: Line) -> None:
        try:
            script(line)
        except (Closed, ConnectionError):
            pass  # the gateway may close at any time
        except BaseException as failure:
            if line.socket.fileno() >= 0 or not isinstance(failure, OSError):
                self._failures.append(failure)
        finally:
            line.over = True
            line.close()

    def all_over(self) -> bool:
        """Whether every connection has ended."""
        return all(line.over for line in self.lines)

    def stop_listening(self) -> None:
        """Connections are refused from here on; those that are there go on."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._accepting.join()

    def close(self) -> None:
        """End everything; fails if a script did."""
        if self._accepting.is_alive():
            self.stop_listening()
        for line in self.lines:
            if not line.over:
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
def deaf() -> Iterator[int]:
    """A port where connecting never ends: its backlog is full."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=0)
    filling = [socket.socket() for _ in range(3)]
    try:
        for one in filling:
            one.setblocking(False)
            one.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]
    finally:
        for one in (listening, *filling):
            one.close()


# Answers


def answer(body: object, status: int = 200, headers: Iterable[str] = ("content-type: application/json",)) -> bytes:
    """An answer with a length, as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = "".join(f"{line}\r\n" for line in headers).encode()
    return b"HTTP/1.1 %d Said\r\n%bcontent-length: %d\r\n\r\n%b" % (status, lines, len(data), data)


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
    """An event with a token."""
    return b'data: {"choices":[{"index":0,"delta":{"content":"t%d"}}]}%b' % (number, end)


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


LAST_CHUNK = chunk(b"")


def stream(*events: bytes) -> bytes:
    """A whole stream, an event in each chunk."""
    return STREAM + b"".join(chunk(one) for one in events) + LAST_CHUNK


# Scripts


def answers(*said: bytes, piece: int = 0) -> Script:
    """Answer request by request; the last answer is repeated. The connection is kept."""

    def script(line: Line) -> None:
        turn = 0
        while line.request() is not None:
            line.send(said[min(turn, len(said) - 1)], piece=piece)
            turn += 1

    return script


def says(*said: bytes, piece: int = 0) -> Script:
    """Answer one request with these bytes, and close."""

    def script(line: Line) -> None:
        if line.request() is not None:
            for part in said:
                line.send(part, piece=piece)

    return script


def resets(*said: bytes) -> Script:
    """Answer one request with this; once the gateway has read it, reset the connection."""

    def script(line: Line) -> None:
        if line.request() is not None:
            for part in said:
                line.send(part)
            line.reset()

    return script


def hangs(*said: bytes) -> Script:
    """Answer one request with this, and send nothing more until the gateway closes."""

    def script(line: Line) -> None:
        if line.request() is not None:
            for part in said:
                line.send(part)
            line.wait_for_close()

    return script


def mute(line: Line) -> None:
    """Accept the connection and send nothing; the request is not even read."""
    line.wait_for_close()


class Gate:
    """Holds answers back until it is opened."""

    def __init__(self, then: bytes = OK, first: bytes = b"") -> None:
        self._open = threading.Event()
        self._then = then
        self._first = first

    def open(self) -> None:
        self._open.set()

    def __call__(self, line: Line) -> None:
        while line.request() is not None:
            line.send(self._first)
            wait_for(self._open.is_set, "the gate should be opened")
            line.send(self._then)
