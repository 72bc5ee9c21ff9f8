"""What code returned or raised, as it is answered: a value for the next step, JSON or events for a client, an error."""

import asyncio
import os
import traceback
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, Protocol

import msgspec

from pointsman.errors import PointsmanError
from pointsman.http.server import JSON, ServerExchange
from pointsman.pipeline.context import CallContext
from pointsman.replica.methods import Method
from pointsman.wire import BLOB, PIECES, CallFailed, CallHead, Form, SharedMemory, encode_value

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


# One call under way: what it was asked, whether it is over, and its one answer.


PASSED_ON = b"x-pointsman-pieces: 1\r\n"
"""Says that whoever passes pieces on need not wait for the last."""


class Cancellable(Protocol):
    """What runs for a call."""

    def cancel(self) -> Any: ...


class ReplicaCall:
    """Ends exactly once: it is answered, it fails, its time is over, or its client is gone."""

    __slots__ = (
        "_exchange", "_over", "_pieces", "_shared", "_timer", "args", "context", "ended", "form", "handed_handles",
        "kwargs", "method", "task",
    )  # fmt: skip

    def __init__(
        self,
        exchange: ServerExchange,
        head: CallHead,
        method: Method,
        args: list[Any],
        kwargs: dict[str, Any],
        context: CallContext,
        shared: SharedMemory | None,
        ended: Callable[["ReplicaCall"], None],
    ) -> None:
        self.method = method
        self.args = args
        self.kwargs = kwargs
        self.context = context
        self.form = head.form
        self.handed_handles = False
        """Among its arguments are handles: it may wait for others."""
        self.ended = ended
        self.task: Cancellable | None = None
        """To be cancelled if nobody wants the answer any more."""
        self._exchange = exchange
        self._shared = shared
        self._over = False
        self._pieces: Pieces | None = None
        """Some of the answer is out already."""
        self._timer: asyncio.TimerHandle | None = None
        exchange.gone = self.give_up

    @property
    def is_over(self) -> bool:
        """Whatever else is done for it is done for nobody."""
        return self._over

    def watch(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """Give it so long."""
        self._timer = loop.call_later(seconds, self._expire)

    def finish(self, value: Any) -> None:
        """The code has returned."""
        if self._over:
            return
        try:
            kind, body = whole_answer(value, self.form, self._shared)
        except Exception as error:  # a value that cannot be told, or a class of the user's that breaks on the way
            self.fail(error)
            return
        self._end()
        self._exchange.respond(200, body, kind)

    def fail(self, error: BaseException) -> None:
        """The code has raised."""
        if self._over:
            return
        self._end()
        if not self._broke_off(error):
            self._exchange.respond(*error_answer(error))

    def give_up(self) -> None:
        """Its client is gone, or wants it no more."""
        if not self._over:
            self._end()
            if self.task is not None:
                self.task.cancel()

    # Piece by piece

    def begin_pieces(self, first: Any) -> Pieces:
        """The head of the answer; what follows are pieces."""
        pieces = Pieces(self.form)
        kind = pieces.kind_for(first)
        if not self._over:
            self._pieces = pieces
            self._exchange.open_stream(kind, PASSED_ON)
        return pieces

    def add(self, piece: bytes) -> None:
        if not self._over:
            self._exchange.add(piece)

    def end_pieces(self) -> None:
        if not self._over:
            assert self._pieces is not None
            self._end()
            self._exchange.end_stream(self._pieces.end)

    @property
    def is_full(self) -> bool:
        """The client is slower than the code."""
        return self._exchange.connection.is_full

    async def room(self) -> None:
        await self._exchange.connection.room()

    # The end

    def _expire(self) -> None:
        if self._over:
            return
        self._end()
        if self.task is not None:
            self.task.cancel()
        if not self._broke_off(TimeoutError("its time was over")):
            said = f"{self.method.name} was not done when its time was over"
            self._exchange.respond(504, problem("DeadlineExceeded", said))

    def _broke_off(self, error: BaseException) -> bool:
        """Whether part of the answer was out already; then nothing more will come."""
        if self._pieces is None:
            return False
        self._exchange.add(self._pieces.failed(error))
        self._exchange.cut()
        return True

    def _end(self) -> None:
        self._over = True
        self._exchange.gone = None
        if self._timer is not None:
            self._timer.cancel()
        self.ended(self)
