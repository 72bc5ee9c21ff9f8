"""The clock of an event loop, and background work on that loop. Failed work is started again, and `status` names it.

Enters: work that must live as long as the plane. Leaves: problems for `status`, and counts of failures for metrics. The
one rule: no exception, no cancellation and no early return ends such work for good.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from pointsman.errors import PointsmanError
from pointsman.reasons import Reason
from pointsman.routing.records import Histogram

FIRST_RETRY_S = 0.1
"""Pause after the first failure; it doubles with each further one."""
MAX_RETRY_S = 5.0
CALM_S = 30.0
"""A task that has run for this long without failing starts again with the first pause."""
SHOWN_S = 300.0
"""How long `status` shows the last failure of a task that runs again."""
BEAT_S, BUSY_BEAT_S = 0.2, 0.005
"""Intervals of measuring a loop. The second applies while the loop uses a quarter of a core or more."""
TURN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)


class FailedElsewhere(PointsmanError):
    """The failure of a background task of another process, as reported by that process."""


class LoopClock:
    """A `Clock` of the interface. It reads the monotonic clock at each call; an event loop does so once per turn."""

    __slots__ = ("_loop", "now")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.now = time.monotonic

    def call_at(self, at: float, call: Callable[..., None], *args: Any) -> asyncio.Handle:
        return self._loop.call_later(max(at - time.monotonic(), 0.0), call, *args)

    def call_soon(self, call: Callable[..., None], *args: Any) -> asyncio.Handle:
        return self._loop.call_soon(call, *args)


class LoopTurns:
    """How long the turns of an event loop take. During a turn no other client is answered."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        """`cpu`: the processor time of the loop's thread."""
        self.delay = Histogram(TURN_SECONDS)
        """How late the beats came, in seconds."""
        self.busy = Histogram(TURN_SECONDS)
        """The part of that delay in which the loop itself had the processor. Time of other programs is left out."""
        self._clock, self._cpu = clock, cpu
        self._at, self._used_s = clock(), cpu()
        self._awaited_s = self._scheduled_s = self._next_s = BEAT_S

    def interval_s(self) -> float:
        """The time to the next beat. Called before the present beat is measured."""
        self._awaited_s, self._scheduled_s = self._scheduled_s, self._next_s
        return self._scheduled_s

    def beat(self) -> None:
        """Called after the last interval, or later if a turn takes longer."""
        now, used_s = self._clock(), self._cpu()
        used_s, self._used_s = used_s - self._used_s, used_s
        took_s, self._at = now - self._at, now
        late_s = max(took_s - self._awaited_s, 0.0)
        self.delay.add(late_s)
        self.busy.add(min(used_s, late_s))
        self._next_s = BUSY_BEAT_S if used_s > took_s / 4 else BEAT_S


class TaskFailures:
    """The failures of one task."""

    def __init__(self) -> None:
        self.count = 0
        self.why = ""
        """The error of the last failure."""
        self.at = 0.0
        self.retry_at: float | None = None
        """When the task is tried again; None if it continues by itself."""

    def problem(self, name: str, now: float) -> Reason:
        retry_s = None if self.retry_at is None or self.retry_at <= now else self.retry_at - now
        facts = {"task": name, "failures": self.count, "ago_s": now - self.at, "error": self.why, "retry_s": retry_s}
        return Reason("task-failed", facts)


class KeptTask:
    """A coroutine that is started again when it ends."""

    def __init__(self, tasks: "Tasks", name: str, work: Callable[[], Coroutine[Any, Any, None]], once: bool) -> None:
        self.name = name
        self.work = work
        self.task: asyncio.Task[None] | None = None
        """None while the coroutine waits for its next start."""
        self._tasks = tasks
        self._once = once
        self._pause_s = FIRST_RETRY_S
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._start()

    def cancel(self) -> None:
        """End the coroutine for good."""
        self._tasks.alive.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self.task is not None:
            self.task.cancel()

    def _start(self) -> None:
        self._timer, self._began = None, time.monotonic()
        self.task = self._tasks.loop.create_task(self.work(), name=self.name)
        self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = asyncio.CancelledError("it was cancelled") if task.cancelled() else task.exception()
        self.task = None
        if self not in self._tasks.alive:
            return
        if error is None and self._once:
            self._tasks.alive.discard(self)
            return
        if time.monotonic() - self._began >= CALM_S:
            self._pause_s = FIRST_RETRY_S
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_RETRY_S)
        self._timer = self._tasks.loop.call_later(pause_s, self._start)
        self._tasks.failed(self.name, error or RuntimeError("it returned"), pause_s)


class RepeatedCall:
    """A call that is made at intervals."""

    def __init__(
        self, tasks: "Tasks", name: str, interval_s: float | Callable[[], float], call: Callable[[], None]
    ) -> None:
        self.name = name
        self.call = call
        self._tasks = tasks
        self._interval_s = interval_s
        self._timer = tasks.loop.call_later(self._wait_s(), self._due)

    def cancel(self) -> None:
        self._tasks.alive.discard(self)
        self._timer.cancel()

    def _wait_s(self) -> float:
        return self._interval_s() if callable(self._interval_s) else self._interval_s

    def _due(self) -> None:
        wait_s = self._wait_s()
        # The next call is scheduled first, so that it is made even if this call raises.
        self._timer = self._tasks.loop.call_later(wait_s, self._due)
        self._tasks.attempt(self.name, self.call, retry_s=wait_s)


class Tasks:
    """`BackgroundTasks` of the interface, on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.alive: set[KeptTask | RepeatedCall] = set()
        self._failures: dict[str, TaskFailures] = {}

    def keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> KeptTask:
        return self._add(KeptTask(self, name, work, once=False))

    def complete(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> KeptTask:
        return self._add(KeptTask(self, name, work, once=True))

    def every(self, name: str, interval_s: float | Callable[[], float], call: Callable[[], None]) -> RepeatedCall:
        """`interval_s` is a function if the interval changes."""
        made = RepeatedCall(self, name, interval_s, call)
        self.alive.add(made)
        return made

    def attempt(self, name: str, call: Callable[..., None], *args: Any, retry_s: float | None = None) -> None:
        try:
            call(*args)
        except (Exception, asyncio.CancelledError) as error:
            self.failed(name, error, retry_s)

    def failed(self, name: str, error: BaseException, retry_s: float | None = None) -> None:
        failures, now = self._failures.setdefault(name, TaskFailures()), time.monotonic()
        failures.count += 1
        failures.why, failures.at = f"{type(error).__name__}: {error}", now
        failures.retry_at = None if retry_s is None else now + retry_s
        if failures.count & (failures.count - 1) == 0:  # log only the first, second, fourth, eighth... failure
            told = {"message": f'pointsman: background task "{name}" failed', "exception": error}
            self.loop.call_exception_handler(told)

    def problems(self) -> list[Reason]:
        now = time.monotonic()
        return [one.problem(name, now) for name, one in self._failures.items() if now - one.at < SHOWN_S]

    def failures(self) -> dict[str, int]:
        return {name: one.count for name, one in self._failures.items()}

    def reasons(self) -> dict[str, tuple[int, str]]:
        """How often each task has failed, and its last error. Other processes report this to the plane."""
        return {name: (one.count, one.why) for name, one in self._failures.items()}

    def close(self) -> None:
        """End all tasks for good."""
        for one in list(self.alive):
            one.cancel()

    def _add(self, made: KeptTask) -> KeptTask:
        self.alive.add(made)
        return made
