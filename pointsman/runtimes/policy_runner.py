"""Calls a policy of the user's own so that it cannot hold anybody up: on a thread, one call at a time, with a limit."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pointsman.scaling.policy import TooSlow


class PolicyRunner:
    """One policy at work. A call that hangs keeps its thread, and no other is begun until it has ended."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began: float | None = None
        """When the call under way began; None: there is none."""

    @property
    def is_running(self) -> bool:
        """Whether a call has not returned yet."""
        return self._began is not None

    async def run(self, call: Callable[[], object], limit_s: float) -> object:
        """What the call returns, or `TooSlow`; a late answer counts for nothing."""
        now = time.monotonic()
        if self._began is not None:
            return TooSlow(now - self._began)
        self._began = now
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[object] = loop.create_future()

        def answered(said: object) -> None:
            self._began = None
            if not answer.done():
                answer.set_result(said)

        def think() -> None:
            try:
                said = call()
            except BaseException as error:  # also what would end a program must not end more than this thread
                said = error
            with suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
                loop.call_soon_threadsafe(answered, said)

        # Not of a pool, and a daemon: a policy that never returns must not keep the plane from ending.
        try:
            threading.Thread(target=think, name=f"scaling {self._name}", daemon=True).start()
        except RuntimeError as error:  # there are too many: the next time may go better
            self._began = None
            return error
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            return TooSlow(limit_s)
