"""`pointsman` whose background tasks fail on SIGUSR1: coroutines are cancelled, and repeated calls raise once.

For the scenario `tasks`. Prints `killed NAME` for each failure.
"""

import asyncio
import signal
import sys
from typing import Any

from pointsman.cli.main import main
from pointsman.runtimes.tasks import KeptTask, RepeatedCall, Tasks


class InjectedFailure(Exception):
    """The exception of a repeated call."""


def watch(tasks: Tasks) -> None:
    tasks.loop.add_signal_handler(signal.SIGUSR1, lambda: kill_all(tasks))


def kill_all(tasks: Tasks) -> None:
    for one in list(tasks.alive):
        if isinstance(one, KeptTask):
            if one.task is None:
                continue  # it has failed, and waits for its next start
            one.task.cancel()
            print(f"killed {one.name}", flush=True)
        else:
            fail_once(one)


def fail_once(repeated: RepeatedCall) -> None:
    call = repeated.call

    def fails() -> None:
        repeated.call = call
        print(f"killed {repeated.name}", flush=True)
        raise InjectedFailure("by bench.chaos")

    repeated.call = fails


if __name__ == "__main__":
    made = Tasks.__init__

    def make(self: Tasks, loop: asyncio.AbstractEventLoop, *args: Any, **kwargs: Any) -> None:
        made(self, loop, *args, **kwargs)
        watch(self)

    Tasks.__init__ = make  # type: ignore[method-assign]
    sys.exit(main())
