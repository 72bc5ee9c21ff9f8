"""Long JSON bodies: counted piece by piece before they are parsed, and few of them parsed in one turn of the loop.

A parser cannot be interrupted, and its time depends on what a body consists of: 31 MB as one string take 8 ms, as
millions of tiny values ten times that. Enters: requests with long bodies. Leaves: the same requests, perhaps in a later
turn, or why they are refused. The one rule: no step begins in a turn that has used up `STEPS_S`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from pointsman.gateway.connection import GatewayConnection, PendingAnswer
from pointsman.http.buffers import LARGE_BYTES
from pointsman.http.heads import Bytes

STEPS_S = 0.002
"""How long steps may take in one turn of the loop before the rest waits for the next."""
PIECE_BYTES = 32 * 1024
"""What is counted in one step."""


class JsonCounts(NamedTuple):
    """What a JSON text consists of, outside its strings."""

    containers: int = 0
    """Lists and mappings."""
    values: int = 0
    """Elements of lists, and fields."""
    names: int = 0
    """Names of fields."""
    blanks: int = 0
    """Spaces, tabs and line ends."""


MAX_JSON = JsonCounts(containers=250_000, values=1_000_000, names=250_000, blanks=4 * 1024 * 1024)
"""Of a body above `LARGE_BYTES`; a shorter one cannot have enough to matter. Each takes about 5 ms to parse."""


class JsonCounter:
    """Counts what a body consists of, without reading it."""

    def __init__(self, body: Bytes) -> None:
        self._body = memoryview(body)
        self._at = 0
        self._in_string = False
        self.counts = JsonCounts()

    def step(self) -> bool:
        """Count the next piece. Returns whether the end is reached."""
        piece = bytes(self._body[self._at : self._at + PIECE_BYTES])
        self._at += len(piece)
        if piece.endswith(b"\\") and (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # it escapes the next byte
            piece += bytes(self._body[self._at : self._at + 1])
            self._at += 1
        if not self._in_string or b'"' in piece:
            self._count(piece)
        return self._at >= len(self._body)

    def problem(self) -> str:
        """What there is too much of; empty if nothing."""
        for name, found, most in zip(JsonCounts._fields, self.counts, MAX_JSON, strict=True):
            if found > most:
                return f"the body has more than {most:,} {_WORDS[name]}; a body above 1 MiB may not"
        return ""

    def _count(self, piece: bytes) -> None:
        if b"\\" in piece:
            piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        parts = piece.split(b'"')
        text = b"".join(parts[self._in_string :: 2])
        if len(parts) % 2 == 0:
            self._in_string = not self._in_string
        containers, values, names, blanks = self.counts
        self.counts = JsonCounts(
            containers + text.count(b"[") + text.count(b"{"),
            values + text.count(b","),
            names + text.count(b":"),
            blanks + len(text) - len(text.translate(None, b" \t\r\n")),
        )


_WORDS = {
    "containers": "lists and mappings",
    "values": "values",
    "names": "names of fields",
    "blanks": "blank characters",
}


class LongBody(PendingAnswer):
    """A request with a long body that waits to be parsed."""

    def __init__(self, client: GatewayConnection, body: Bytes, serve: Callable[[str], None]) -> None:
        super().__init__(client)
        self._serve = serve
        self._counter = JsonCounter(body) if len(body) >= LARGE_BYTES else None

    def step(self) -> bool:
        """Go on with it. Returns whether it is done."""
        client = self.client
        if client is None:
            return True
        problem = ""
        if self._counter is not None:
            is_counted, problem = self._counter.step(), self._counter.problem()
            if not is_counted and not problem:
                return False
            if not problem:
                self._counter = None  # parse it in a step of its own
                return False
        client.serving = None
        self._serve(problem)
        return True


class LongBodies:
    """The requests with long bodies, in turns."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[LongBody] = deque()
        self._is_scheduled = False

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def add(self, client: GatewayConnection, body: Bytes, serve: Callable[[str], None]) -> None:
        """Serve a request now, or in a later turn. `serve` is called with what is wrong with the body, empty if
        nothing, unless its client disconnects before."""
        client.serving = one = LongBody(client, body, serve)
        self._waiting.append(one)
        if not self._is_scheduled:
            self._take_steps()

    def _take_steps(self) -> None:
        until = time.monotonic() + STEPS_S
        while self._waiting and time.monotonic() < until:
            one = self._waiting.popleft()
            client = one.client
            try:
                if not one.step():
                    self._waiting.append(one)
            except Exception as error:
                self._loop.call_exception_handler({"message": "a request broke the server", "exception": error})
                if client is not None:
                    client.transport.abort()
        self._is_scheduled = True
        self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_scheduled = False
        if self._waiting:
            self._take_steps()
