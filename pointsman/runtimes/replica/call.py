"""One call under way: what it was asked, whether it is over, and its one answer."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from pointsman.pipeline.context import CallContext
from pointsman.runtimes.connection import ServerExchange
from pointsman.runtimes.replica.answers import Pieces, error_answer, problem, whole_answer
from pointsman.runtimes.replica.methods import Method
from pointsman.runtimes.wire import CallHead, SharedMemory

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
