"""One request from a client to the instances: it is sent, retried if necessary, answered, and ended exactly once.

If an instance fails before the first byte of the answer is sent to the client, another instance replaces it. After the
first byte, the client sees the failure. If the answer is a stream of events, the client gets an error event; otherwise,
the connection is closed.
"""

import time
from typing import TYPE_CHECKING

import msgspec

from pointsman.errors import shown_bytes
from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.openai import (
    MAX_USAGE_BYTES,
    STREAMS_END_WITH_DONE,
    Usage,
    error_body,
    usage_of,
    usage_of_stream,
    without_usage,
)
from pointsman.gateway.other_apis import OtherApi
from pointsman.gateway.upstream import (
    RETRIED,
    InFlight,
    answered_error,
    asked_too_much,
    body_for,
    learn_usage,
    no_response,
    note_answer,
)
from pointsman.http.heads import Bytes, HttpRequest
from pointsman.http.pool import REQUEST_HEAD
from pointsman.http.responses import (
    FIELDS,
    HOP_BY_HOP,
    MAX_HELD_BYTES,
    PROGRESS_BYTES,
    EventStream,
    ResponseHead,
    ends_with_done,
    event,
)
from pointsman.http.server import REASONS, ResponseStream
from pointsman.reasons import Reason
from pointsman.routing.events import Ended, FirstToken, Refusal, Send
from pointsman.runtimes.traffic import settle

if TYPE_CHECKING:
    from pointsman.gateway.tenants import Charge

NOT_FOR_ENGINES = HOP_BY_HOP | frozenset(
    b"host content-length expect authorization accept-encoding x-api-key content_length transfer_encoding "
    b"x-prefiller-host-port x-encoder-hosts-ports".split()
)
"""Headers of a client's request that are not passed on. Engines must not see API keys, and must not compress answers,
so that the gateway can read the usage. The gateway sets the length itself, so it also drops lengths in other spellings,
which some servers accept. The gateway also decides which engines work together."""

OURS = b"x-pointsman-"
"""Headers with this prefix are for the gateway. Engines get such a header only if the routing decision sets it."""


class ModelRequest(InFlight, eq=False):
    """A client's request that is being served."""

    _client: GatewayConnection
    _http: HttpRequest
    _charge: "Charge | None"
    """The request's charge against the limits of its tenant; it is settled wherever the request ends."""
    api: OtherApi | None = None
    """The API of the request; None for the OpenAI API, which engines serve themselves."""
    _request_head: bytes = b""
    """The request head that was sent last."""
    _body: Bytes = b""
    """The body as the instance gets it."""
    _lines: bytes = b""
    """Header lines that the gateway adds to the answer."""
    _events: EventStream | None = None
    _preamble: bytes = b""
    """The beginning of a stream, up to its first event with data."""
    _stream: ResponseStream | None = None
    """The answer, once part of it has been sent to the client."""
    _last_piece_at: float = 0.0

    @property
    def is_movable(self) -> bool:
        return self._stream is None

    # Commands of the dispatcher

    def send(self, command: Send) -> None:
        if self._attempt is not None:
            self.let_go()
        instance = command.endpoint.instance
        self.instance_id = instance.instance_id
        self._pool = pool = self.upstream.pool_of(instance)
        http, request_id = self._http, self.request.request_id.encode("latin-1", "replace")
        lines = b"%bx-request-id: %b\r\n%b" % (_lines_for_engine(http, command), request_id, pool.lines)
        target = http.target
        if self.api is None:
            self._body = body_for(self, command, http.body)
        else:
            self._command = command
            target, self._body = self.api.outgoing(http, self, instance)
        head = (http.method, target, pool.authority, lines, len(self._body))
        self._request_head = REQUEST_HEAD % head
        self._lines = b"x-request-id: %b\r\nx-pointsman-instance: %b\r\n" % (request_id, self.instance_id.encode())
        if command.response_headers:
            answer = "".join(f"{name}: {value}\r\n" for name, value in command.response_headers.items())
            self._lines += answer.encode()
        self._send(fresh=False)

    def _send(self, *, fresh: bool) -> None:
        assert self._pool is not None
        self._fresh = fresh
        self._head = self._events = None
        self._preamble = b""
        self.deadline = time.monotonic() + self.upstream.settings.first_token_timeout
        self._attempt = self._pool.send(self, self._request_head, self._body, fresh=fresh)

    def refuse(self, refusal: Refusal) -> None:
        self._leave()
        if self._stream is not None:
            self._break_off(self._stream, refusal.reason)
            return
        if self._charge is not None:
            self._charge.close()
        status, retry_after_s, kept = self._count_refused(refusal)
        note_answer(self, status, self._charge)
        lines = b"x-request-id: %b\r\n" % self.request.request_id.encode("latin-1", "replace")
        if retry_after_s is not None and (kept is None or b"retry-after:" not in kept.head.lines.lower()):
            lines += b"retry-after: %d\r\n" % retry_after_s
        if kept is not None:
            lines += b"x-pointsman-instance: %b\r\n" % kept.instance_id.encode()
            body = kept.body if self.api is None else self.api.error(status, kept.body)
            self._client.respond(status, body, kept.head.lines + lines, kept.head.reason)
            self.lane.look_for_idle()
            return
        if refusal.drop_reason:
            lines += b"x-llm-d-request-dropped-reason: %b\r\n" % refusal.drop_reason.encode()
        self._client.error(status, refusal.reason, refusal.outcome.code, lines)
        self.lane.look_for_idle()

    def abandon(self) -> None:
        self._charge_part()
        super().abandon()

    # The response of the instance

    def answered(self, head: ResponseHead, body: bytes) -> None:
        if head.status >= 400 and (asked_too_much(self, head.status) or self._asks_otherwise(head.status)):
            return
        if head.status >= 400 and self._asks_another(head, body, RETRIED):
            return
        usage: Usage | None = None
        try:
            if head.status == 200 and len(body) <= MAX_USAGE_BYTES and self._reads(head):
                usage = usage_of(body)
            if self.api is not None:
                body = self._translated(head.status, body)
        except msgspec.DecodeError as error:
            self._failed(Reason("answer-not-json", {"error": str(error)}))
            return
        client = self._client
        if client.paused:
            self.resume()
        self._attempt = None
        client.respond(head.status, body, head.lines + self._lines, head.reason)
        self._ended(head.status, usage, None if usage is None else usage.output, len(body))

    def _asks_otherwise(self, status: int) -> bool:
        """Send the request again in another form if the instance lacks the API. Returns whether it was sent."""
        if self.api is None or self._command is None or not self.api.refused(self, status):
            return False
        self._attempt = None
        self.send(self._command)
        return True

    def _reads(self, head: ResponseHead) -> bool:
        """Whether the gateway reads the answer as JSON. At paths of their own, engines may answer in other formats."""
        return self.api is None or self.api.serves_json or b"json" in head.content_type.lower()

    def _translated(self, status: int, body: bytes) -> bytes:
        assert self.api is not None
        if status >= 400:
            return self.api.error(status, body)
        self.api.served(self)
        return self.api.answer(body) if status == 200 else body

    def stream_began(self, head: ResponseHead) -> None:
        """Send nothing to the client yet: until an event with data arrives, another instance can replace this one."""
        self._head = head
        self._events = EventStream() if head.is_stream else None
        if self.usage_question is not None and head.status == 200:
            learn_usage(self)
        if self.api is not None and head.status == 200:
            self.api.served(self)
        self._unrenewed_bytes = PROGRESS_BYTES  # the first byte is progress

    def stream_piece(self, payload: bytes) -> None:
        events = self._events
        if events is None:
            self._body_piece(payload)
            return
        payload = events.feed(payload)
        if events.has_data:
            now = time.monotonic()
            self.deadline = now + self.upstream.settings.stall_timeout
            if self.api is not None:
                payload = self.api.events(payload)
            elif self._asked and b"[]" in payload:  # an event with usage has empty choices
                payload = without_usage(payload)
            if not payload:
                return
            if self._stream is not None:
                self._stream.write(payload)
                self.counts.between_tokens.add(now - self._last_piece_at)
                self._last_piece_at = now
            elif self._opens(payload):
                self._begin(self._preamble, now)
            if self._charge is not None and self._stream is not None:
                self._charge.grown(events.events, now)
        elif payload and self._stream is not None:
            self._stream.write(payload)
        elif payload and self._opens(payload) and len(self._preamble) > MAX_HELD_BYTES:
            self._failed(Reason("stream-without-data"))

    def _body_piece(self, payload: bytes) -> None:
        """Handle part of a body that is too long to be buffered, and is not a stream of events."""
        now, head = time.monotonic(), self._head
        assert head is not None
        self._renew_by_bytes(payload, now)
        if self._stream is not None:
            self._stream.write(payload)
        elif head.status in RETRIED:
            self._failed(answered_error(head.status, payload))
        else:
            self._begin(payload, now)

    def _opens(self, payload: bytes) -> bool:
        """Add events to the beginning of a stream. If the payload is not events, this try fails, and the result is
        False."""
        self._preamble += payload
        if not self._preamble.startswith(FIELDS):
            self._failed(Reason("not-events", {"found": shown_bytes(payload)}))
            return False
        return True

    def stream_ended(self, trailers: bytes = b"") -> None:
        events, head = self._events, self._head
        assert head is not None
        if self._client.paused:
            self.resume()  # from here on, another request may use the connection
        self._attempt = None
        rest = b"" if events is None else events.held
        has_mark = self._http.path in STREAMS_END_WITH_DONE or not (head.chunked or head.length is not None)
        if self.api is not None:
            has_mark = self.api.ends_with_done
        if events is not None and has_mark and not ends_with_done(events.last + rest):
            self._failed(Reason("stream-unfinished"))
            return
        stream = self._stream
        if self.api is not None and events is not None:
            rest = self.api.end(rest)
        if stream is None:
            self._begin(self._preamble + rest, time.monotonic()).end()
        else:
            stream.end(rest)
        usage: Usage | None = None
        if events is not None:
            usage = usage_of_stream(events) if self.api is None else self.api.usage(events, self._preamble)
        tokens = usage.output if usage is not None else None if events is None else max(events.events - 2, 0)
        self._ended(head.status, usage, tokens)

    def request_failed(self, why: str, *, stale: bool = False, error: OSError | None = None, local: str = "") -> None:
        self._attempt = None
        if stale and not self._fresh and self._stream is None:
            self._send(fresh=True)
        else:
            self._failed(no_response(why, error), local)

    def timed_out(self) -> None:
        settings = self.upstream.settings
        if self._stream is not None:
            code = "answer-stalled" if self._events is None else "stream-stalled"
            self._failed(Reason(code, {"limit_s": settings.stall_timeout}))
        else:
            self._failed(Reason("no-answer-in-time", {"limit_s": settings.first_token_timeout}))

    # The end

    def _failed(self, why: Reason, local: str = "") -> None:
        """Fail this try, unless the response was complete before the connection broke."""
        self.let_go()
        events = self._events
        if self._stream is not None and events is not None and not events.held and ends_with_done(events.last):
            self.stream_ended()
        else:
            self._came_to_nothing(why, may_retry=self.is_movable, local=local)

    def _begin(self, payload: bytes, now: float) -> ResponseStream:
        head = self._head
        assert head is not None
        self._stream = stream = ResponseStream(
            self._client,
            head.lines + self._lines,
            payload,
            status=head.status,
            reason=head.reason or REASONS.get(head.status, b"Unknown"),
            length=head.length if self._events is None else None,
        )
        self._last_piece_at = now
        if self._doubts and head.status < 400:
            settle(self.lane, self._doubts, contradicted=True)
            self._doubts = ()
        self.lane.tell(FirstToken(self.request.request_id))
        self.counts.first_token.add(now - (self.request.arrival_time or now))
        return stream

    def _ended(self, status: int, usage: Usage | None, output_tokens: int | None, size: int = MAX_USAGE_BYTES) -> None:
        now = time.monotonic()
        request, lane = self.request, self.lane
        self.upstream.in_flight.pop(request.request_id, None)
        if usage is None:
            lane.tell(Ended(request.request_id, output_tokens, None, None, status))
        else:
            lane.tell(Ended(request.request_id, output_tokens, usage.input, usage.cached, status))
        if status < 400 and not self._doubts:
            lane.worked(self.instance_id)
        else:
            self._judge(status)
        counts = self.counts
        counts.statuses[status] += 1
        counts.total.add(now - (request.arrival_time or now))
        if usage is not None:
            counts.used(usage)
        charge = self._charge
        if charge is None:
            return
        if status < 400:
            charge.settle(usage, output_tokens, size, now)
        else:
            charge.close()
        note_answer(self, status, charge)

    def _charge_part(self) -> None:
        """Charge for the work of an instance: a client that disconnects just before the end is also charged."""
        charge, now = self._charge, time.monotonic()
        begun = None if self._stream is None or self._head is None else self._head.status
        if charge is None:
            note_answer(self, begun, None)
            return
        if self._stream is not None and self._events is None:
            charge.settle(None, None, MAX_USAGE_BYTES, now)
        elif self.instance_id:
            charge.grown(0 if self._stream is None or self._events is None else self._events.events, now)
        charge.close()
        note_answer(self, begun, charge)

    def _break_off(self, stream: ResponseStream, why: Reason) -> None:
        """End an answer that has already begun. It ends with an error if its form allows one."""
        events = self._events
        self.counts.broken_off += 1
        self._charge_part()
        if events is None:
            self._client.abort()  # the promised length will not be reached
            return
        text = f"the answer was cut off: {why}"
        last = event(error_body(text, "server_error", "stream_interrupted"))
        if self.api is not None:
            last = self.api.broken(text)
        stream.end(
            last if events.last.endswith(b"\n") else b"\n\n" + last
        )  # otherwise, only part of a long event has been sent


def _lines_for_engine(http: HttpRequest, command: Send) -> bytes:
    """The header lines for the engine: those that are passed on, with the changes that the decision makes."""
    headers, repeats = http.headers, http.repeats
    if repeats is None or command.headers or headers != repeats.headers:  # the gateway has changed the headers
        return _passed_on(headers, command)
    if repeats.lines_for_engines is None:
        repeats.lines_for_engines = _passed_on(headers, command)
    return repeats.lines_for_engines


def _passed_on(headers: dict[bytes, bytes], command: Send) -> bytes:
    hidden, named = NOT_FOR_ENGINES, headers.get(b"connection", b"keep-alive")
    if named != b"keep-alive":  # it may name headers that apply to this connection only
        hidden = hidden.union(name.strip().lower() for name in named.split(b","))
    lines = [b"%b: %b\r\n" % header for header in headers.items() if header[0] not in hidden and header[0][:12] != OURS]
    if command.headers:
        changed = {name.lower().encode(): value for name, value in command.headers.items()}
        lines = [line for line in lines if line.partition(b":")[0] not in changed]
        lines += [b"%b: %b\r\n" % (name, value.encode()) for name, value in changed.items() if value is not None]
    return b"".join(lines)
