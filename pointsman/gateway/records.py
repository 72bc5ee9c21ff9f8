"""Records of all requests, including those refused at the gate, those to removed deployments, and those to earlier
planes.

Enters: every request that has ended, from dispatchers, applications and the gate. Leaves: what `requests` and `explain`
show, and a file that the next plane loads. The one rule: no request waits for its record. Records of ended requests are
collected four times a second, and a thread writes them. If the disk cannot be written to, the gateway continues.
"""

import os
import time
from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pointsman.errors import shown, system_reason
from pointsman.gateway.admission import Admission, NotAdmitted
from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.tenants import Tenant
from pointsman.http.heads import HttpRequest
from pointsman.reasons import Reason
from pointsman.render.text import record_text
from pointsman.routing.records import Record, summary_of
from pointsman.runtimes.traffic import Lane, Traffic

NOT_RECORDED = (b"/admin/", b"/pipelines/")
"""Paths for operators and replicas; refused requests to these paths are not recorded."""
COLLECT_S = 0.25
DETAILED, MAX_DETAILED = 5, 10
"""How many of the newest requests in each collection are stored with their decision, and how many of these may
accumulate for a burst. One record with its decision takes as long as thirty records without, so a busy plane stores the
outcome of every request, but only some decisions."""
STRANGERS, STORED_STRANGERS = 1000, 100
"""How many requests from unknown senders are listed, and how many are stored per collection. Such requests cost the
sender nothing, and must not displace other requests."""
RECORD_FILE = "requests.log"
MAX_UNWRITTEN_BYTES = 4 * 1024 * 1024
"""Maximum total size in bytes of records that wait for the disk; older records are dropped."""


class AnyRecord(Protocol):
    """The common part of all records: of requests to models, of pipeline requests, and of requests refused at the
    gate."""

    @property
    def arrived_at(self) -> float: ...

    @property
    def state(self) -> str: ...

    def summary(self) -> dict[str, Any]: ...

    def as_dict(self) -> dict[str, Any]: ...


class GateRecord(msgspec.Struct, eq=False, gc=False):
    """A request that was refused before it reached a dispatcher."""

    request_id: str
    model: str
    path: str
    tenant: str
    arrived_at: float
    status: int
    code: str
    why: str
    state: str = "refused"

    def summary(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "model": self.model,
            "path": self.path,
            "tenant": self.tenant,
            "state": self.state,
            "status": self.status,
            "instance": "",
            "cost": None,
        }

    def as_dict(self) -> dict[str, Any]:
        refusal = {"outcome": self.code, "reason": Reason("turned-away", {"text": self.why}).as_dict()}
        return {**self.summary(), "refusal": refusal}

    def __str__(self) -> str:
        asked = f" for {self.model}" if self.model else ""
        who = f" of tenant {self.tenant}" if self.tenant else ""
        head = f'request "{self.request_id}"{who} to {self.path}{asked} is refused'
        return f"{head}\nanswered with {self.status} ({self.code}) at the gate: {self.why}"


class OutcomeRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The stored part of every request to a model: its record without the decision."""

    request_id: str
    model: str
    user_id: str
    state: str
    instance: str
    priority: int
    status: int | None
    strategy: str
    tries: int
    arrived_at: float
    """Time on the plane's clock, like all times below."""
    sent_at: float | None
    first_token_at: float | None
    ended_at: float | None
    input_tokens: int
    cached_tokens: int | None
    output_tokens: int | None
    deadline_ms: float | None
    met_deadline: bool | None
    cost: float | None

    def summary(self) -> dict[str, Any]:
        return summary_of(self)


_row: Callable[[AnyRecord], tuple[Any, ...]] = attrgetter(*OutcomeRow.__struct_fields__)
"""Makes the fields of an `OutcomeRow` as a tuple. A tuple takes half the time to make, and one is made for every
request."""


class StoredRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One line of the file."""

    arrived: float
    """Unix time."""
    gateway: str
    """The process that served the request, if the plane has several processes."""
    outcome: OutcomeRow | dict[str, Any]
    """The outcome of a request to a model, or the summary of a pipeline request or a refused request."""
    details: msgspec.Raw = msgspec.Raw(b"{}")
    text: str = ""
    """The record as text. For a request to a model, the text is made from the details when the record is shown."""

    @property
    def request_id(self) -> str:
        return self._value("request_id")

    def is_of(self, query: Mapping[str, str]) -> bool:
        return all(name not in query or query[name] == self._value(name) for name in SEARCHED)

    def _value(self, name: str) -> str:
        outcome = self.outcome
        if isinstance(outcome, dict):
            return str(outcome.get(name, ""))
        return str(getattr(outcome, "user_id" if name == "tenant" else name))

    def summary(self) -> dict[str, Any]:
        summary = self.outcome if isinstance(self.outcome, dict) else self.outcome.summary()
        return summary | ({"gateway": self.gateway} if self.gateway else {})

    def explained(self) -> dict[str, Any]:
        """The record as `explain` shows it."""
        summary, text = self.summary(), self.text
        details: dict[str, Any] = msgspec.json.decode(self.details)
        if not text and details:
            text = record_text(details)
        elif not text:
            where = f" on {summary['instance']}" if summary.get("instance") else ""
            text = (
                f'request "{shown(self.request_id)}" is {summary["state"]}{where}\n'
                "how it was decided is not stored: too many requests ended at the same time"
            )
        return {**summary, **details, "arrived": self.arrived, "text": f"{text}\n(by an earlier run of this plane)"}


SEARCHED = ("model", "state", "tenant", "instance")
_DECODER = msgspec.json.Decoder(StoredRecord)
_encoded = msgspec.json.Encoder(enc_hook=str).encode


class RecordFile:
    """Lines in two files in the state directory. When the newer file has half of the permitted bytes, it replaces the
    older."""

    def __init__(self, state: Path, loop: AbstractEventLoop, name: str = RECORD_FILE, max_bytes: int = 0) -> None:
        """`max_bytes` is the maximum size of both files together; if it is 0, nothing is stored."""
        self._path = state / name
        self._loop = loop
        self.max_bytes = max_bytes
        self.dropped = 0
        """Number of records that could not be written."""
        self._why = ""
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._writing: Future[None] | None = None

    def lines(self, limit: int) -> list[bytes]:
        """The newest stored lines, oldest first."""
        found: list[bytes] = []
        for path in (self._older, self._path):
            with suppress(OSError):
                found += path.read_bytes().split(b"\n")
        return [line for line in found if line][-limit:]

    @property
    def _older(self) -> Path:
        return self._path.with_name(f"{self._path.name}.1")

    def append(self, lines: Iterable[bytes]) -> None:
        """Write these lines soon, together with earlier lines that could not be written."""
        for line in lines:
            self._waiting.append(line)
            self._waiting_bytes += len(line) + 1
        limit = min(MAX_UNWRITTEN_BYTES, self.max_bytes // 2 or MAX_UNWRITTEN_BYTES)
        while self._waiting_bytes > limit:
            self._waiting_bytes -= len(self._waiting.popleft()) + 1
            self.dropped += 1
        if self._waiting and (self._writing is None or self._writing.done()):
            self._writing = self._loop.run_in_executor(None, self._write, self._taken())

    def problems(self) -> list[Reason]:
        if not self._why:
            return []
        return [Reason("records-not-stored", {"file": str(self._path), "error": self._why, "lost": self.dropped})]

    async def close(self) -> None:
        """Try once more to write the waiting lines."""
        if self._writing is not None:
            await self._writing
        if self._waiting:
            await self._loop.run_in_executor(None, self._write, self._taken())

    def _taken(self) -> list[bytes]:
        taken = list(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        return taken

    def _write(self, lines: list[bytes]) -> None:
        """Write on a thread. Afterwards either all lines are in the file, or none."""
        try:
            if not self.max_bytes:
                for path in (self._path, self._older):
                    path.unlink(missing_ok=True)
                return
            self._write_all(b"\n".join([*lines, b""]))
            self._why = ""
        except OSError as error:
            self._why = system_reason(error)
            self._loop.call_soon_threadsafe(self._put_back, lines)

    def _put_back(self, lines: list[bytes]) -> None:
        self._waiting.extendleft(reversed(lines))
        self._waiting_bytes += sum(len(line) + 1 for line in lines)

    def _write_all(self, data: bytes) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(file).st_size
            if size and size + len(data) > self.max_bytes // 2:
                self._path.replace(self._older)
                os.close(file)
                file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                size = 0
            try:
                written = os.write(file, data)
                if written < len(data):
                    os.write(file, data[written:])  # the exception gives the reason
            except OSError:
                os.ftruncate(file, size)
                raise
        finally:
            os.close(file)


class RecordSink(Protocol):
    """Where records are stored, one per line."""

    max_bytes: int

    def lines(self, limit: int) -> list[bytes]:
        """The newest lines from earlier planes, oldest first."""
        ...

    def append(self, lines: Iterable[bytes]) -> None: ...

    def problems(self) -> list[Reason]: ...

    async def close(self) -> None: ...


class RequestHistory:
    """The records that dispatchers do not keep, and the file with all records."""

    def __init__(self, keep: int, traffic: Traffic, admission: Admission) -> None:
        self.gone: deque[Record] = deque(maxlen=keep)
        """Records of removed deployments."""
        self.limited: deque[GateRecord] = deque(maxlen=keep)
        """Requests from tenants that were refused at the gate."""
        self.strangers: deque[GateRecord] = deque(maxlen=min(keep, STRANGERS))
        """Requests from unknown senders that were refused at the gate."""
        self.fresh: deque[AnyRecord] = deque(maxlen=keep)
        """New records since the last collection: from applications, and of tenants' requests that were refused at the
        gate."""
        self._fresh_strangers: deque[GateRecord] = deque(maxlen=STORED_STRANGERS)
        self._detailed = MAX_DETAILED
        """Number of decisions that may be stored now."""
        self._traffic = traffic
        self._admission = admission
        traffic.hooks.closed = self._lane_closed
        self._file: RecordSink | None = None
        self._stored: list[StoredRecord] = []
        """Records from earlier planes, newest first."""
        self.gateway = ""
        """The name of this process, if the plane has several processes."""

    # What happens

    def turn_away(
        self,
        client: GatewayConnection,
        http: HttpRequest,
        error: NotAdmitted,
        tenant: Tenant | None = None,
        model: str = "",
        *,
        request_id: str = "",
        body: bytes | None = None,
    ) -> None:
        """Answer a request that reaches no dispatcher. If it is a request to a model or an application, record it.
        `request_id` is the request's id, if it already has one. `body` is the body of the answer, if the answer has its
        own form."""
        if http.method == b"POST" and not http.path.startswith(NOT_RECORDED):
            request_id = self.note_refused(http, error, tenant, model, request_id)
            error.lines += b"x-request-id: %b\r\n" % request_id.encode("latin-1", "replace")
        if body is None:
            client.refuse(error, http.path)
        else:
            client.answer(error.status, body, lines=error.lines)

    def note_refused(
        self, http: HttpRequest, error: NotAdmitted, tenant: Tenant | None = None, model: str = "", request_id: str = ""
    ) -> str:
        """Record a request that reaches no dispatcher. Returns the request's id; if it has none, a new id."""
        request_id = request_id or self._admission.id_of_refused(http)
        whose, path = error.tenant if tenant is None else tenant.name, shown(http.path.decode("latin-1"))
        now = time.monotonic()
        record = GateRecord(request_id, shown(model), path, whose, now, error.status, error.code, str(error))
        if record.tenant:
            self.limited.append(record)
            self.fresh.append(record)
        else:
            self.strangers.append(record)
            self._fresh_strangers.append(record)
        return request_id

    def open(self, file: "RecordSink", keep: int) -> None:
        """Load the records that this file contains, and store new records there."""
        self._stored.clear()
        for line in reversed(file.lines(keep)):
            with suppress(msgspec.MsgspecError):  # if a plane was killed, its last line may be incomplete
                self._stored.append(_DECODER.decode(line))
        self._stored.sort(key=lambda one: one.arrived, reverse=True)
        self._file = file

    def collect(self) -> None:
        """Store the records of requests that have ended since the last call."""
        lanes = [lane for lane in self._traffic.all_lanes() if not lane.plan.internal]
        ended: list[AnyRecord] = []
        for lane in lanes:
            ended += lane.dispatcher.ended_records
            lane.dispatcher.ended_records.clear()
        ended += [*self.fresh, *self._fresh_strangers]
        self.fresh.clear()
        self._fresh_strangers.clear()
        if self._file is not None and (ended or self._file.problems()):
            since_unix = time.time() - time.monotonic()
            self._detailed = min(self._detailed + DETAILED, MAX_DETAILED)
            detailed = min(len(ended), self._detailed)
            self._detailed -= detailed
            plain = len(ended) - detailed
            lines = [_encoded((since_unix + one.arrived_at, self.gateway, _outcome(one))) for one in ended[:plain]]
            for one in ended[plain:]:
                told = (_outcome(one), one.as_dict(), "" if type(one) is Record else str(one))
                lines.append(_encoded((since_unix + one.arrived_at, self.gateway, *told)))
            self._file.append(lines)

    def _lane_closed(self, lane: Lane) -> None:
        if not lane.plan.internal:  # the record of a pipeline request contains its steps
            self.fresh.extend(lane.dispatcher.ended_records)
            self.gone.extend(reversed(lane.dispatcher.records.newest()))

    def configure(self, max_bytes: int) -> None:
        if self._file is not None:
            self._file.max_bytes = max_bytes

    def problems(self) -> list[Reason]:
        return [] if self._file is None else self._file.problems()

    async def close(self) -> None:
        self.collect()
        if self._file is not None:
            await self._file.close()
            self._file = None

    # Queries

    def kept(self) -> list[AnyRecord]:
        """Records from this plane, in no particular order."""
        return [*self.gone, *self.limited, *self.strangers]

    def kept_of(self, request_id: str) -> AnyRecord | None:
        """The newest record of a request among `kept`; None if there is none."""
        here = [one for one in self.kept() if getattr(one, "request_id", "") == request_id]
        return max(here, key=lambda one: one.arrived_at) if here else None

    def stored(self, query: Mapping[str, str]) -> list[StoredRecord]:
        """The stored records that match a query, newest first."""
        return [one for one in self._stored if one.is_of(query)]


def store(history: RequestHistory, lines: Sequence[bytes]) -> None:
    """Store records from another process."""
    if history._file is not None:
        history._file.append(lines)


def recall(history: RequestHistory, gateway: str, keep: int) -> None:
    """Note that a process has ended. Only its stored records remain."""
    stored = history._stored
    known = {(one.request_id, one.arrived) for one in stored}
    for line in () if history._file is None else history._file.lines(keep):
        with suppress(msgspec.MsgspecError):
            one = _DECODER.decode(line)
            if one.gateway == gateway and (one.request_id, one.arrived) not in known:
                stored.append(one)
    stored.sort(key=lambda each: each.arrived, reverse=True)
    del stored[keep:]


def stored_of(history: RequestHistory, request_id: str) -> StoredRecord | None:
    """The record of a request to an earlier plane; None if there is none."""
    return next((one for one in history._stored if one.request_id == request_id), None)


def _outcome(record: AnyRecord) -> tuple[Any, ...] | dict[str, Any]:
    return _row(record) if type(record) is Record else record.summary()


def newest_first(records: Sequence[AnyRecord]) -> list[AnyRecord]:
    return sorted(records, key=lambda record: record.arrived_at, reverse=True)
