"""Threads for code that is not async: so many calls of it run side by side, and no more."""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

Job = Callable[[], None]


class Threads:
    """Daemon threads, started when first needed: code of the user that never ends must not keep the process."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._started = 0
        self.busy = 0
        """Jobs that wait or run; only the loop's thread may look."""

    @property
    def has_room(self) -> bool:
        """Whether one more call would run at once."""
        return self.busy < self._count

    def run(self, job: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run a job in a thread; `done(result, error)` follows on the loop."""
        loop = asyncio.get_running_loop()
        self.busy += 1

        def ended(result: Any, error: BaseException | None) -> None:
            self.busy -= 1
            done(result, error)

        def run() -> None:
            result, error = None, None
            try:
                result = job()
            except BaseException as raised:  # also SystemExit: a call must not end its thread
                error = raised
            loop.call_soon_threadsafe(ended, result, error)

        self._jobs.put(run)
        if self._started < min(self.busy, self._count):
            self._started += 1
            threading.Thread(target=self._work, name=f"{self._name}-{self._started}", daemon=True).start()

    async def wait_for(self, job: Callable[[], Any]) -> Any:
        """Run a job in a thread, and wait for it."""
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
    """A future takes no StopIteration, and a SystemExit would end the loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    raised = RuntimeError(f"{type(error).__name__}: {error}")
    raised.__cause__ = error
    return raised
