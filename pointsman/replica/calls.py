"""Calls in flight, and their answers: a value for the next step, JSON or events for a client, or an error."""

import asyncio
import os
import traceback
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import msgspec

from pointsman.errors import PointsmanError
from pointsman.http.responses import CONTENT_TYPE as EVENTS
from pointsman.http.responses import DONE, event
from pointsman.http.server import JSON, ResponseStream, ServerConnection
from pointsman.pipeline.context import CallContext
from pointsman.replica.calling import Cancellable
from pointsman.replica.methods import Method
from pointsman.wire import (
    BLOB,
    PIECES,
    CallFailed,
    CallHead,
    Form,
    SharedBuffers,
    encode_value,
    failed_after_pieces,
    pickled,
)

TEXT = b"text/plain; charset=utf-8"
LINES = b"application/x-ndjson"
BYTES = b"application/octet-stream"
BLOB_TYPE, PIECES_TYPE = BLOB.encode(), PIECES.encode()
_HERE = os.path.dirname(__file__)  # noqa: PTH120 - compared with file names of frames


class CallRefused(PointsmanError):
    """A client's input is not valid; `detail` says which field is wrong, and why."""

    def __init__(self, detail: Any, status: int = 422) -> None:
        self.detail = detail
        self.status = status
        super().__init__(str(detail))


def whole_answer(value: Any, form: Form, shared: SharedBuffers | None) -> tuple[bytes, bytes]:
    """Content type and body of an answer in one piece. Raises if the value cannot be encoded."""
    if form in ("blob", "value"):
        return BLOB_TYPE, encode_value(value, shared if form == "blob" else None)
    if form == "whole":
        return JSON, to_json(value)
    if form == "json":
        return (BYTES, bytes(value)) if isinstance(value, bytes | bytearray) else (JSON, to_json(value))
    pieces = Pieces(form)
    return pieces.kind_for(value), pieces.encode(value) + pieces.end


class Pieces:
    """Encodes the pieces that a generator yields."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._as_text = False
        self.end = DONE if form == "events" else b""

    def kind_for(self, first: Any) -> bytes:
        """The content type of the answer, which depends on the first piece."""
        if self._form == "events":
            return EVENTS
        if self._form == "pieces":
            return PIECES_TYPE
        self._as_text = isinstance(first, str)
        return TEXT if self._as_text else LINES

    def encode(self, piece: Any) -> bytes:
        if self._form == "pieces":
            blob = encode_value(piece)
            return len(blob).to_bytes(4, "little") + blob
        if self._form == "events":
            return event(piece.encode() if isinstance(piece, str) else to_json(piece))
        if self._as_text and isinstance(piece, str):
            return piece.encode()
        return to_json(piece) + b"\n"


def to_json(value: Any) -> bytes:
    """A value as JSON. Raises TypeError if the value has no form in JSON."""
    return msgspec.json.encode(value, enc_hook=_as_plain)


def error_answer(error: BaseException) -> tuple[int, bytes]:
    """Status and body for an exception that the user's code has raised."""
    if isinstance(error, CallRefused):
        return error.status, to_json({"detail": error.detail})
    body: dict[str, Any] = {"type": type(error).__name__, "message": str(error), "traceback": own_traceback(error)}
    status = 500
    if isinstance(error, CallFailed):  # the error of a node that this node has called
        body |= {"message": error.message, "type": error.kind or body["type"], "node": error.node}
        body["traceback"] = error.trace or body["traceback"]
        status = error.status if error.status in (429, 504) else 500  # too late, or over a limit of its tenant
    elif made := pickled(error):
        body["pickled"] = made
    return status, to_json(body)


def problem(kind: str, message: str) -> bytes:
    """The body of an error that occurs before any user code has run."""
    return msgspec.json.encode({"type": kind, "message": message, "traceback": ""})


def own_traceback(error: BaseException) -> str:
    """The traceback, without the frames above the user's code."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_HERE) and frames.tb_next is not None:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _as_plain(value: Any) -> Any:
    """A value of pydantic, numpy or another library as a value of a type that JSON has."""
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
    if is_dataclass(value):  # one with its own slots
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    raise TypeError(
        f"a {type(value).__name__} has no JSON; return plain data, a dataclass, a pydantic model or an array"
    )


PASSED_ON = b"x-pointsman-pieces: 1\r\n"
"""This header tells the gateway to pass on the pieces as they arrive."""


class StreamedAnswer:
    """Sends the pieces of a generator to the client."""

    def __init__(self, connection: ServerConnection, form: Form) -> None:
        self._connection = connection
        self._pieces = Pieces(form)
        self._stream: ResponseStream | None = None
        self._room: asyncio.Event | None = None
        """An event: the client has read what was written. None while the client keeps up."""
        self.encode = self._pieces.encode
        """Converts a piece to bytes; it may run in any thread."""

    def begin(self, first: Any) -> None:
        lines = b"content-type: %b\r\n%b" % (self._pieces.kind_for(first), PASSED_ON)
        self._stream = ResponseStream(self._connection, lines)

    def add(self, piece: bytes) -> None:
        if self._stream is not None:
            self._stream.write(piece)

    def end(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.end(self._pieces.end)

    def break_off(self, failure: tuple[int, bytes] | None = None) -> None:
        """End the stream. `failure`: status and body of the error, which follow the last piece."""
        stream, self._stream = self._stream, None
        self.resume()
        if stream is None or failure is None:
            return
        if stream.is_chunked:
            stream.end(trailers=failed_after_pieces(*failure))
        else:
            stream.cut()

    def pause(self) -> None:
        self._room = self._room or asyncio.Event()

    def resume(self) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None

    @property
    def is_full(self) -> bool:
        """Whether the client is slower than the code."""
        return self._room is not None

    async def room(self) -> None:
        """Wait until the client has read enough, or has disconnected."""
        if self._room is not None:
            await self._room.wait()


class ReplicaCall:
    """A call ends exactly once: it is answered, it fails, its deadline passes, or its client disconnects."""

    __slots__ = (
        "_connection", "_shared", "_streamed", "_timer", "args", "context", "ended", "form", "handed_handles",
        "is_over", "kwargs", "method", "task",
    )  # fmt: skip

    def __init__(
        self,
        connection: ServerConnection,
        head: CallHead,
        method: Method,
        args: list[Any],
        kwargs: dict[str, Any],
        context: CallContext,
        shared: SharedBuffers | None,
        ended: Callable[["ReplicaCall"], None],
    ) -> None:
        self.method = method
        self.args = args
        self.kwargs = kwargs
        self.context = context
        self.form = head.form
        self.handed_handles = False
        """Whether handles are among the call's arguments. If so, the call may wait for other nodes."""
        self.ended = ended
        self.task: Cancellable | None = None
        """The task of the call; it is cancelled if the answer is no longer needed."""
        self.is_over = False
        """Whether the call's result was sent, or is no longer needed."""
        self._connection = connection
        self._shared = shared
        self._streamed: StreamedAnswer | None = None
        """The answer in pieces; None until the first piece."""
        self._timer: asyncio.TimerHandle | None = None
        connection.serving = self

    def watch(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._timer = loop.call_later(seconds, self._expire)

    def finish(self, value: Any) -> None:
        if self.is_over:
            return
        try:
            kind, body = whole_answer(value, self.form, self._shared)
        except Exception as error:  # the value cannot be encoded, or the user's class raises while it is encoded
            self.fail(error)
            return
        self._end()
        self._connection.answer(200, body, kind)

    def begin_pieces(self, first: Any) -> StreamedAnswer:
        """Begin an answer in pieces. `first`: the first piece that the code yielded."""
        streamed = StreamedAnswer(self._connection, self.form)
        if not self.is_over:
            self._streamed = streamed
            streamed.begin(first)
        return streamed

    def end_pieces(self) -> None:
        if not self.is_over:
            assert self._streamed is not None
            self._end()
            self._streamed.end()

    def fail(self, error: BaseException) -> None:
        if self.is_over:
            return
        self._end()
        if self._streamed is not None:
            self._streamed.break_off(error_answer(error))
        else:
            self._connection.answer(*error_answer(error))

    # The client

    def abandon(self) -> None:
        if self.is_over:
            return
        self._end()
        if self._streamed is not None:
            self._streamed.break_off()
        if self.task is not None:
            self.task.cancel()

    def pause(self) -> None:
        if self._streamed is not None:
            self._streamed.pause()

    def resume(self) -> None:
        if self._streamed is not None:
            self._streamed.resume()

    # The end

    def _expire(self) -> None:
        if self.is_over:
            return
        self._end()
        if self.task is not None:
            self.task.cancel()
        late = problem("DeadlineExceeded", f"{self.method.name} did not end before its deadline")
        if self._streamed is not None:
            self._streamed.break_off((504, late))
        else:
            self._connection.answer(504, late)

    def _end(self) -> None:
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self.ended(self)
