"""`pointsman` and its gateway processes, whose background tasks fail on SIGUSR1; each process has its own signal.

For the scenario `tasks`. Coroutines are cancelled, and repeated calls raise once; work that ends some day, such as the
start of a process, raises at its first start, without a signal. Prints `killed NAME` for each failure,
`again NAME` once that work has begun again, and, from the second signal on, `unkept NAME` for each coroutine that was
there at the signal before and that is not started again if it ends. `signal NUMBER` comes behind the names.
"""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from pointsman.cli.main import main
from pointsman.gateway import owner, process
from pointsman.runtimes.tasks import KeptTask, RepeatedCall, Tasks

Work: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

GATEWAY = "gateway"
"""The first argument of a gateway process."""
MAX_INTERVAL_S = 0.2
"""Repeated calls that are rarer are made this often, so that their failures need not be waited for."""


class InjectedFailure(Exception):
    """The exception of a repeated call."""


class Failures:
    """Makes the background tasks of one process fail, and tells what became of each."""

    def __init__(self, tasks: Tasks, tell: Callable[[str], None]) -> None:
        self._tasks = tasks
        self._tell = tell
        self._main = asyncio.current_task(tasks.loop)
        self._seen: set[asyncio.Task[Any]] = set()
        """Coroutines at the last signal that nothing keeps."""
        self._failing: set[KeptTask | RepeatedCall] = set()
        self._count = 0

    def kill_all(self) -> None:
        for one in self._tasks.alive - self._failing:
            if isinstance(one, RepeatedCall):
                self._let_raise(one)
            elif one.task is not None:  # else it failed, and waits for its next start
                self._cancel(one)
        kept = {self._main, *(one.task for one in self._tasks.alive if isinstance(one, KeptTask))}
        others = {one for one in asyncio.all_tasks(self._tasks.loop) if one not in kept}
        for left in others & self._seen:
            self._tell(f"unkept {getattr(left.get_coro(), '__qualname__', left.get_name())}")
        self._seen = others
        self._count += 1
        self._tell(f"signal {self._count}")

    def _cancel(self, one: KeptTask) -> None:
        work = one.work

        def again() -> Any:
            one.work = work
            self._failing.discard(one)
            self._tell(f"again {one.name}")
            return work()

        assert one.task is not None
        one.work = again
        one.task.cancel()
        self._failing.add(one)
        self._tell(f"killed {one.name}")

    def _let_raise(self, one: RepeatedCall) -> None:
        call = one.call

        def raises() -> None:
            one.call = again
            raise InjectedFailure("by bench.chaos")

        def again() -> None:
            one.call = call
            self._failing.discard(one)
            call()
            self._tell(f"again {one.name}")

        one.call = raises
        self._failing.add(one)
        self._tell(f"killed {one.name}")


def first_start_fails(tell: Callable[[str], None]) -> Callable[[Tasks, str, Work], KeptTask]:
    """`Tasks.complete`, with work that raises at its first start."""
    complete = Tasks.complete

    def fails_first(tasks: Tasks, name: str, work: Work) -> KeptTask:
        async def raises() -> None:
            made.work = again
            tell(f"killed {name}")
            raise InjectedFailure("by bench.chaos")

        def again() -> Coroutine[Any, Any, None]:
            made.work = work
            tell(f"again {name}")
            return work()

        made = complete(tasks, name, raises)
        return made

    return fails_first


def watch_tasks() -> None:
    """Let the tasks that this process will have fail when it is told to."""
    made, repeated = Tasks.__init__, RepeatedCall.__init__

    def tell(text: str) -> None:
        print(text, flush=True)

    def make(self: Tasks, loop: asyncio.AbstractEventLoop) -> None:
        made(self, loop)
        failures = Failures(self, tell)
        loop.add_signal_handler(signal.SIGUSR1, failures.kill_all)

    def repeat(
        self: RepeatedCall, tasks: Tasks, name: str, interval_s: float | Callable[[], float], call: Callable[[], None]
    ) -> None:
        repeated(self, tasks, name, interval_s if callable(interval_s) else min(interval_s, MAX_INTERVAL_S), call)

    Tasks.__init__ = make  # type: ignore[method-assign]
    Tasks.complete = first_start_fails(tell)  # type: ignore[method-assign,assignment]
    RepeatedCall.__init__ = repeat  # type: ignore[method-assign]
    owner.COMMAND = (sys.executable, "-m", "bench.chaos.launcher", GATEWAY)


if __name__ == "__main__":
    watch_tasks()
    if sys.argv[1:2] == [GATEWAY]:
        del sys.argv[1]
        sys.exit(process.main())
    sys.exit(main())
