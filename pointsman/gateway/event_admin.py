"""`/admin/v1/events`: what has changed on the plane, and which changes operators requested, as a list or as a stream.

Enters: requests from operators. Leaves: events. The one rule: the memory for a slow reader is bounded. The gateway
writes the stream from the log, and stops writing while the client does not read.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.lookup import AdminCall, number_in
from pointsman.http.heads import HttpRequest
from pointsman.http.responses import CONTENT_TYPE as EVENT_STREAM
from pointsman.http.server import ResponseStream
from pointsman.reasons import Reason
from pointsman.runtimes.event_log import KEPT, EventLog

MAX_WAIT_S = 60
"""Maximum time for which a request may wait for events."""
BEAT_S = 15.0
"""Interval of keep-alive comments in a stream without events: proxies and browsers close silent connections."""
MAX_OPERATION = 200
LISTED = 100
"""Default number of past events that are listed."""


def wants_stream(request: HttpRequest) -> bool:
    return request.method == b"GET" and b"text/event-stream" in request.headers.get(b"accept", b"")


class EventAdmin:
    def __init__(self, events: EventLog) -> None:
        self._events = events

    async def read(self, call: AdminCall) -> dict[str, Any]:
        """The newest events after the event with a given number. If there are none, the answer waits for a new event,
        at most for `wait` seconds."""
        after, limit, deployment = _selection(call.query)
        wait_s = min(number_in(call.query, "wait", 0), MAX_WAIT_S)
        events = self._events
        found = events.since(after, limit, deployment)
        if not found and wait_s:
            changed = asyncio.Event()
            events.followers.append(changed.set)
            try:
                async with asyncio.timeout(wait_s):
                    while not found:
                        await changed.wait()
                        changed.clear()
                        found = events.since(after, limit, deployment)
            except TimeoutError:
                pass
            finally:
                events.followers.remove(changed.set)
        return {"events": found}

    def follow(self, client: GatewayConnection, request: HttpRequest, query: Mapping[str, str]) -> None:
        """Answer with past events, and then with each event as it happens. A client that reconnects names the last
        event that it has received. Raises `BadQuery`."""
        seen = request.headers.get(b"last-event-id", b"").decode("latin-1")
        after, limit, deployment = _selection({**query, "after": seen, "limit": str(KEPT)} if seen else query)
        EventFeed(client, self._events, deployment).begin(after, limit)

    def note(self, method: str, call: AdminCall, status: int) -> None:
        """Log that an operator has requested a change, and the status of the answer."""
        operation = " ".join([method, *call.parts])[:MAX_OPERATION]
        self._events.note("", Reason("operation", {"operation": operation, "status": status}), call.asker)


def _selection(query: Mapping[str, str]) -> tuple[int, int, str]:
    limit = min(number_in(query, "limit", LISTED), KEPT)
    return number_in(query, "after", 0), limit, query.get("deployment", "")


class EventFeed:
    """An answer of server-sent events, which continues until the client disconnects."""

    def __init__(self, client: GatewayConnection, events: EventLog, deployment: str) -> None:
        self._client: GatewayConnection | None = client
        self._events = events
        self._deployment = deployment
        self._last = 0
        """The number of the last event that was written."""
        self._is_paused = False
        self._stream = ResponseStream(client, b"content-type: %b\r\ncache-control: no-store\r\n" % EVENT_STREAM)
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, after: int, limit: int) -> None:
        assert self._client is not None
        self._client.serving = self
        self._events.followers.append(self._write)
        found = self._events.since(after, limit, self._deployment)
        self._last = self._events.last
        self._stream.write(b"".join(map(_event, found)) or b": no events yet\n\n")
        self._beat_later()

    def abandon(self) -> None:
        self._client = None
        self._events.followers.remove(self._write)
        if self._timer is not None:
            self._timer.cancel()

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._write()

    def _write(self) -> None:
        if self._is_paused:
            return
        found = self._events.since(self._last, KEPT, self._deployment)
        self._last = self._events.last
        self._stream.write(b"".join(map(_event, found)))

    def _beat_later(self) -> None:
        assert self._client is not None
        self._timer = self._client.owner.loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        if not self._is_paused:
            self._stream.write(b":\n\n")
        self._beat_later()


def _event(event: Mapping[str, Any]) -> bytes:
    return b"id: %d\ndata: %b\n\n" % (event["number"], msgspec.json.encode(event))
