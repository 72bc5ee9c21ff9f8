"""Recorded traffic: one value per request, read from Mooncake JSON lines or from Azure's CSV.

Enters: a file. Leaves: requests in the order of their arrival. The one rule: a line that is not a request is an error
that names the line. The lab never guesses. A file in the order of arrival is read request by request, even if it is
long.
"""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

import msgspec

from pointsman.errors import PointsmanError, UnusableFile

BLOCK_TOKENS = 512
"""Number of tokens in each block that `hash_ids` names."""
CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
JSON_LINE = '{"timestamp": 1200, "input_length": 700, "output_length": 40}, with the timestamp in milliseconds'
LEAST_TICK_MS = 10.0
"""Timestamps that are closer together than this are not ticks of a coarse clock."""
PER_TICK = 2.0
"""Timestamps count as ticks only if each has on average at least this many requests."""


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request of a recording. It has lengths, and names of blocks, but never the text."""

    timestamp: float
    """Arrival of the request, in milliseconds."""
    input_length: int
    """Number of tokens in the prompt, at least 1."""
    output_length: int
    """Number of tokens in the answer. 0 counts as 1, because an engine writes at least one token."""
    hash_ids: tuple[int, ...] = ()
    """Names of the prompt's blocks of 512 tokens. Two prompts with a block of the same name are equal up to the end of
    that block. Empty if the prompt shares nothing with other requests."""
    session_id: str = ""
    tenant: str = ""
    priority: int = 0
    slo_ms: float | None = None
    """Time limit from arrival to the end of the answer. None if the objectives of the run apply."""
    model: str = ""
    """Empty if it is the only model of the fleet."""
    think_ms: float = 0.0
    """In a closed loop, the time between the end of the session's previous turn and this request."""


class UnreadableRecording(PointsmanError, ValueError):
    """A recording in which something is missing or wrong."""


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a recording that one pass over it finds."""

    name: str
    digest: str
    """A digest of the recording's content."""
    requests: int
    began_ms: float
    ended_ms: float
    """Arrival of the last request."""
    in_order: bool
    tick_ms: float
    """The resolution of coarse timestamps, each of which several requests share. 0 if timestamps are not coarse."""
    input_tokens: int
    output_tokens: int

    @property
    def seconds(self) -> float:
        """Time from the first arrival to the last arrival, plus one tick."""
        return (self.ended_ms - self.began_ms + self.tick_ms) / 1000


class Recording:
    """Requests that can be read again and again."""

    def __init__(
        self, name: str, read: Callable[[], Iterable[RecordedRequest]], first: int | None = None, digest: str = ""
    ) -> None:
        """`read` begins anew at each call. With `first`, the recording has only that many requests. `digest` is a
        digest of the source of the recording. If it is empty, a digest of the requests is used."""
        self.name = name if first is None else f"{name}, first {first:,}"
        self._read, self._first, self._digest = read, first, digest
        self._survey: Survey | None = None

    def __iter__(self) -> Iterator[RecordedRequest]:
        """Requests in the order of arrival."""
        if self.survey().in_order:
            yield from self._each()
        else:  # a recorder writes requests in the order in which they end
            yield from sorted(self._each(), key=lambda one: one.timestamp)

    def _each(self) -> Iterator[RecordedRequest]:
        for number, request in enumerate(self._read()):
            if self._first is not None and number >= self._first:
                return
            yield request

    def survey(self) -> Survey:
        """Read the recording once, and remember the result."""
        if self._survey is None:
            self._survey = self._surveyed()
        return self._survey

    def _surveyed(self) -> Survey:
        count, began, ended, before = 0, math.inf, -math.inf, -math.inf
        in_order, ticks, gap = True, 0, math.inf
        read, written = 0, 0
        content = sha256(self._digest.encode())
        for one in self._each():
            at = one.timestamp
            count += 1
            read += one.input_length
            written += one.output_length
            if at != before:
                ticks += 1
                in_order = in_order and at > before
                gap = min(gap, at - before) if at > before else gap
            before = at
            began, ended = min(began, at), max(ended, at)
            if not self._digest:
                content.update(msgspec.json.encode(one))
        if not count:
            raise UnreadableRecording(f"{self.name}: there is no request in it")
        content.update(f"{self._first}".encode())
        coarse = in_order and count >= PER_TICK * ticks and LEAST_TICK_MS <= gap < math.inf
        return Survey(
            name=self.name,
            digest=content.hexdigest()[:16],
            requests=count,
            began_ms=began,
            ended_ms=ended,
            in_order=in_order,
            tick_ms=gap if coarse else 0.0,
            input_tokens=read,
            output_tokens=written,
        )


def requests_of_plane(answer: Mapping[str, Any]) -> list[RecordedRequest]:
    """The requests that a plane has served, in the order of arrival. `answer` is the list from its admin API.

    The plane's records do not tell which prompts begin alike.
    """
    found = [
        RecordedRequest(
            timestamp=datetime.fromisoformat(one["arrived"]).timestamp() * 1000,
            input_length=max(one["input_tokens"], 1),
            output_length=one["output_tokens"],
            tenant=one.get("tenant") or "",
            priority=one.get("priority") or 0,
            slo_ms=one.get("deadline_ms"),
            model=one["model"],
        )
        for one in answer["requests"]
        if one.get("input_tokens") is not None and one.get("output_tokens") is not None
    ]
    if not found:
        raise UnreadableRecording("the plane has no records of requests that it has served; give a recording")
    return sorted(found, key=lambda one: one.timestamp)


def recording_of_file(file: Path, first: int | None = None) -> Recording:
    """The requests in a file. A .csv file has the format that Azure publishes. Any other file has JSON lines."""
    reads = _azure_rows if file.suffix.lower() == ".csv" else _mooncake_lines
    try:
        with file.open("rb") as content:
            whole = sha256()
            while piece := content.read(1 << 20):
                whole.update(piece)
    except OSError as error:
        raise UnusableFile(file, error) from error
    return Recording(file.name, partial(_of_file, file, reads), first, whole.hexdigest())


def _of_file(file: Path, reads: Callable[[TextIO], Iterator[RecordedRequest]]) -> Iterator[RecordedRequest]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            yield from reads(lines)
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableFile(file, error) from error
    except UnreadableRecording as error:
        raise UnreadableRecording(f"{file}: {error}") from None


def _mooncake_lines(lines: Iterable[str]) -> Iterator[RecordedRequest]:
    decode = msgspec.json.Decoder(RecordedRequest).decode
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            found = f"{line.strip()[:60]} is not a request such as {JSON_LINE}"
            raise UnreadableRecording(f"line {number}: {found}: {error}") from None
        yield _checked(request, number)


def _azure_rows(lines: Iterable[str]) -> Iterator[RecordedRequest]:
    reader = csv.DictReader(lines)
    header = [column.strip() for column in reader.fieldnames or ()]
    missing = [column for column in CSV_COLUMNS if column not in header]
    if missing:
        there = ", ".join(header) or "nothing"
        raise UnreadableRecording(f"there is no column {' or '.join(missing)}; the header has {there}")
    reader.fieldnames = header
    for row in reader:
        line = reader.line_num
        try:
            request = RecordedRequest(
                timestamp=_milliseconds(row["TIMESTAMP"]),
                input_length=int(row["ContextTokens"]),
                output_length=int(row["GeneratedTokens"]),
                model=row.get("Model") or "",
            )
        except (ValueError, TypeError) as error:
            raise UnreadableRecording(f"line {line}: this is not a time and two numbers of tokens: {error}") from None
        yield _checked(request, line)


def _milliseconds(text: str) -> float:
    """Read a time in seconds, or a date and time such as 2023-11-16 18:15:46.6805900."""
    try:
        return float(text) * 1000
    except ValueError:
        whole, dot, part = text.strip().partition(".")
        date = datetime.fromisoformat(f"{whole}.{part[:6]}" if dot else whole)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() * 1000


def _checked(request: RecordedRequest, line: int) -> RecordedRequest:
    if not math.isfinite(request.timestamp):
        raise UnreadableRecording(f"line {line}: its timestamp is not a finite number")
    if request.input_length < 1 or request.output_length < 0:
        found = f"input_length {request.input_length} and output_length {request.output_length}"
        raise UnreadableRecording(f"line {line}: {found}; a prompt has at least 1 token, and an answer at least 0")
    if len(request.hash_ids) > -(-request.input_length // BLOCK_TOKENS):
        most = -(-request.input_length // BLOCK_TOKENS)
        found = f"{len(request.hash_ids)} hash_ids for {request.input_length} tokens"
        raise UnreadableRecording(f"line {line}: {found}; blocks have {BLOCK_TOKENS} tokens, so there are {most}")
    if request.slo_ms is not None and not 0 < request.slo_ms < math.inf:
        raise UnreadableRecording(f"line {line}: slo_ms is {request.slo_ms:g}; it must be above 0")
    return request
