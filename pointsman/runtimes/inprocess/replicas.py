"""Nodes of a pipeline in this process. They handle calls as replicas do, without processes of their own.

Calls are made as in `pointsman.replica`: async code runs on a loop of the node's own, plain code runs in its threads,
batches are collected, and at most `max_concurrency` calls run at a time. There is one difference, which no code can
observe: plain code whose caller waits for nothing else runs in the caller's thread.
"""

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import msgspec

from pointsman.pipeline.context import CURRENT, CallContext
from pointsman.pipeline.options import NodeOptions
from pointsman.replica.calling import PIECES_AHEAD, Batches, Calling, Cancellable, Threads, timed
from pointsman.replica.methods import Method, Methods
from pointsman.replica.target import instance_of
from pointsman.runtimes.inprocess.values import UNCHANGEABLE, packed, unpacked
from pointsman.wire import CallFailed, Form

_RUNNING = (Generator, AsyncGenerator, Coroutine)
NOT_HERE = object()
"""Placeholder for a result: the call cannot run in the caller's thread."""


class NodeLoop:
    """An event loop with its own thread, which ends when the loop is no longer used."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=_run_forever, args=(self.loop,), name=name, daemon=True).start()
        weakref.finalize(self, _stop, self.loop).atexit = False


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # the loop is already closed
        loop.call_soon_threadsafe(loop.stop)


class SharedThreads(Threads):
    """A thread pool whose limit also counts calls that run in the thread of their caller."""

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, name)
        self._slots: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            self._slots.put(None)
        self.give_back = self._slots.put

    @property
    def has_room(self) -> bool:
        return False  # quick calls run with their caller, or in a thread

    def borrow(self) -> bool:
        """Whether a call may run now. If so, return its slot later with `give_back(None)`."""
        try:
            self._slots.get_nowait()
        except Empty:
            return False
        return True

    def run(self, job: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        def within() -> Any:
            self._slots.get()
            try:
                return job()
            finally:
                self._slots.put(None)

        super().run(within, done)


class NodeCode(NamedTuple):
    """The code that a node runs, and its settings."""

    body: Callable[..., Any]
    options: NodeOptions
    context: CallContext
    """The context of its code outside of calls."""
    arguments: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]] | None = None
    """The arguments of the constructor; None if the code is not a class."""


class LocalCall:
    """`RunningCall` for a caller in this process. Except for its creation, it runs on the loop of its replica."""

    def __init__(
        self,
        method: Method,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        context: CallContext,
        pieces: "LocalPieces | None" = None,
    ) -> None:
        self.method = method
        self.args = args
        self.kwargs = kwargs
        self.context = context
        self.form: Form = "blob" if pieces is None else "pieces"
        self.handed_handles = False
        self.task: Cancellable | None = None
        self.is_over = False
        self.begun = False
        self.result: Future[Any] = Future()
        """The packed result."""
        self.ended: Callable[[], None] = lambda: None
        """Called when the call ends, if it was begun."""
        self._pieces = pieces

    def finish(self, value: Any) -> None:
        if self.is_over:
            return
        try:
            value = packed(value)
        except Exception as error:
            self.fail(error)
            return
        if self._pieces is not None:
            self._pieces.add(value)
        self._end()
        with suppress(Exception):  # the call was cancelled in the meantime
            self.result.set_result(value)

    def begin_pieces(self, first: Any) -> "LocalPieces":
        assert self._pieces is not None
        return self._pieces

    def end_pieces(self) -> None:
        if not self.is_over:
            self._end()
            self.result.set_result(None)

    def fail(self, error: BaseException) -> None:
        if self.is_over:
            return
        self._end()
        with suppress(Exception):
            self.result.set_exception(_of_call(error, self.context.node))

    def abandon(self) -> None:
        """End the call, because its result is no longer needed."""
        if self.is_over:
            return
        self._end()
        self.result.cancel()
        if self.task is not None:
            self.task.cancel()

    def _end(self) -> None:
        self.is_over = True
        if self._pieces is not None:
            self._pieces.end()
        if self.begun:
            self.ended()


def _of_call(error: BaseException, node: str) -> BaseException:
    """An error in the form that the caller gets. An error that would end the caller, its loop or its generator becomes
    a `CallFailed`."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        with suppress(Exception):  # the error cannot be sent to another process
            unpacked(packed(error))
            return error
    raised = CallFailed(str(error), kind=type(error).__name__, node=node)
    raised.__cause__ = error
    return raised


class LocalPieces:
    """The values that a generator yields to a caller in this process."""

    def __init__(self) -> None:
        self.encode = packed
        self._waiting: deque[Any] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._over = False

    def add(self, piece: Any) -> None:
        if not self._over:
            self._waiting.append(piece)
            self._news.set()

    def end(self) -> None:
        self._over = True
        self._news.set()
        self._room.set()

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= PIECES_AHEAD and not self._over

    async def room(self) -> None:
        if self.is_full:
            self._room.clear()
            await self._room.wait()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            while self._waiting:
                piece = self._waiting.popleft()
                self._room.set()
                yield piece
            if self._over:
                return
            self._news.clear()
            await self._news.wait()


class LocalObject:
    """The object of a node, created when it is first needed, and the loop of its async code."""

    def __init__(self, code: NodeCode) -> None:
        self.code = code
        self._making = threading.RLock()
        self._methods: Methods | None = None
        self._home: NodeLoop | None = None

    def methods(self) -> Methods:
        """Create and configure the object at the first call. Raises what the code raises."""
        if self._methods is not None:
            return self._methods
        with self._making:
            if self._methods is None:
                self._methods = self._made()
            return self._methods

    def _made(self) -> Methods:
        code, made = self.code, self.code.body
        if code.arguments is not None:
            args, kwargs = code.arguments()
            if asyncio.iscoroutinefunction(getattr(made, "__init__", None)):
                made = self._on_loop(instance_of(made, args, kwargs, _at_once))
            else:
                made = self._in_context(lambda: code.body(*args, **kwargs))
        methods = Methods(made, code.context.node, is_function=code.arguments is None)
        methods.check()
        configure = methods.optional("reconfigure") if code.options.user_config is not None else None
        if configure is not None:
            config = msgspec.json.decode(msgspec.json.encode(code.options.user_config))  # a copy, as in a process
            told = self._in_context(lambda: configure.function(config))
            if asyncio.iscoroutine(told):
                self._on_loop(told)
        return methods

    def _in_context(self, run: Callable[[], Any]) -> Any:
        token = CURRENT.set(self.code.context)
        try:
            return run()
        finally:
            CURRENT.reset(token)

    def _on_loop(self, running: Any) -> Any:
        async def within() -> Any:
            CURRENT.set(self.code.context)
            return await running

        return asyncio.run_coroutine_threadsafe(within(), self.loop).result()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; it is started when it is first needed."""
        if self._home is None:
            with self._making:
                home: NodeLoop | None = self._home  # another thread may have created it
                self._home = home or NodeLoop(self.code.context.node)
        return self._home.loop

    @property
    def loop_if_any(self) -> asyncio.AbstractEventLoop | None:
        return None if self._home is None else self._home.loop


class LocalCalls:
    """The calls of a replica on its loop. At most `limit` calls run at a time; the others wait in order."""

    def __init__(self, threads: SharedThreads, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        self._calling = Calling(threads, may_wait=True, loop=loop)
        self._limit = limit
        self._loop = loop
        self._running = 0
        self._waiting: deque[LocalCall] = deque()
        self._batches: dict[str, Batches] = {}

    def arrived(self, call: LocalCall) -> None:
        call.ended = self._left
        if self._running >= self._limit:
            self._waiting.append(call)
        elif not call.is_over:
            self._start(call)

    def take_over(self, call: LocalCall, result: Any) -> None:
        """Continue a call that ran elsewhere, and has returned something that must run here."""
        call.ended = self._left
        self._running += 1
        call.begun = True
        self._calling.returned(call, result)

    def _start(self, call: LocalCall) -> None:
        self._running += 1
        call.begun = True
        batching = call.method.batching
        if batching is None:
            self._calling.begin(call)
            return
        name = call.method.name
        if name not in self._batches:
            self._batches[name] = Batches(call.method, batching, self._calling, self._loop)
        self._batches[name].add(call)

    def _left(self) -> None:
        self._running -= 1
        while self._waiting and self._running < self._limit:
            call = self._waiting.popleft()
            if not call.is_over:
                self._start(call)


class InProcessReplica:
    """One node, or one shard of it."""

    def __init__(self, code: NodeCode) -> None:
        self.object = LocalObject(code)
        self._code = code
        self.name = code.context.node
        self._threads = SharedThreads(code.options.threads, self.name)
        self._calls_if_any: LocalCalls | None = None

    @property
    def _calls(self) -> LocalCalls:
        if self._calls_if_any is None:
            made = LocalCalls(self._threads, self._code.options.max_concurrency, self.object.loop)
            self.__dict__.setdefault("_calls_made", made)  # only one of several threads creates it
            self._calls_if_any = self.__dict__["_calls_made"]
        return self._calls_if_any

    def context(self, request_id: str, step: str, caller: CallContext) -> CallContext:
        """The context for a call that is made by another call or by a program."""
        own = self._code.context
        return CallContext(
            node=own.node,
            rank=own.rank,
            shards=own.shards,
            request_id=request_id,
            step=step,
            priority=caller.priority,
            tenant=caller.tenant,
            deadline=caller.deadline,
            clock=caller.clock,
            env=own.env,
        )

    def method(self, name: str) -> Method:
        """The kind of a method. Raises `UnknownName`, and what creating the object raises."""
        return self.object.methods().find(name)

    def here(self, method: Method, args: Sequence[Any], kwargs: Mapping[str, Any], context: CallContext) -> Any:
        """Call a plain method in this thread. Returns its result, `NOT_HERE` if its threads are busy, or a future if
        the result must run on a loop. Raises what the method raises."""
        if not self._threads.borrow():
            return NOT_HERE
        try:
            result = timed(method, args, kwargs, context)
        except KeyboardInterrupt:  # if the program itself waits here
            raise
        except BaseException as error:
            raised = _of_call(error, self.name)
            if raised is error:
                raise
            raise raised from error
        finally:
            self._threads.give_back(None)
        if type(result) in UNCHANGEABLE or not isinstance(result, _RUNNING):
            return result
        call = LocalCall(method, (), {}, context)
        self.object.loop.call_soon_threadsafe(self._calls.take_over, call, result)
        return call.result

    def begin(
        self, method: Method, args: Sequence[Any], kwargs: Mapping[str, Any], context: CallContext
    ) -> "Future[Any]":
        """Start a call, from any thread. Its result is packed. Cancelling the future ends the call."""
        call = LocalCall(method, args, kwargs, context)
        loop = self.object.loop

        def ended(result: "Future[Any]") -> None:
            if result.cancelled() and not call.is_over:
                loop.call_soon_threadsafe(call.abandon)

        call.result.add_done_callback(ended)
        loop.call_soon_threadsafe(self._calls.arrived, call)
        return call.result

    async def pieces(
        self, method: Method, args: Sequence[Any], kwargs: Mapping[str, Any], context: CallContext
    ) -> AsyncIterator[Any]:
        """Call a generator on the loop of this replica."""
        pieces = LocalPieces()
        call = LocalCall(method, args, kwargs, context, pieces)
        self._calls.arrived(call)
        try:
            async for piece in pieces:
                yield unpacked(piece)
            call.result.result()
        finally:
            call.abandon()


async def _at_once(job: Callable[[], Any]) -> Any:
    return job()
