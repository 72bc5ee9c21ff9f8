"""One request between a client and the instances: sent, answered, sent again if need be, and ended exactly once.

Until the first byte of the answer has gone to the client, an instance that fails is replaced by another. From then on
a failure is an error that the client can read: an error event in a stream of events, else a closed connection.
"""

import time
from typing import TYPE_CHECKING

import msgspec

from pointsman.gateway.client import ClientConnection
from pointsman.gateway.in_flight import InFlight
from pointsman.gateway.openai import STREAMS_END_WITH_DONE
from pointsman.gateway.usage import READ_UP_TO_BYTES, Usage, usage_of, usage_of_stream
from pointsman.http.answers import AnswerHead
from pointsman.http.events import FIELDS, EventStream, ends_with_done
from pointsman.http.heads import KEEP_ALIVE, LAST_CHUNK, NOT_FOR_ENGINES, REASONS, error_body
from pointsman.http.requests import HttpRequest
from pointsman.routing.events import Ended, FirstToken, Refusal, Send

if TYPE_CHECKING:
    from pointsman.gateway.tenants import Tenant


RETRIED = frozenset({500, 502, 503, 504})
"""Statuses of an engine's answer after which another is tried."""


class ModelRequest(InFlight, eq=False):
    """A client's request that is being served."""

    _client: ClientConnection
    _http: HttpRequest
    _tenant: "Tenant | None"
    _request_head: bytes = b""
    """With which it was sent last."""
    _lines: bytes = b""
    """Header lines of ours for the answer."""
    _events: EventStream | None = None
    _begun: bool = False
    """Part of the answer has gone to the client."""
    _last_piece_at: float = 0.0

    # What the dispatcher says

    def send(self, command: Send) -> None:
        if self._attempt is not None:
            self.let_go()
        instance = command.endpoint.instance
        self.instance_id = instance.instance_id
        self._pool = pool = self.gateway.pool_of(instance)
        http, request_id = self._http, self.request.request_id.encode("latin-1", "replace")
        hidden, named = NOT_FOR_ENGINES, http.headers.get(b"connection", b"keep-alive")
        if named != b"keep-alive":  # it may name headers of this connection alone
            hidden = hidden.union(name.strip().lower() for name in named.split(b","))
        lines = [
            b"%b: %b\r\n" % header for header in http.headers.items() if header[0] not in hidden
        ]  # names are lower-cased: HTTP does not mind
        if command.headers:
            changed = {name.lower().encode(): value for name, value in command.headers.items()}
            lines = [line for line in lines if line.partition(b":")[0] not in changed]
            lines += [b"%b: %b\r\n" % (name, value.encode()) for name, value in changed.items() if value is not None]
        self._request_head = b"%b %b HTTP/1.1\r\nhost: %b\r\n%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
            http.method,
            http.target,
            pool.authority,
            b"".join(lines),
            request_id,
            len(http.body),
        )
        self._lines = b"x-request-id: %b\r\nx-pointsman-instance: %b\r\n" % (request_id, self.instance_id.encode())
        if command.response_headers:
            answer = "".join(f"{name}: {value}\r\n" for name, value in command.response_headers.items())
            self._lines += answer.encode()
        self._ask(fresh=False)

    def _ask(self, *, fresh: bool) -> None:
        assert self._pool is not None
        self._fresh = fresh
        self._head = self._events = None
        self.deadline = time.monotonic() + self.gateway.upstream.first_token_timeout
        self._attempt = self._pool.ask(self, self._request_head, self._http.body, fresh=fresh)

    def refuse(self, refusal: Refusal) -> None:
        """Answer with a refusal."""
        self._leave()
        if self._begun:
            self._break_off(str(refusal.reason))
            return
        status, retry_after_s = self._count_refused(refusal)
        lines = b"x-request-id: %b\r\n" % self.request.request_id.encode("latin-1", "replace")
        if retry_after_s is not None:
            lines += b"retry-after: %d\r\n" % retry_after_s
        if refusal.drop_reason:
            lines += b"x-llm-d-request-dropped-reason: %b\r\n" % refusal.drop_reason.encode()
        self._client.error(status, refusal.reason, refusal.outcome.code, lines)
        self.lane.look_for_idle()

    def abandon(self) -> None:
        """The client has gone."""
        self._charge_part()
        super().abandon()

    # What the instance says

    def answered(self, head: AnswerHead, body: bytes) -> None:
        """The whole answer."""
        if head.status in RETRIED:
            self._failed(f"it answered {head.status}: {body[:200].decode('utf-8', 'replace')}")
            return
        usage: Usage | None = None
        if head.status == 200 and len(body) <= READ_UP_TO_BYTES:
            try:
                usage = usage_of(body)
            except msgspec.DecodeError as error:
                self._failed(f"its answer is not JSON: {error}")
                return
        client, keep_alive = self._client, self._keep_alive
        if client.paused:
            self.resume()
        self._attempt = None
        client.write(
            b"HTTP/1.1 %d %b\r\n%b%b%b%b\r\n%b"
            % (
                head.status,
                head.reason or REASONS.get(head.status, b"Unknown"),
                head.lines,
                self._lines,
                b"" if head.status in (204, 304) else b"content-length: %d\r\n" % len(body),
                self._connection_line(stays=keep_alive),
                body,
            )
        )
        self._ended(head.status, usage, None if usage is None else usage.output)
        client.answered(close=not keep_alive)

    def stream_began(self, head: AnswerHead) -> None:
        """Nothing goes out yet: as long as no event has come, another instance can take over."""
        self._head = head
        self._events = EventStream() if head.is_stream else None

    def stream_piece(self, payload: bytes) -> None:
        """Pass on what has come, event by event."""
        events, now = self._events, time.monotonic()
        self.deadline = now + self.gateway.upstream.stall_timeout
        if events is not None:
            payload = events.feed(payload)
            if not payload:
                return
        if self._begun:
            self._client.write(self._framed(payload))
            self.counts.between_tokens.add(now - self._last_piece_at)
            self._last_piece_at = now
            return
        assert self._head is not None
        if self._head.status in RETRIED:
            self._failed(f"it answered {self._head.status}: {payload[:200].decode('utf-8', 'replace')}")
        elif events is not None and not payload.startswith(FIELDS):
            self._failed(f"its stream is no stream of events: {payload[:60]!r}")
        else:
            self._begin(payload, now)

    def stream_ended(self) -> None:
        """The stream is over."""
        events, head = self._events, self._head
        assert head is not None
        if self._client.paused:
            self.resume()  # its connection may be somebody else's from here on
        self._attempt = None
        rest = b"" if events is None else events.held
        has_mark = self._http.path in STREAMS_END_WITH_DONE or not (head.chunked or head.length is not None)
        if events is not None and has_mark and not ends_with_done(events.last + rest):
            self._failed("its stream ended without the end mark")
            return
        if not self._begun:
            self._begin(rest, time.monotonic())
        elif rest:
            self._client.write(self._framed(rest))
        client, keep_alive = self._client, self._keep_alive
        if self._is_chunked:
            client.write(LAST_CHUNK)
        usage = None if events is None else usage_of_stream(events)
        tokens = usage.output if usage is not None else None if events is None else max(events.events - 2, 0)
        self._ended(head.status, usage, tokens)
        client.answered(close=not keep_alive or not (self._is_chunked or (events is None and head.length is not None)))

    def upstream_failed(self, why: str, *, stale: bool = False) -> None:
        """There will be no answer, or no more of it. `stale`: the connection had been closed before we used it."""
        self._attempt = None
        if stale and not self._fresh and not self._begun:
            self._ask(fresh=True)
        else:
            self._failed(why)

    def timed_out(self) -> None:
        settings = self.gateway.upstream
        if self._begun:
            self._failed(f"nothing came for {settings.stall_timeout:g} s")
        else:
            self._failed(f"no answer within {settings.first_token_timeout:g} s")

    # The end

    def _failed(self, why: str) -> None:
        """This try has come to nothing, unless all was said before it broke off."""
        self.let_go()
        events = self._events
        if self._begun and events is not None and not events.held and ends_with_done(events.last):
            self.stream_ended()
        else:
            self._came_to_nothing(why, may_retry=not self._begun)

    def _begin(self, payload: bytes, now: float) -> None:
        """The first part of the answer goes out."""
        head = self._head
        assert head is not None
        self._begun = True
        self._last_piece_at = now
        if head.length is not None and self._events is None:
            framing = b"content-length: %d\r\n" % head.length
        else:
            framing = b"transfer-encoding: chunked\r\n" if self._is_chunked else b""
        framing += self._connection_line(stays=self._keep_alive and framing != b"")
        self._client.write(
            b"HTTP/1.1 %d %b\r\n%b%b%b\r\n%b"
            % (
                head.status,
                head.reason or REASONS.get(head.status, b"Unknown"),
                head.lines,
                self._lines,
                framing,
                self._framed(payload),
            )
        )
        self.lane.tell(FirstToken(self.request.request_id))
        self.counts.first_token.add(now - (self.request.arrival_time or now))

    def _ended(self, status: int, usage: Usage | None, output_tokens: int | None) -> None:
        """It was answered."""
        now = time.monotonic()
        request, lane = self.request, self.lane
        self.gateway.leave(self)
        if usage is None:
            lane.tell(Ended(request.request_id, output_tokens))
        else:
            lane.tell(Ended(request.request_id, output_tokens, usage.input, usage.cached))
        lane.worked(self.instance_id)
        counts = self.counts
        counts.statuses[status] += 1
        counts.total.add(now - (request.arrival_time or now))
        if usage is not None:
            counts.used(usage)
        if self._tenant is not None:
            self._tenant.used(request, usage, output_tokens, lane.plan.price, now)

    def _charge_part(self) -> None:
        """What was answered before the end is charged too; else whoever leaves just before it would pay nothing."""
        if self._tenant is not None and self._begun and self._events is not None:
            self._tenant.used(self.request, None, self._events.events, self.lane.plan.price, time.monotonic())

    def _break_off(self, why: str) -> None:
        """The answer had begun and cannot go on: say so in it."""
        client, events = self._client, self._events
        self.counts.broken_off += 1
        self._charge_part()
        if events is None:
            client.serving = None
            client.transport.abort()  # a length was promised that cannot be kept
            return
        event = b"data: " + error_body(f"the answer was cut off: {why}", "server_error", "stream_interrupted") + b"\n\n"
        if not events.last.endswith(b"\n"):  # part of a long event is out
            event = b"\n\n" + event
        client.write(self._framed(event) + (LAST_CHUNK if self._is_chunked else b""))
        client.answered(close=not self._keep_alive or not self._is_chunked)

    @property
    def _keep_alive(self) -> bool:
        return self._http.keep_alive and not self.gateway.draining

    def _connection_line(self, *, stays: bool) -> bytes:
        """What the client must be told of the connection."""
        return (KEEP_ALIVE if self._http.is_http_1_0 else b"") if stays else b"connection: close\r\n"

    @property
    def _is_chunked(self) -> bool:
        """Whether the answer to the client is chunked."""
        head = self._head
        return not self._http.is_http_1_0 and (self._events is not None or head is None or head.length is None)

    def _framed(self, payload: bytes) -> bytes:
        if not self._is_chunked:
            return payload
        return b"%x\r\n%b\r\n" % (len(payload), payload) if payload else b""
