"""Calls of a method that takes batches: collected while the batch before runs, up to a size and a waiting time."""

import asyncio
from collections import deque

from pointsman.pipeline.context import CURRENT
from pointsman.pipeline.options import Batching, joined, parted
from pointsman.replica.calling import Calling
from pointsman.replica.calls import ReplicaCall
from pointsman.replica.methods import Method


class Batches:
    """The batches of one method. One runs at a time; meanwhile the next one fills."""

    def __init__(self, method: Method, batching: Batching, calling: Calling) -> None:
        self._method = method
        self._batching = batching
        self._calling = calling
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[ReplicaCall, float]] = deque()
        """With their arrival times."""
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None

    def add(self, call: ReplicaCall) -> None:
        """Run it with the next batch."""
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

    def _take(self) -> list[ReplicaCall]:
        """The next batch: calls with the same number of arguments and the same names, without those that are over."""
        batch: list[ReplicaCall] = []
        while self._waiting and len(batch) < self._batching.max_batch_size:
            call, _ = self._waiting[0]
            if not call.is_over:
                if batch and _shape(call) != _shape(batch[0]):
                    break
                batch.append(call)
            self._waiting.popleft()
        return batch

    async def _run(self, batch: list[ReplicaCall]) -> None:
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

    def __init__(self, batch: list[ReplicaCall], running: "asyncio.Task[None]") -> None:
        self._batch = batch
        self._running = running

    def cancel(self) -> None:
        if all(call.is_over for call in self._batch):
            self._running.cancel()


def _shape(call: ReplicaCall) -> tuple[int, frozenset[str]]:
    return len(call.args), frozenset(call.kwargs)
