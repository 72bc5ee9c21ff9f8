"""Handles: how user code calls other nodes and models.

Enters: arguments, from async code or from plain code in a thread. Leaves: a `Response`. Async code awaits it, and plain
code calls its `.result()`. The one rule: a call inherits request, priority, tenant and remaining time from its caller.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from pointsman.control.desired import Address
from pointsman.errors import PointsmanError
from pointsman.http.client import HttpClient, NoResponse, StreamedResponse
from pointsman.http.pool import UnixSocket
from pointsman.http.responses import data_in
from pointsman.parameters import host_and_port
from pointsman.pipeline.context import current
from pointsman.pipeline.graph import CALL
from pointsman.wire import CallFailed, CallHead, Form, PieceReader, encode_call, placeholder, raised_by, template

CALL_PATH = "/pipelines/call"


class CallAnswer(Protocol):
    @property
    def status(self) -> int: ...

    async def read(self) -> bytes: ...

    def pieces(self) -> AsyncIterator[bytes]: ...


class Transport(Protocol):
    """The way to the gateway."""

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> AbstractAsyncContextManager[CallAnswer]:
        """Send a POST. If the caller leaves the context before the end of the response, the connection is closed.
        Raises `CallFailed`."""


class PlaneAddress:
    """The address of the plane's process: a unix socket, or, for processes on other machines, the address in a file.
    A file has the address because the next process of the plane may run on another machine."""

    def __init__(self, where: Path, *, is_file: bool = False, connect_timeout_s: float = 30.0) -> None:
        """`where`: the path of the socket or the file."""
        self.where = where
        self.is_file = is_file
        self.at = ""
        """The address that was last read from the file."""
        self._connect_timeout_s = connect_timeout_s
        self._client = HttpClient(UnixSocket(where), connect_timeout_s=connect_timeout_s)

    def client(self) -> HttpClient:
        """A client of the plane that the file now names. Raises `OSError` if the file cannot be read, and `ValueError`
        if it has no valid address."""
        at = self.named()
        if at != self.at:
            host, port = host_and_port(at)
            self.at = at
            self._client = HttpClient(Address(host, port, False), connect_timeout_s=self._connect_timeout_s)
        return self._client

    def named(self) -> str:
        """The address in the file; empty for a socket."""
        return self.where.read_text(encoding="ascii").strip() if self.is_file else ""


GATEWAYS = "gateways"
"""A file in the folder of the plane's socket or address. Each line is an address at which another gateway accepts calls
from replicas."""
LOOPBACK = "127.0.0.1"
"""The host at which gateways accept these calls if all replicas are on one machine."""
CONNECT_S = 1.0
AVOID_S = 5.0
"""For this long, a gateway that could not be reached comes after the other gateways."""


class GatewayTransport:
    """Sends calls to a gateway: to one with its own process, which outlives the plane, or else to the plane's gateway.

    Gateways on this machine come first, in turn. If a gateway accepts no connection, the next gateway gets the call. A
    call that was sent is not sent again, because it may have been carried out.
    """

    def __init__(self, where: Path, headers: str = "", *, is_file: bool = False, host: str = "") -> None:
        """`where`: the socket of the plane, or a file with its address. `host`: the host at which gateways on this
        machine accept calls; empty if only the plane accepts calls."""
        self._headers = headers
        self._host = host
        self._plane = PlaneAddress(where, is_file=is_file)
        self._file = where.with_name(GATEWAYS) if host else None
        self._listed = ""
        """The content of the file when it was last read."""
        self._clients: dict[str, HttpClient] = {}
        self._avoided: dict[str, float] = {}
        """For each gateway that could not be reached, the time from which it has its usual place again."""
        self._turn = 0

    def _ways(self) -> list[str]:
        """The addresses to try, in this order; an empty address stands for the plane."""
        with suppress(FileNotFoundError):  # the file does not exist before the first of these gateways starts
            listed = "" if self._file is None else self._file.read_text(encoding="ascii")
            if listed != self._listed:
                self._listed = listed
                self._clients = {at: self._clients.get(at) or _client_of(at) for at in listed.split()}
        self._turn += 1
        now, known = time.monotonic(), list(self._clients)
        turn = self._turn % len(known) if known else 0

        def distance(at: str) -> tuple[bool, bool]:
            return self._avoided.get(at, now) > now, host_and_port(at)[0] != self._host

        return [*sorted([*known[turn:], *known[:turn]], key=distance), ""]

    def _client(self, at: str) -> HttpClient:
        return self._clients[at] if at else self._plane.client()

    @asynccontextmanager
    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[StreamedResponse]:
        lines, failed = self._headers + "".join(f"{name}: {value}\r\n" for name, value in headers.items()), ""
        for at in self._ways():
            try:
                async with self._client(at).stream("POST", path, body, lines) as response:
                    yield response
                return
            except NoResponse as error:
                if error.began:
                    raise CallFailed("the answer broke off in the middle", status=502) from error
                failed = f"the gateway at {at or self._plane.at or self._plane.where} does not answer: {error}"
                if error.error is None:
                    raise CallFailed(failed, status=503) from error
                self._avoided[at] = time.monotonic() + AVOID_S
            except (OSError, ValueError) as error:
                failed = f"the gateway is not known: {self._plane.where}: {error}"
        raise CallFailed(failed, status=503)


def _client_of(address: str) -> HttpClient:
    host, port = host_and_port(address)
    return HttpClient(Address(host, port, False), connect_timeout_s=CONNECT_S)


class HandleLink(Protocol):
    """Makes calls to other nodes: through the gateway, or to nodes in this process."""

    def call(self, node: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Response":
        """Begin a call at once."""

    def stream(self, node: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Stream":
        """A call that begins when its first piece is read."""


class Response:
    """The answer to a call that was already sent. If code that awaits the answer is cancelled, so is the call."""

    def __init__(
        self, awaited: "asyncio.Task[Any] | Future[Any]", loop: asyncio.AbstractEventLoop | None, *, on_loop: bool
    ) -> None:
        """`awaited`: a task of the loop if `on_loop`; else a future of any thread. `loop`: the loop of the code that
        made the call; this loop must not be blocked."""
        self._loop = loop
        self._on_loop = on_loop
        self._awaited: Any = awaited

    @classmethod
    def to(cls, running: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> "Response":
        """The answer that a coroutine fetches on this loop."""
        if _loop_here() is loop:
            return cls(loop.create_task(running), loop, on_loop=True)
        return cls(asyncio.run_coroutine_threadsafe(running, loop), loop, on_loop=False)

    def __await__(self) -> Generator[Any, None, Any]:
        awaited = self._awaited if self._on_loop else asyncio.wrap_future(self._awaited)
        return awaited.__await__()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the answer, in plain code. If no answer arrives in time, raises TimeoutError; the call continues."""
        if self._loop is not None and _loop_here() is self._loop:
            raise PointsmanError("result() would block the event loop; in async code, await the response")
        awaited = self._awaited
        if self._on_loop:
            assert self._loop is not None
            awaited = asyncio.run_coroutine_threadsafe(_outcome(awaited), self._loop)
        return awaited.result(timeout_s)

    def cancel(self) -> None:
        if self._on_loop and self._loop is not None:
            self._loop.call_soon_threadsafe(self._awaited.cancel)
        else:
            self._awaited.cancel()


class Stream:
    """An answer piece by piece: read it with `async for`, or with `for` in plain code."""

    def __init__(
        self,
        pieces: AsyncIterator[Any],
        loop: asyncio.AbstractEventLoop,
        caller: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`loop`: the loop on which the pieces arrive. `caller`: the loop of the code that made the call, if that is
        another loop."""
        self._pieces = pieces
        self._loop = loop
        self._caller = loop if caller is None else caller

    async def __aiter__(self) -> AsyncIterator[Any]:
        on_loop = _loop_here() is self._loop
        try:
            while True:
                step = _next(self._pieces)
                has_piece, piece = await (
                    step if on_loop else asyncio.wrap_future(asyncio.run_coroutine_threadsafe(step, self._loop))
                )
                if not has_piece:
                    return
                yield piece
        finally:
            closing = _closed(self._pieces)
            if on_loop:
                await closing
            else:
                asyncio.run_coroutine_threadsafe(closing, self._loop)

    def __iter__(self) -> Iterator[Any]:
        if _loop_here() in (self._loop, self._caller):
            raise PointsmanError("a plain for would block the event loop; in async code, write async for")
        try:
            while True:
                has_piece, piece = asyncio.run_coroutine_threadsafe(_next(self._pieces), self._loop).result()
                if not has_piece:
                    return
                yield piece
        finally:
            asyncio.run_coroutine_threadsafe(_closed(self._pieces), self._loop)


class GatewayLink(NamedTuple):
    """A `HandleLink` to the nodes of a deployed application. All handles of one process share it."""

    transport: Transport
    loop: asyncio.AbstractEventLoop
    """The loop of the transport; handles may be used from any thread."""
    encode: Callable[[Any], bytes]
    """The functions that convert a value to a blob, and a blob to its value."""
    decode: Callable[[bytes], Awaitable[Any]]
    app: str = ""

    def call(self, node: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Response:
        return Response.to(self._answer(node, self._encoded(node, method, "blob", args, kwargs)), self.loop)

    def stream(self, node: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Stream:
        return Stream(self._pieces(node, self._encoded(node, method, "pieces", args, kwargs)), self.loop)

    def _encoded(self, node: str, method: str, form: Form, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        context = current()
        head = CallHead(
            method=method,
            args=template([placeholder(index) for index in range(len(args))]),
            kwargs=template({name: placeholder(len(args) + index) for index, name in enumerate(kwargs)}),
            form=form,
            request_id=context.request_id,
            deadline_s=context.time_left_s,
            priority=context.priority,
            tenant=context.tenant,
            app=self.app,
            node=node,
            step=context.step,
        )
        return encode_call(head, [self.encode(value) for value in (*args, *kwargs.values())])

    async def _answer(self, node: str, body: bytes) -> Any:
        async with self.transport.post(CALL_PATH, body, {}) as answer:
            result = await answer.read()
        if answer.status != 200:
            raise raised_by(answer.status, result, node)
        return await self.decode(result)

    async def _pieces(self, node: str, body: bytes) -> AsyncIterator[Any]:
        async with self.transport.post(CALL_PATH, body, {}) as answer:
            if answer.status != 200:
                raise raised_by(answer.status, await answer.read(), node)
            reader = PieceReader(node)
            async for data in answer.pieces():
                for piece in reader.feed(data):
                    yield await self.decode(piece)


class HandleMethod:
    def __init__(self, link: HandleLink, node: str, method: str) -> None:
        self._link = link
        self._node = node
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Response:
        """Call the method: `await handle.method(x)`."""
        return self._link.call(self._node, self._method, args, kwargs)

    def remote(self, *args: Any, **kwargs: Any) -> Response:
        """The same call for plain code: `handle.method.remote(x).result()`."""
        return self(*args, **kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """Call a generator. The `Stream` yields its pieces as they arrive."""
        return self._link.stream(self._node, self._method, args, kwargs)


class Handle(HandleMethod):
    """A handle to another node. A call of the handle calls the node's `__call__`; the node's methods are attributes."""

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


class ModelMethod:
    """One kind of request to a model. These requests are scheduled like those of clients."""

    def __init__(self, link: GatewayLink, model: str, path: str, field: str, text: Callable[[Any], str]) -> None:
        self._link = link
        self._model = model
        self._path = path
        self._field = field
        self._text = text

    def __call__(self, prompt: Any, **params: Any) -> Response:
        """The text of the first choice."""
        return Response.to(self._text_of(self._request(prompt, params)), self._link.loop)

    remote = __call__

    def raw(self, prompt: Any, **params: Any) -> Response:
        """The whole response of the model."""
        return Response.to(self._answer(self._request(prompt, params)), self._link.loop)

    def stream(self, prompt: Any, **params: Any) -> Stream:
        """The text of the first choice, as it is generated."""
        return Stream(self._texts(self._request(prompt, params | {"stream": True})), self._link.loop)

    def _request(self, prompt: Any, params: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
        context = current()
        headers = {"content-type": "application/json"}
        if context.request_id:
            caller = f"{context.request_id}.{context.step}"
            headers |= {"x-pointsman-caller": caller, "x-pointsman-priority": str(context.priority)}
        if context.tenant:
            headers["x-pointsman-tenant"] = context.tenant
        if (left_s := context.time_left_s) is not None:
            left_s = max(left_s, 0.001)
            headers |= {"x-pointsman-timeout-s": f"{left_s:.3f}", "x-pointsman-deadline-ms": f"{left_s * 1000:.0f}"}
        return msgspec.json.encode({"model": self._model, self._field: prompt, **params}), headers

    async def _answer(self, request: tuple[bytes, dict[str, str]]) -> Any:
        async with self._link.transport.post(self._path, *request) as answer:
            result = await answer.read()
        if answer.status != 200:
            raise CallFailed.from_answer(answer.status, result, self._model)
        return msgspec.json.decode(result)

    async def _text_of(self, request: tuple[bytes, dict[str, str]]) -> str:
        return self._text((await self._answer(request))["choices"][0])

    async def _texts(self, request: tuple[bytes, dict[str, str]]) -> AsyncIterator[str]:
        async with self._link.transport.post(self._path, *request) as answer:
            if answer.status != 200:
                raise CallFailed.from_answer(answer.status, await answer.read(), self._model)
            held = b""
            async for piece in answer.pieces():
                whole, newline, held = (held + piece).rpartition(b"\n")
                for data in data_in(whole + newline):
                    event = msgspec.json.decode(data)
                    if "error" in event:
                        raise CallFailed.from_answer(500, data, self._model)
                    if event.get("choices") and (text := self._text(event["choices"][0])):
                        yield text


class ModelHandle:
    """A handle to a model that a deployment of the manifest serves."""

    def __init__(self, link: GatewayLink, model: str) -> None:
        self._link = link
        self.model = model
        self.chat = ModelMethod(link, model, "/pipelines/v1/chat/completions", "messages", _chat_text)
        self.complete = ModelMethod(
            link, model, "/pipelines/v1/completions", "prompt", lambda choice: choice.get("text") or ""
        )
        self._embeddings = ModelMethod(link, model, "/pipelines/v1/embeddings", "input", str)

    def embed(self, texts: Any, **params: Any) -> Response:
        """A vector for each text."""
        return Response.to(self._vectors(self._embeddings._request(texts, params)), self._link.loop)

    async def _vectors(self, request: tuple[bytes, dict[str, str]]) -> list[list[float]]:
        found = (await self._embeddings._answer(request))["data"]
        return [one["embedding"] for one in sorted(found, key=lambda one: int(one.get("index", 0)))]

    def __repr__(self) -> str:
        return f"<model {self.model}>"


def _chat_text(choice: Any) -> str:
    message = choice.get("message") or choice.get("delta") or {}
    return message.get("content") or ""
