"""The machine's clock, with timers on an event loop."""

import time
from asyncio import AbstractEventLoop, Handle
from collections.abc import Callable
from typing import Any


class LoopClock:
    """A `Clock` of the interface. It reads the monotonic clock itself: event loops only read it once per iteration."""

    __slots__ = ("_loop", "now")

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self.now = time.monotonic

    def call_at(self, at: float, call: Callable[..., None], *args: Any) -> Handle:
        return self._loop.call_later(max(at - time.monotonic(), 0.0), call, *args)

    def call_soon(self, call: Callable[..., None], *args: Any) -> Handle:
        return self._loop.call_soon(call, *args)
