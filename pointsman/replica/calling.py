"""How calls are made: async code on the loop, plain code in threads, and quick plain code on the loop as well.

A plain method is quick if its last calls were quick (`MethodPace`). In two cases, even a quick method runs in a thread:
if it may wait for other nodes through a handle, and if all threads are busy, since the number of concurrent plain calls
is limited.
"""

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Protocol

from pointsman.pipeline.context import CURRENT, CallContext
from pointsman.pipeline.options import Batching, joined, parted
from pointsman.replica.methods import Method, MethodKind
from pointsman.wire import COLLECTED, Form

Job = Callable[[], None]


class Cancellable(Protocol):
    def cancel(self) -> Any: ...


class PieceSink(Protocol):
    """Receives the pieces that a generator yields."""

    @property
    def encode(self) -> Callable[[Any], Any]:
        """The function that converts a piece for `add`; it may run in any thread."""

    def add(self, piece: Any) -> None: ...

    @property
    def is_full(self) -> bool:
        """Whether the receiver is slower than the code."""

    async def room(self) -> None:
        """Wait until the receiver has read enough, or is gone."""


class RunningCall(Protocol):
    """A call, as the code that runs it sees it. A call ends exactly once, on the loop."""

    method: Method
    context: CallContext
    task: Cancellable | None
    """The future of the running code; it is cancelled if the answer is no longer needed."""

    @property
    def args(self) -> Sequence[Any]: ...

    @property
    def kwargs(self) -> Mapping[str, Any]: ...

    @property
    def form(self) -> Form: ...

    @property
    def handed_handles(self) -> bool:
        """Whether handles are among the call's arguments. If so, the call may wait for other nodes."""

    @property
    def is_over(self) -> bool:
        """Whether the call's result was sent, or is no longer needed."""

    def finish(self, value: Any) -> None: ...

    def begin_pieces(self, first: Any) -> PieceSink:
        """Note that the code has yielded its first piece."""

    def end_pieces(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class Threads:
    """Threads for code that is not async. They are daemons: user code that never ends must not keep the process
    alive."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._started = 0
        self.busy = 0
        """The number of jobs that wait or run; only the thread of the loop may read this number."""

    @property
    def has_room(self) -> bool:
        return self.busy < self._count

    def run(self, job: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run a job in a thread, then `done(result, error)` on the loop."""
        loop = asyncio.get_running_loop()
        self.busy += 1

        def ended(result: Any, error: BaseException | None) -> None:
            self.busy -= 1
            done(result, error)

        def run() -> None:
            result, error = None, None
            try:
                result = job()
            except BaseException as raised:  # including SystemExit: a call must not end its thread
                error = raised
            loop.call_soon_threadsafe(ended, result, error)

        self._jobs.put(run)
        if self._started < min(self.busy, self._count):
            self._started += 1
            threading.Thread(target=self._work, name=f"{self._name}-{self._started}", daemon=True).start()

    async def result_of(self, job: Callable[[], Any]) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(_as_exception(error))

        self.run(job, done)
        return await future

    def _work(self) -> None:
        while True:
            self._jobs.get()()


def _as_exception(error: BaseException) -> BaseException:
    """The error in a form that a future can have: futures refuse StopIteration, and SystemExit would end the loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    raised = RuntimeError(f"{type(error).__name__}: {error}")
    raised.__cause__ = error
    return raised


PIECES_AHEAD = 32
"""The number of pieces by which a generator in a thread may be ahead of the loop."""


class Calling:
    def __init__(self, threads: Threads, *, may_wait: bool, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop`: None means the running loop."""
        self._threads = threads
        self._may_wait = may_wait
        """Whether the user's object has handles, so that its methods may wait for other nodes."""
        self._loop = loop or asyncio.get_running_loop()

    def begin(self, call: RunningCall) -> None:
        match call.method.kind:
            case MethodKind.PLAIN:
                self._plain(call)
            case MethodKind.ASYNC:
                self._task(call, self._awaited(call))
            case MethodKind.ASYNC_GENERATOR:
                self._task(call, self._streamed(call))
            case MethodKind.GENERATOR:
                self._iterate(call)

    async def value(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        """The awaited result of a method: the preprocessor, `reconfigure`, or a method for batches."""
        if method.kind is MethodKind.ASYNC:
            return await method.function(*args, **kwargs)
        context = CURRENT.get()
        if self._is_quick(method):
            result = timed(method, args, kwargs, context, on_loop=True)
        else:
            result = await self._threads.result_of(lambda: timed(method, args, kwargs, context))
        return await result if inspect.isawaitable(result) else result

    # Plain code

    def _is_quick(self, method: Method) -> bool:
        return method.pace.is_quick and self._threads.has_room and not self._may_wait

    def _plain(self, call: RunningCall) -> None:
        method = call.method
        if self._is_quick(method) and not call.handed_handles:
            try:
                result = timed(method, call.args, call.kwargs, call.context, on_loop=True)
            except BaseException as error:
                call.fail(error)
            else:
                self.returned(call, result)
            return

        def job() -> Any:
            return None if call.is_over else timed(method, call.args, call.kwargs, call.context)

        def done(result: Any, error: BaseException | None) -> None:
            if error is not None:
                call.fail(error)
            else:
                self.returned(call, result)

        self._threads.run(job, done)

    def returned(self, call: RunningCall, result: Any) -> None:
        """Handle the return value of a plain function: usually the result, but it may be a generator or a coroutine."""
        if inspect.isgenerator(result):
            self._iterate(call, result)
        elif inspect.isasyncgen(result):
            self._task(call, self._streamed(call, result))
        elif inspect.iscoroutine(result):
            self._task(call, self._awaited(call, result))
        else:
            call.finish(result)

    # Async code

    def _task(self, call: RunningCall, running: Any) -> None:
        if call.is_over:
            running.close()
            return
        token = CURRENT.set(call.context)
        call.task = self._loop.create_task(running)  # the task gets the current context
        CURRENT.reset(token)

    async def _awaited(self, call: RunningCall, running: Any = None) -> None:
        try:
            result = await (running or call.method.function(*call.args, **call.kwargs))
            if inspect.isasyncgen(result):
                await self._stream(call, result)
            else:
                call.finish(result)
        except asyncio.CancelledError as error:
            call.fail(error)  # has no effect if the call itself was cancelled
            raise
        except BaseException as error:
            call.fail(error)

    async def _streamed(self, call: RunningCall, generator: Any = None) -> None:
        try:
            await self._stream(call, generator or call.method.function(*call.args, **call.kwargs))
        except asyncio.CancelledError as error:
            call.fail(error)
            raise
        except BaseException as error:
            call.fail(error)

    async def _stream(self, call: RunningCall, generator: Any) -> None:
        async with aclosing(generator) as pieces:
            if call.form in COLLECTED:
                call.finish([piece async for piece in pieces])
                return
            streamed = None
            async for piece in pieces:
                streamed = streamed or call.begin_pieces(piece)
                streamed.add(streamed.encode(piece))
                if streamed.is_full:
                    await streamed.room()
            if streamed is None:
                call.begin_pieces(None)
            call.end_pieces()

    def _iterate(self, call: RunningCall, generator: Any = None) -> None:
        def done(_: Any, error: BaseException | None) -> None:
            if error is not None:
                call.fail(error)

        self._threads.run(ThreadedGenerator(call, self._loop, generator), done)


class ThreadedGenerator:
    """Runs a generator in a thread, and sends the pieces that it yields on the loop."""

    def __init__(self, call: RunningCall, loop: asyncio.AbstractEventLoop, generator: Any) -> None:
        self._call = call
        self._loop = loop
        self._generator = generator

    def __call__(self) -> None:
        call = self._call
        if call.is_over:
            return
        token = CURRENT.set(call.context)
        try:
            pieces = self._generator or call.method.function(*call.args, **call.kwargs)
            try:
                if call.form in COLLECTED:
                    self._on_loop(call.finish, list(pieces))
                else:
                    self._send(pieces)
            finally:
                pieces.close()
        finally:
            CURRENT.reset(token)

    def _send(self, pieces: Iterable[Any]) -> None:
        call, streamed = self._call, None
        for count, piece in enumerate(pieces):
            if call.is_over:
                return
            if streamed is None:
                streamed = asyncio.run_coroutine_threadsafe(_begun(call, piece), self._loop).result()
            self._on_loop(streamed.add, streamed.encode(piece))
            if streamed.is_full or count % PIECES_AHEAD == PIECES_AHEAD - 1:
                asyncio.run_coroutine_threadsafe(streamed.room(), self._loop).result()
        if streamed is None:
            self._on_loop(call.begin_pieces, None)
        self._on_loop(call.end_pieces)

    def _on_loop(self, function: Callable[..., Any], *args: Any) -> None:
        self._loop.call_soon_threadsafe(function, *args)


async def _begun(call: RunningCall, first: Any) -> PieceSink:
    return call.begin_pieces(first)


def timed(method: Method, args: Any, kwargs: Any, context: CallContext, *, on_loop: bool = False) -> Any:
    token = CURRENT.set(context)
    began = perf_counter()
    try:
        return method.function(*args, **kwargs)
    finally:
        method.pace.took(perf_counter() - began, on_loop=on_loop)
        CURRENT.reset(token)


# Batches


class Batches:
    """The batches of one method. Only one batch runs at a time; meanwhile, the next batch is filled."""

    def __init__(
        self,
        method: Method,
        batching: Batching,
        calling: Calling,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`loop`: None means the running loop."""
        self._method = method
        self._batching = batching
        self._calling = calling
        self._loop = loop or asyncio.get_running_loop()
        self._waiting: deque[tuple[RunningCall, float]] = deque()
        """Waiting calls with their arrival times."""
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None

    def add(self, call: RunningCall) -> None:
        self._waiting.append((call, self._loop.time()))
        if self._running is None:
            self._begin_or_wait()

    def _begin_or_wait(self) -> None:
        due = self._waiting[0][1] + self._batching.wait_ms / 1000.0
        if len(self._waiting) >= self._batching.max_batch_size or due <= self._loop.time():
            self._begin()
        elif self._timer is None:
            self._timer = self._loop.call_at(due, self._begin)

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = self._take()
        if batch:
            token = CURRENT.set(batch[0].context)
            self._running = self._loop.create_task(self._run(batch))
            CURRENT.reset(token)
            for call in batch:
                call.task = _Share(batch, self._running)

    def _take(self) -> list[RunningCall]:
        """The next batch: calls that are not over, with the same number of arguments and the same names."""
        batch: list[RunningCall] = []
        while self._waiting and len(batch) < self._batching.max_batch_size:
            call, _ = self._waiting[0]
            if not call.is_over:
                if batch and _shape(call) != _shape(batch[0]):
                    break
                batch.append(call)
            self._waiting.popleft()
        return batch

    async def _run(self, batch: list[RunningCall]) -> None:
        try:
            args, kwargs = joined([(call.args, call.kwargs) for call in batch])
            results = parted(await self._calling.value(self._method, *args, **kwargs), len(batch), self._method.name)
        except BaseException as error:
            for call in batch:
                call.fail(error)
        else:
            for call, result in zip(batch, results, strict=True):
                call.finish(result)
        self._running = None
        if self._waiting:
            self._begin_or_wait()


class _Share:
    """A call's part in a batch: the batch is cancelled when all its calls are over."""

    def __init__(self, batch: list[RunningCall], running: "asyncio.Task[None]") -> None:
        self._batch = batch
        self._running = running

    def cancel(self) -> None:
        if all(call.is_over for call in self._batch):
            self._running.cancel()


def _shape(call: RunningCall) -> tuple[int, frozenset[str]]:
    return len(call.args), frozenset(call.kwargs)
