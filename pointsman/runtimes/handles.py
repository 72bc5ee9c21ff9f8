"""Handles: other nodes, as the code that was given them calls them.

Enters: arguments, from async code or from plain code in a thread. Leaves: a `Response`, which can be awaited, or waited
for with `.result()`. The one rule: what the current call knows (request, priority, tenant, time left) goes along.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol

from pointsman.errors import PointsmanError
from pointsman.pipeline.context import current
from pointsman.pipeline.graph import CALL
from pointsman.runtimes.wire import CallFailed, CallHead, Form, encode_call, placeholder, template

CALL_PATH = "/pipelines/call"


class CallAnswer(Protocol):
    """What came back."""

    status: int

    async def read(self) -> bytes: ...

    def pieces(self) -> AsyncIterator[bytes]: ...


class Transport(Protocol):
    """The way to the gateway."""

    def ask(self, path: str, body: bytes, headers: Mapping[str, str]) -> AbstractAsyncContextManager[CallAnswer]:
        """POST, and the answer; leaving before its end gives it up. Raises `CallFailed`."""


class HandleLink(NamedTuple):
    """All that handles of one process share."""

    transport: Transport
    loop: asyncio.AbstractEventLoop
    """On which the transport lives; handles may be used from anywhere."""
    encode: Callable[[Any], bytes]
    """A value as a blob, and back."""
    decode: Callable[[bytes], Any]
    app: str = ""


class Response:
    """An answer to come. It is under way already; whoever awaits it and is cancelled gives it up."""

    def __init__(self, running: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._at_home = _loop_here() is loop
        self._awaited: Any = (
            loop.create_task(running) if self._at_home else asyncio.run_coroutine_threadsafe(running, loop)
        )

    def __await__(self) -> Generator[Any, None, Any]:
        awaited = self._awaited if self._at_home else asyncio.wrap_future(self._awaited)
        return awaited.__await__()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for it, in plain code. Raises TimeoutError if it has not come by then; it stays under way."""
        if _loop_here() is self._loop:
            raise PointsmanError("result() would keep everybody waiting here; in async code, await the response")
        awaited = self._awaited
        if self._at_home:
            awaited = asyncio.run_coroutine_threadsafe(_outcome(awaited), self._loop)
        return awaited.result(timeout_s)

    def cancel(self) -> None:
        """Nobody wants it any more."""
        if self._at_home:
            self._loop.call_soon_threadsafe(self._awaited.cancel)
        else:
            self._awaited.cancel()


class Stream:
    """An answer piece by piece: `async for`, or `for` in plain code."""

    def __init__(self, pieces: AsyncIterator[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._pieces = pieces
        self._loop = loop

    async def __aiter__(self) -> AsyncIterator[Any]:
        at_home = _loop_here() is self._loop
        try:
            while True:
                step = _next(self._pieces)
                there, piece = await (
                    step if at_home else asyncio.wrap_future(asyncio.run_coroutine_threadsafe(step, self._loop))
                )
                if not there:
                    return
                yield piece
        finally:
            closing = _closed(self._pieces)
            if at_home:
                await closing
            else:
                asyncio.run_coroutine_threadsafe(closing, self._loop)

    def __iter__(self) -> Iterator[Any]:
        if _loop_here() is self._loop:
            raise PointsmanError("a plain for would keep everybody waiting here; in async code, write async for")
        try:
            while True:
                there, piece = asyncio.run_coroutine_threadsafe(_next(self._pieces), self._loop).result()
                if not there:
                    return
                yield piece
        finally:
            asyncio.run_coroutine_threadsafe(_closed(self._pieces), self._loop)


class HandleMethod:
    """A method of another node."""

    def __init__(self, link: HandleLink, node: str, method: str) -> None:
        self._link = link
        self._node = node
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Response:
        """Call it: `await handle.method(x)`."""
        return Response(self._answer(self._encoded("blob", args, kwargs)), self._link.loop)

    def remote(self, *args: Any, **kwargs: Any) -> Response:
        """The same: `handle.method.remote(x).result()`."""
        return self(*args, **kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """Call a generator: its pieces, as they come."""
        return Stream(self._pieces(self._encoded("pieces", args, kwargs)), self._link.loop)

    def _encoded(self, form: Form, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        context = current()
        head = CallHead(
            method=self._method,
            args=template([placeholder(place) for place in range(len(args))]),
            kwargs=template({name: placeholder(len(args) + place) for place, name in enumerate(kwargs)}),
            form=form,
            request_id=context.request_id,
            deadline_s=context.time_left_s,
            priority=context.priority,
            tenant=context.tenant,
            app=self._link.app,
            node=self._node,
            step=context.step,
        )
        return encode_call(head, [self._link.encode(value) for value in (*args, *kwargs.values())])

    async def _answer(self, body: bytes) -> Any:
        async with self._link.transport.ask(CALL_PATH, body, {}) as answer:
            said = await answer.read()
        if answer.status != 200:
            raise CallFailed.from_answer(answer.status, said, self._node)
        return self._link.decode(said)

    async def _pieces(self, body: bytes) -> AsyncIterator[Any]:
        async with self._link.transport.ask(CALL_PATH, body, {}) as answer:
            if answer.status != 200:
                raise CallFailed.from_answer(answer.status, await answer.read(), self._node)
            held = b""
            async for data in answer.pieces():
                held += data
                while len(held) >= 4 and len(held) >= (end := 4 + int.from_bytes(held[:4], "little")):
                    yield self._link.decode(held[4:end])
                    held = held[end:]


class Handle(HandleMethod):
    """Another node. Called, it is its `__call__`; its methods are attributes."""

    def __init__(self, link: HandleLink, node: str) -> None:
        super().__init__(link, node, CALL)

    def __getattr__(self, name: str) -> HandleMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        return HandleMethod(self._link, self._node, name)

    def __repr__(self) -> str:
        return f"<handle to {self._node}>"


def _loop_here() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _outcome(task: "asyncio.Task[Any]") -> Any:
    return await asyncio.shield(task)


async def _next(pieces: AsyncIterator[Any]) -> tuple[bool, Any]:
    try:
        return True, await anext(pieces)
    except StopAsyncIteration:
        return False, None


async def _closed(pieces: Any) -> None:
    await pieces.aclose()
