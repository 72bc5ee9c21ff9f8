"""Server-sent events: written, read, and passed through as whole events without touching a byte."""

from collections.abc import Iterator

MAX_HELD_BYTES = 1024 * 1024
"""A longer event is passed on in parts."""
CONTENT_TYPE = b"text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
"""The end mark of OpenAI's streams."""
FIELDS = (b"data", b"event", b"id", b"retry", b":", b"\n", b"\r")
"""What a stream of events may begin with."""

_ENDS = (b"\n\n", b"\r\n\r\n")


def event(data: bytes) -> bytes:
    """An event with this data, which may have several lines."""
    if b"\n" not in data and b"\r" not in data:
        return b"data: %b\n\n" % data
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return b"".join(b"data: %b\n" % line for line in lines) + b"\n"


def data_in(events: bytes) -> Iterator[bytes]:
    """The data lines of whole events, without the end mark."""
    for line in events.splitlines():
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data and data != b"[DONE]":
                yield data


def ends_with_done(events: bytes) -> bool:
    """Whether the last of these events is the end mark, and not a text that contains it."""
    name, _, value = events.rstrip().rpartition(b"\n")[2].partition(b":")
    return name == b"data" and value.strip() == b"[DONE]"


class EventStream:
    """Holds incomplete events back: a client that is cut off in the middle of one cannot be sent an error event."""

    __slots__ = ("_held", "before_last", "events", "last")

    def __init__(self) -> None:
        self._held = b""
        self.events = 0
        """Passed on so far."""
        self.last = b""
        """The last piece passed on, and the one before it: usage is in the last event before the end mark."""
        self.before_last = b""

    def feed(self, payload: bytes) -> bytes:
        """What may be passed on now."""
        if self._held:
            payload, self._held = self._held + payload, b""
        if not payload.endswith(_ENDS):
            whole = max((payload.rfind(end) + len(end) for end in _ENDS if end in payload), default=0)
            if whole or len(payload) < MAX_HELD_BYTES:
                payload, self._held = payload[:whole], payload[whole:]
                if not payload:
                    return b""
        self.events += payload.count(b"\n\n") or payload.count(b"\r\n\r\n")
        self.before_last, self.last = self.last, payload
        return payload

    @property
    def held(self) -> bytes:
        """What has not been passed on."""
        return self._held
