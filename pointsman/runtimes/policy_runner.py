"""Calls a user's policy on a thread, one call at a time, with a time limit."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pointsman.scaling.policy import TooSlow


class PolicyRunner:
    """Runs the calls of one policy. A call that hangs keeps its thread, and no other begins until it has ended."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began: float | None = None
        """Start of the call in progress; None if there is none."""

    @property
    def is_running(self) -> bool:
        return self._began is not None

    async def run(self, call: Callable[[], object], limit_s: float) -> object:
        """What the call returns or raises; `TooSlow` after the limit. A late answer is dropped."""
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
            except BaseException as error:  # SystemExit and the like must end this thread only
                result = error
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(answered, result)

        # A daemon thread, not of a pool: a policy that never returns must not keep the process alive.
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
