"""An answer as messages, each of them JSON."""

import codecs
from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec

Split: TypeAlias = Callable[[str], list[str]]

LINES, TEXT, EVENTS = b"application/x-ndjson", b"text/plain", b"text/event-stream"
BYTES = b"application/octet-stream"


class JsonPieces:
    """Takes the pieces out of an answer as it comes: lines of JSON, text, events (of a model), or one value."""

    def __init__(self, content_type: bytes) -> None:
        self._type = content_type.partition(b";")[0].strip().lower()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._end, self._read = _SEVERAL.get(self._type, ("", _as_it_is))
        self._held = ""
        self._whole: list[bytes] = []

    @property
    def are_several(self) -> bool:
        """Whether it is an answer piece by piece, however many there are."""
        return self._type in _SEVERAL

    def feed(self, payload: bytes) -> list[str]:
        """The pieces that are whole now."""
        if not self.are_several:
            self._whole.append(payload)
            return []
        text = self._held + self._decode(payload)
        if not self._end:  # text has no ends: what has come is a piece
            return self._read(text)
        *whole, self._held = text.replace("\r\n", "\n").split(self._end)
        return [piece for part in whole for piece in self._read(part)]

    def end(self) -> list[str]:
        """What is left when everything has come."""
        if not self.are_several:
            whole = b"".join(self._whole)
            return [(msgspec.json.encode(whole) if self._type == BYTES else whole).decode("utf-8", "replace")]
        return self._read(self._held + self._decode(b"", True))


def _as_it_is(text: str) -> list[str]:
    return [text] if text.strip() else []


def _as_string(text: str) -> list[str]:
    return [msgspec.json.encode(text).decode()] if text else []


def _data(event: str) -> list[str]:
    """What an event says; the last one says nothing."""
    lines = [line.partition(":")[2].removeprefix(" ") for line in event.split("\n") if line.startswith("data:")]
    data = "\n".join(lines)
    if not lines or data == "[DONE]":
        return []
    try:
        msgspec.json.decode(data)
    except msgspec.DecodeError:
        return _as_string(data)
    return [data]


_SEVERAL: Mapping[bytes, tuple[str, Split]] = {
    LINES: ("\n", _as_it_is),
    TEXT: ("", _as_string),
    EVENTS: ("\n\n", _data),
}
"""By type: how a piece ends, and how it is read."""
