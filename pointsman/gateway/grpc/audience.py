"""A client over gRPC that waits for the answer of an application."""

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from pointsman.errors import PointsmanError
from pointsman.gateway.answers import AnswerHead
from pointsman.gateway.client import Service
from pointsman.gateway.grpc.pieces import JsonPieces
from pointsman.gateway.pipelines.step_call import StepFailure
from pointsman.runtimes.wire import Form

MANY, FEW = 64, 16
"""Pieces that may wait for the client to take them; once there are so many, no more come until there are few."""


_CONTENT_TYPE = re.compile(rb"^content-type:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)


class NotAnswered(PointsmanError):
    """There is no answer, or no more of it: what HTTP calls that, and why."""

    def __init__(self, status: int, why: str, retry_after_s: int | None = None) -> None:
        self.status, self.retry_after_s = status, retry_after_s
        super().__init__(why)


class GrpcSink:
    """Pieces wait here until the client has taken those before them."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.came_in_pieces = False
        self._travelling: Service | None = None
        self._reading: JsonPieces | None = None
        self._waiting: deque[str] = deque()
        self._paused = False
        self._over = False
        self._failure: NotAnswered | None = None
        self._news = asyncio.Event()

    # What the request says

    def wait_for(self, travelling: Service) -> None:
        self._travelling = travelling

    def answer(self, content_type: bytes, body: bytes) -> None:
        self._begin(content_type)
        self.piece(body)
        self.ended()

    def began(self, head: AnswerHead) -> None:
        found = _CONTENT_TYPE.search(head.lines)
        self._begin(b"" if found is None else found[1])

    def piece(self, payload: bytes) -> None:
        assert self._reading is not None
        self._add(self._reading.feed(payload))

    def ended(self) -> None:
        assert self._reading is not None
        self._add(self._reading.end())
        self._end()

    def failed(self, failure: StepFailure, step: str, node: str) -> None:
        self._failure = NotAnswered(failure.status, in_words(failure, node), failure.retry_after_s)
        self._end()

    def _begin(self, content_type: bytes) -> None:
        self._reading = JsonPieces(content_type)
        self.came_in_pieces = self._reading.are_several

    def _add(self, pieces: list[str]) -> None:
        self._waiting += pieces
        if len(self._waiting) >= MANY and not self._paused and self._travelling is not None:
            self._paused = True
            self._travelling.pause()
        self._news.set()

    def _end(self) -> None:
        self._over = True
        self._news.set()

    # What the call does

    async def __aiter__(self) -> AsyncIterator[str]:
        """Every piece, as it comes. Raises `NotAnswered`, after those that have come."""
        while True:
            while self._waiting:
                piece = self._waiting.popleft()
                if self._paused and len(self._waiting) < FEW and self._travelling is not None:
                    self._paused = False
                    self._travelling.resume()
                yield piece
            if self._failure is not None:
                raise self._failure
            if self._over:
                return
            self._news.clear()
            await self._news.wait()

    def leave(self) -> None:
        """The client has its answer, or has gone."""
        if not self._over and self._travelling is not None:
            self._travelling.abandon()
        self._over = True


class _Field(msgspec.Struct):
    loc: list[str | int] = []
    msg: str = ""


class _Refused(msgspec.Struct):
    """What an ingress says of input that is not as it should be."""

    detail: list[_Field]


def in_words(failure: StepFailure, node: str) -> str:
    """Why there is no answer: which field is wrong, or which node has failed."""
    if failure.body:
        try:
            fields = msgspec.json.decode(failure.body, type=_Refused).detail
        except msgspec.DecodeError:
            return f"{failure.why}: {failure.body.decode('utf-8', 'replace')}"
        return "; ".join(f"{'.'.join(map(str, field.loc)) or 'input'}: {field.msg}" for field in fields) or failure.why
    return f'node "{node}": {failure.why}' if node else failure.why
