"""Calls of users' policies with a time limit: those of scaling on a thread, those of scheduling in the loop.

A scaling policy has half a second, so a thread may answer late. A scheduling decision is due within microseconds, and
handing requests and instances to a thread or process costs more than most decisions. So a scheduling policy runs in
the loop, under a watchdog that raises an exception inside the policy when it blocks.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, GeneratorType
from typing import Any

from pointsman.routing.user_code import Stalled
from pointsman.scaling.policy import TooSlow


class PolicyRunner:
    """Runs the calls of one policy. A call that hangs keeps its thread, and no other call begins until it ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began: float | None = None
        """Start of the call in progress; None if no call is in progress."""

    @property
    def is_running(self) -> bool:
        return self._began is not None

    async def run(self, call: Callable[[], object], limit_s: float) -> object:
        """The result or the exception of a call; `TooSlow` after the limit. A late answer is dropped."""
        now = time.monotonic()
        if self._began is not None:
            return TooSlow(now - self._began)
        self._began = now
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[object] = loop.create_future()

        def answered(result: object) -> None:
            self._began = None
            if not answer.done():
                answer.set_result(result)

        def work() -> None:
            try:
                result: object = call()
            except BaseException as error:  # SystemExit and the like must end only this thread
                result = error
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(answered, result)

        # A daemon thread instead of a pool's thread: a policy that never returns must not keep the process alive.
        try:
            threading.Thread(target=work, name=f"scaling {self._name}", daemon=True).start()
        except RuntimeError as error:  # too many threads: the next call may succeed
            self._began = None
            return error
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            return TooSlow(limit_s)


AGAIN_S = 0.01
"""Time until code that survived an interruption is interrupted again."""


class Watchdog:
    """Times users' scheduling code, and interrupts code that blocks with a signal (SIGALRM).

    Signals reach the main thread only. In another thread, or where the program uses that signal itself, code is timed
    and not interrupted. Calls share one timer, which is set once per limit and not once per call: a call costs two
    readings of the clock.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.inside = False
        self.interrupts: bool | None = None
        """Whether the watchdog can interrupt; None if no user code has run yet."""
        self._deadline: float | None = None
        """The deadline of the current call; None if there is no call."""
        self._armed = False

    def call(self, limit_s: float, method: Callable[..., Any], about: tuple[Any, ...]) -> tuple[Any, float]:
        began = time.perf_counter()
        try:
            self._deadline = began + limit_s
            if not self._armed:
                self._arm(limit_s)
            self.inside = True
            answer = method(*about)
            if type(answer) is GeneratorType:
                answer = list(answer)
        finally:
            self._deadline, self.inside = None, False
        return answer, time.perf_counter() - began

    def close(self) -> None:
        """Restore the handler of the signal."""
        if self.interrupts:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self.interrupts, self._armed = None, False

    def _arm(self, limit_s: float) -> None:
        if self.interrupts is None:
            is_main = threading.current_thread() is threading.main_thread()
            self.interrupts = is_main and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
            if self.interrupts:
                signal.signal(signal.SIGALRM, self._fired)
        self._armed = True
        if self.interrupts:
            signal.setitimer(signal.ITIMER_REAL, limit_s)

    def _fired(self, number: int, frame: FrameType | None) -> None:
        deadline = self._deadline
        if deadline is None:
            self._armed = False
            return
        left_s = deadline - time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, max(left_s, AGAIN_S))
        # In the frame of `call`, user code has not begun or has ended. Only frames of user code are interrupted.
        if self.inside and left_s <= 0 and frame is not None and frame.f_code is not Watchdog.call.__code__:
            raise Stalled
