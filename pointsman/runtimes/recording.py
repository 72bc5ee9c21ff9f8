"""Live traffic as a recording: lengths and salted hashes of blocks, never text.

Enters: requests as they arrive, and records of those that have ended. Leaves: lines in the Mooncake format. The one
rule: requests are recorded only while the recording is read. If it is not read for a while, it ends.
"""

from collections import deque
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from pointsman.errors import PointsmanError
from pointsman.routing.canary import SESSION_HEADER
from pointsman.routing.dispatcher import Dispatcher, tap
from pointsman.routing.events import Arrived
from pointsman.routing.records import Record
from pointsman.runtimes.interface import Clock, Timer
from pointsman.types import RequestMetadata, RequestPriority

if TYPE_CHECKING:
    from pointsman.runtimes.traffic import Traffic

BLOCK_TOKENS = 512
BLOCK_BYTES = 4 * BLOCK_TOKENS
"""A token takes about four bytes as text, and four bytes as an id."""
LEASE_S = 15.0
"""A recording that is not read for this long ends."""
MAX_LINES = 50_000
"""Maximum lines that wait to be read; older ones are dropped."""
MAX_OPEN = 50_000
"""Maximum requests in flight."""
LISTENER = "recording"


class RecordedLine(msgspec.Struct, omit_defaults=True):
    """One request, as it is written to the recording."""

    timestamp: int
    """Milliseconds since the recording began."""
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: str = ""
    tenant: str = ""
    priority: int = int(RequestPriority.NORMAL)
    slo_ms: float | None = None
    model: str = ""


class RecordingLease(msgspec.Struct, frozen=True):
    """A recording and its settings, the same for all gateways of a plane."""

    id: str
    salt: str
    """Hex digits. No recording contains the salt, so that hashes cannot be compared with those of known texts."""
    began: float
    """When the recording began, on the clock of gateways."""
    model: str = ""
    """The model to record; if empty, all models are recorded."""
    stop: bool = False


class RecordedPart(msgspec.Struct):
    """The lines from one gateway that were not read yet."""

    lines: list[RecordedLine] = []
    left_out: int = 0
    """Requests that were refused, failed, or have no known number of output tokens."""
    dropped: int = 0
    """Lines that were not read in time."""
    unfinished: int = 0
    """Requests that were in flight when the recording ended."""

    def add(self, other: "RecordedPart") -> None:
        self.lines = self.lines + other.lines
        self.left_out += other.left_out
        self.dropped += other.dropped
        self.unfinished += other.unfinished


def block_ids(request: RequestMetadata, salt: bytes) -> list[int]:
    """A number for each block of the prompt. Each number also depends on everything before the block."""
    if request.token_ids is not None:
        text = b"".join(token.to_bytes(4, "big") for token in request.token_ids)
    else:
        parts = request.prompt if isinstance(request.prompt, tuple) else (request.prompt,)
        text = b"\0".join(one.encode() if isinstance(one, str) else bytes(one) for one in parts)
    link, found = request.model_name.encode(), []
    for start in range(0, len(text), BLOCK_BYTES):
        link = blake2b(link + text[start : start + BLOCK_BYTES], key=salt, digest_size=8).digest()
        found.append(int.from_bytes(link, "big") >> 11)  # JSON numbers are exact up to 53 bits
    return found


def opaque(name: str, salt: bytes) -> str:
    return blake2b(name.encode("utf-8", "replace"), key=salt, digest_size=6).hexdigest() if name else ""


class Recorder:
    """Records the lanes of one process while the recording is read."""

    def __init__(self, traffic: "Traffic", clock: Clock) -> None:
        self._traffic = traffic
        self._clock = clock
        self._lease: RecordingLease | None = None
        self._salt = b""
        self._part = RecordedPart()
        self._lines: deque[RecordedLine] = deque()
        self._open: dict[str, RecordedLine] = {}
        self._timer: Timer | None = None
        self._watched: list[Dispatcher] = []

    def read(self, lease: RecordingLease) -> RecordedPart:
        """The lines since the last call; the first call begins the recording. Raises `PointsmanError`."""
        if self._lease is not None and self._lease.id != lease.id:
            raise PointsmanError("another recording is running; one at a time is possible")
        if self._lease is None and not lease.stop:
            self._lease, self._salt = lease, bytes.fromhex(lease.salt)
        if self._timer is not None:
            self._timer.cancel()
        if lease.stop:
            self._end()
        else:
            self._watch()  # this includes lanes that were opened since
            self._timer = self._clock.call_at(self._clock.now() + LEASE_S, self._end)
        part, self._part = self._part, RecordedPart()
        part.lines = list(self._lines)
        self._lines.clear()
        return part

    def _watch(self) -> None:
        assert self._lease is not None
        for lane in self._traffic.lanes.values():
            dispatcher, named = lane.dispatcher, self._lease.model in ("", *lane.plan.names)
            if named and not lane.plan.internal and dispatcher not in self._watched:
                self._watched.append(dispatcher)
                tap(dispatcher, Arrived, self._arrived)
                dispatcher.listen(self._ended, LISTENER)

    def _end(self) -> None:
        for dispatcher in self._watched:
            tap(dispatcher, Arrived, None)
            dispatcher.listen(None, LISTENER)
        self._watched.clear()
        self._part.unfinished += len(self._open)
        self._open.clear()
        self._lease, self._timer = None, None

    def _arrived(self, event: Arrived, now: float) -> None:
        assert self._lease is not None
        salt, began = self._salt, self._lease.began
        for request in event.requests:
            if self._lease.model in ("", request.model_name) and len(self._open) < MAX_OPEN:
                self._open[request.request_id] = RecordedLine(
                    round((request.arrived_at(now) - began) * 1000),
                    request.input_tokens,
                    0,
                    block_ids(request, salt),
                    opaque(request.headers.get(SESSION_HEADER, ""), salt),
                    opaque(request.user_id, salt),
                    int(request.priority),
                    request.slo_deadline_ms,
                    request.model_name,
                )

    def _ended(self, record: Record) -> None:
        line = self._open.pop(record.request_id, None)
        if line is None:
            return  # it arrived before the recording began
        if record.state != "served" or record.output_tokens is None:
            self._part.left_out += 1
            return
        line.output_length = record.output_tokens
        if len(self._lines) >= MAX_LINES:
            self._lines.popleft()
            self._part.dropped += 1
        self._lines.append(line)


def recording_answer(recorder: Recorder, details: dict[str, str]) -> Any:
    """The answer of a gateway in its own process to its plane; None if another recording is running."""
    lease = msgspec.convert(details, RecordingLease, strict=False)
    try:
        return msgspec.to_builtins(recorder.read(lease))
    except PointsmanError:
        return None
