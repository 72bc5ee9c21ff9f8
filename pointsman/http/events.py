"""Server-sent events passed through: only whole ones, and read along without touching a byte."""

MAX_HELD_BYTES = 1024 * 1024
"""An event longer than this is passed on in parts."""

FIELDS = (b"data", b"event", b"id", b"retry", b":", b"\n", b"\r")
"""What a stream of events may begin with."""

_ENDS = (b"\n\n", b"\r\n\r\n")


def ends_with_done(events: bytes) -> bool:
    """Whether the last of these events is the end mark, and not a text that has it in it."""
    name, _, value = events.rstrip().rpartition(b"\n")[2].partition(b":")
    return name == b"data" and value.strip() == b"[DONE]"


class EventStream:
    """Holds back what is not a whole event yet: whoever is cut off in the middle of one cannot be told so."""

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
