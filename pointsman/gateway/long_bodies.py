"""Long JSON bodies: they are counted piece by piece before they are parsed, and few are parsed in one turn of the loop.

A parser cannot be interrupted, and the time that it takes depends on the content: 31 MB take 8 ms if they are one
string. If they are millions of tiny values, they take ten times as long. Enters: requests with long bodies. Leaves: the
same requests, perhaps in a later turn, or the reasons for their refusal. The one rule: no step begins in a turn that
has used up `STEPS_S`.
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
"""How long steps may take in one turn of the loop. The remaining steps wait for the next turn."""
PIECE_BYTES = 32 * 1024
"""Bytes that are counted in one step."""


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


class JsonLimits(NamedTuple):
    """What a JSON body may consist of."""

    most: JsonCounts
    what: str
    """The end of the error message: which bodies the limit applies to, or what the client can do."""
    counted_bytes: int = 0
    """Bodies shorter than this are not counted."""

    def problem(self, counts: JsonCounts) -> str:
        """The error message for a body that exceeds a limit; empty if it exceeds none."""
        for name, found, most in zip(JsonCounts._fields, counts, self.most, strict=True):
            if found > most:
                return f"the body has more than {most:,} {_WORDS[name]}; {self.what}"
        return ""


_BLANKS = 4 * 1024 * 1024
MODEL_JSON = JsonLimits(
    JsonCounts(containers=250_000, values=1_000_000, names=250_000, blanks=_BLANKS),
    "a body above 1 MiB may not",
    LARGE_BYTES,
)
"""For requests to models. They are split into fields, and the bytes of each field stay as they are. Skipping the
maximum of one kind of element takes about 5 ms."""
MESSAGES_JSON = JsonLimits(
    JsonCounts(containers=15_000, values=100_000, names=50_000, blanks=_BLANKS), "a request for a message may not"
)
"""For requests that may have to be translated: every value is decoded, and encoded again."""
INPUT_JSON = JsonLimits(
    JsonCounts(containers=20_000, values=300_000, names=50_000, blanks=_BLANKS),
    "send numbers as an array, or give the application an ingress",
)
"""For inputs whose parts go to several nodes: every value is decoded, checked and encoded again. A list of 300,000
numbers takes about 15 ms, as do 20,000 mappings."""


class JsonCounter:
    """Counts what a body consists of, without parsing it."""

    def __init__(self, body: Bytes) -> None:
        self._body = memoryview(body)
        self._at = 0
        self._in_string = False
        self.counts = JsonCounts()

    def step(self) -> bool:
        """Count the next piece. Returns whether it was the last one."""
        piece = bytes(self._body[self._at : self._at + PIECE_BYTES])
        self._at += len(piece)
        if piece.endswith(b"\\") and (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # it ends inside an escape
            piece += bytes(self._body[self._at : self._at + 1])
            self._at += 1
        if not self._in_string or b'"' in piece:
            self._count(piece)
        return self._at >= len(self._body)

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


async def count_json(body: Bytes, limits: JsonLimits) -> str:
    """Count what a body consists of, one piece per turn of the loop. Returns the error message; empty if the body is
    fine."""
    counter = JsonCounter(body)
    while not counter.step() and not limits.problem(counter.counts):
        await asyncio.sleep(0)
    return limits.problem(counter.counts)


_WORDS = {
    "containers": "lists and mappings",
    "values": "values",
    "names": "names of fields",
    "blanks": "blank characters",
}


class LongBody(PendingAnswer):
    """A request with a long body that waits to be parsed."""

    def __init__(
        self, client: GatewayConnection, body: Bytes, limits: JsonLimits, serve: Callable[[str], None]
    ) -> None:
        super().__init__(client)
        self._limits = limits
        self._serve = serve
        self._counter = JsonCounter(body) if len(body) >= limits.counted_bytes else None

    def step(self) -> bool:
        """Take the next step. Returns whether the request is done."""
        client = self.client
        if client is None:
            return True
        problem = ""
        if self._counter is not None:
            is_counted, problem = self._counter.step(), self._limits.problem(self._counter.counts)
            if not is_counted and not problem:
                return False
            if not problem:
                self._counter = None  # parse it in a step of its own
                return False
        client.serving = None
        self._serve(problem)
        return True


class LongBodies:
    """The requests with long bodies; they take their steps in turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[LongBody] = deque()
        self._is_scheduled = False

    def __len__(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    def add(self, client: GatewayConnection, body: Bytes, limits: JsonLimits, serve: Callable[[str], None]) -> None:
        """Serve a request now, or in a later turn. `serve` gets the error message, which is empty if the body is fine.
        If the client disconnects first, `serve` is not called."""
        client.serving = one = LongBody(client, body, limits, serve)
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
