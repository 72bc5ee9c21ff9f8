"""What code returned or raised, as it is answered: a value for the next step, JSON or events for a client, an error."""

import os
import traceback
from dataclasses import is_dataclass
from typing import Any

import msgspec

from pointsman.errors import PointsmanError
from pointsman.runtimes.connection import JSON
from pointsman.runtimes.wire import BLOB, PIECES, CallFailed, Form, SharedMemory, encode_value

EVENTS = "text/event-stream; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
LINES = "application/x-ndjson"
BYTES = "application/octet-stream"
_OURS = os.path.dirname(__file__)  # noqa: PTH120 - compared with the names in frames, as they are


class CallRefused(PointsmanError):
    """What a client sent cannot be the input; `detail` says which field and why."""

    def __init__(self, detail: Any, status: int = 422) -> None:
        self.detail = detail
        self.status = status
        super().__init__(str(detail))


def whole_answer(value: Any, form: Form, shared: SharedMemory | None) -> tuple[str, bytes]:
    """Content type and body. Raises if the value cannot be told."""
    if form in ("blob", "value"):
        return BLOB, encode_value(value, shared if form == "blob" else None)
    if form == "whole":
        return JSON, to_json(value)
    if form == "json":
        return (BYTES, bytes(value)) if isinstance(value, bytes | bytearray) else (JSON, to_json(value))
    pieces = Pieces(form)
    return pieces.kind_for(value), pieces.encode(value) + pieces.end


class Pieces:
    """What a generator yields, as it goes out."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._as_text = False
        self.end = b"data: [DONE]\n\n" if form == "events" else b""

    def kind_for(self, first: Any) -> str:
        """The content type, which the first piece decides."""
        if self._form == "events":
            return EVENTS
        if self._form == "pieces":
            return PIECES
        self._as_text = isinstance(first, str)
        return TEXT if self._as_text else LINES

    def encode(self, piece: Any) -> bytes:
        if self._form == "pieces":
            blob = encode_value(piece)
            return len(blob).to_bytes(4, "little") + blob
        if self._form == "events":
            text = piece.encode() if isinstance(piece, str) else to_json(piece)
            lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            return b"".join(b"data: %b\n" % line for line in lines) + b"\n"
        if self._as_text and isinstance(piece, str):
            return piece.encode()
        return to_json(piece) + b"\n"

    def failed(self, error: BaseException) -> bytes:
        """What can still be said when the beginning is out already; the connection is cut after it."""
        if self._form != "events":
            return b""
        said = {"type": type(error).__name__, "message": str(error)}
        return b"data: " + msgspec.json.encode({"error": said}) + b"\n\n"


def to_json(value: Any) -> bytes:
    """A value as clients read it. Raises TypeError for what has no JSON."""
    return msgspec.json.encode(value, enc_hook=_plainer)


def error_answer(error: BaseException) -> tuple[int, bytes]:
    """Status and body for what the user's code raised."""
    if isinstance(error, CallRefused):
        return error.status, to_json({"detail": error.detail})
    said: dict[str, Any] = {"type": type(error).__name__, "message": str(error), "traceback": _own_traceback(error)}
    status = 500
    if isinstance(error, CallFailed):  # of a node that this one called: who called it was not at fault
        said |= {"message": error.message, "type": error.kind or said["type"], "node": error.node}
        said["traceback"] = error.trace or said["traceback"]
        status = 504 if error.status == 504 else 500
    return status, to_json(said)


def problem(kind: str, message: str) -> bytes:
    """The body of an answer that says what was wrong, where no code of the user's was run."""
    return msgspec.json.encode({"type": kind, "message": message, "traceback": ""})


def _own_traceback(error: BaseException) -> str:
    """From where the user's code begins."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS) and frames.tb_next is not None:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _plainer(value: Any) -> Any:
    """What JSON does not know, in terms of what it does: pydantic, arrays, numbers of numpy, iterables."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "__fspath__"):
        return value.__fspath__()
    if isinstance(value, complex):
        return [value.real, value.imag]
    if is_dataclass(value):  # one with slots of its own
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    raise TypeError(
        f"a {type(value).__name__} has no JSON; return plain data, a dataclass, a pydantic model or an array"
    )
