"""The answer from an application over gRPC: messages with JSON, or a status."""

import asyncio
import codecs
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Never, TypeAlias

import grpc
import msgspec

from pointsman.errors import PointsmanError
from pointsman.gateway.pipelines.step_call import StepFailure
from pointsman.http.responses import ResponseHead
from pointsman.http.server import RequestHandler
from pointsman.wire import Form

Split: TypeAlias = Callable[[str], list[str]]

LINES, TEXT, EVENTS = b"application/x-ndjson", b"text/plain", b"text/event-stream"
BYTES = b"application/octet-stream"


class JsonPieces:
    """Splits an answer into pieces as it arrives. A piece is a line of JSON, a text, a model's event, or the whole
    value."""

    def __init__(self, content_type: bytes) -> None:
        self._type = content_type.partition(b";")[0].strip().lower()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._end, self._read = _SEVERAL.get(self._type, ("", _as_it_is))
        self._held = ""
        self._whole: list[bytes] = []

    @property
    def are_several(self) -> bool:
        """Whether the answer comes in pieces, even if there is only one piece."""
        return self._type in _SEVERAL

    def feed(self, payload: bytes) -> list[str]:
        """The pieces that this payload completes."""
        if not self.are_several:
            self._whole.append(payload)
            return []
        text = self._held + self._decode(payload)
        if not self._end:  # text has no separators, so each payload is a piece
            return self._read(text)
        *whole, self._held = text.replace("\r\n", "\n").split(self._end)
        return [piece for part in whole for piece in self._read(part)]

    def end(self) -> list[str]:
        if not self.are_several:
            whole = b"".join(self._whole)
            return [(msgspec.json.encode(whole) if self._type == BYTES else whole).decode("utf-8", "replace")]
        return self._read(self._held + self._decode(b"", True))


def _as_it_is(text: str) -> list[str]:
    return [text] if text.strip() else []


def _as_string(text: str) -> list[str]:
    return [msgspec.json.encode(text).decode()] if text else []


def _data(event: str) -> list[str]:
    """The data of an event; empty for the end mark."""
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
"""How to split each content type: the separator after a piece, and the function that reads a piece."""


MANY, FEW = 64, 16
"""If MANY pieces wait for the client, the response is paused. If fewer than FEW wait, it is resumed."""


class NotAnswered(PointsmanError):
    """Raised if there is no answer, or if the rest of an answer is missing. Contains the HTTP status and the reason."""

    def __init__(self, status: int, why: str, retry_after_s: int | None = None) -> None:
        self.status, self.retry_after_s = status, retry_after_s
        super().__init__(why)


class GrpcSink:
    """A client over gRPC. Pieces wait here until the client has read the pieces before them."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.came_in_pieces = False
        self._handler: RequestHandler | None = None
        self._reading: JsonPieces | None = None
        self._waiting: deque[str] = deque()
        self._paused = False
        self._over = False
        self._failure: NotAnswered | None = None
        self._news = asyncio.Event()

    # Called by the request

    def wait_for(self, handler: RequestHandler) -> None:
        self._handler = handler

    def answer(self, content_type: bytes, body: bytes) -> None:
        self._begin(content_type)
        self.piece(body)
        self.ended()

    def began(self, head: ResponseHead) -> None:
        self._begin(head.content_type)

    def piece(self, payload: bytes) -> None:
        assert self._reading is not None
        self._add(self._reading.feed(payload))

    def ended(self) -> None:
        assert self._reading is not None
        self._add(self._reading.end())
        self._end()

    def failed(self, failure: StepFailure, step: str, node: str) -> None:
        self._failure = NotAnswered(failure.status, message_of(failure, node), failure.retry_after_s)
        self._end()

    def _begin(self, content_type: bytes) -> None:
        self._reading = JsonPieces(content_type)
        self.came_in_pieces = self._reading.are_several

    def _add(self, pieces: list[str]) -> None:
        self._waiting += pieces
        if len(self._waiting) >= MANY and not self._paused and self._handler is not None:
            self._paused = True
            self._handler.pause()
        self._news.set()

    def _end(self) -> None:
        self._over = True
        self._news.set()

    # Called by the gRPC call

    async def __aiter__(self) -> AsyncIterator[str]:
        """Every piece, as it arrives. If the request failed, raises `NotAnswered` after the last piece."""
        while True:
            while self._waiting:
                piece = self._waiting.popleft()
                if self._paused and len(self._waiting) < FEW and self._handler is not None:
                    self._paused = False
                    self._handler.resume()
                yield piece
            if self._failure is not None:
                raise self._failure
            if self._over:
                return
            self._news.clear()
            await self._news.wait()

    def leave(self) -> None:
        """Note that the client has received its answer, or has disconnected."""
        if not self._over and self._handler is not None:
            self._handler.abandon()
        self._over = True


class _Field(msgspec.Struct):
    loc: list[str | int] = []
    msg: str = ""


class _Refused(msgspec.Struct):
    """Invalid input, as an ingress reports it."""

    detail: list[_Field]


def message_of(failure: StepFailure, node: str) -> str:
    """The reason why there is no answer: the field that is wrong, or the node that has failed."""
    if failure.body:
        try:
            fields = msgspec.json.decode(failure.body, type=_Refused).detail
        except msgspec.DecodeError:
            return f"{failure.why}: {failure.body.decode('utf-8', 'replace')}"
        return "; ".join(f"{'.'.join(map(str, field.loc)) or 'input'}: {field.msg}" for field in fields) or str(
            failure.why
        )
    return str(failure.of_node(node))


Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""The gRPC code for each HTTP status. All other statuses become INTERNAL."""

MAX_MESSAGE = 2000
"""Maximum number of characters in an error message. It is sent as a header, and clients accept 8 KiB of headers."""


async def refuse(context: Context, error: NotAnswered, request_id: str) -> Never:
    trailing = [("x-request-id", request_id)] if request_id else []
    if error.retry_after_s is not None:
        trailing.append(("retry-after", str(error.retry_after_s)))
    message = str(error)
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}…"
    await context.abort(CODES.get(error.status, grpc.StatusCode.INTERNAL), message, tuple(trailing))
