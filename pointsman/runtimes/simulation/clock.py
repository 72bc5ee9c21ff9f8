"""Virtual time: it stands still while something happens, and jumps to the next thing that is due."""

import heapq
import math
from collections.abc import Callable
from itertools import count
from typing import Any

from pointsman.errors import PointsmanError


class VirtualTimer:
    """A call that is due at a virtual time."""

    __slots__ = ("args", "call")

    def __init__(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.call: Callable[..., None] | None = call
        self.args = args

    def cancel(self) -> None:
        self.call = None


class VirtualClock:
    """A `Clock` of the interface."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, int, VirtualTimer]] = []
        """A heap; the number keeps calls of one time in order."""
        self._order = count()

    def now(self) -> float:
        return self._now

    def call_at(self, at: float, call: Callable[..., None], *args: Any) -> VirtualTimer:
        timer = VirtualTimer(call, args)
        heapq.heappush(self._due, (max(at, self._now), next(self._order), timer))
        return timer

    def call_soon(self, call: Callable[..., None], *args: Any) -> VirtualTimer:
        return self.call_at(self._now, call, *args)

    def run_until(self, time: float) -> None:
        """Let everything happen that is due until then."""
        if not self._now <= time < math.inf:  # probes never end
            raise PointsmanError(f"it is {self._now:g} s now: time runs forward, to an end, and not to {time:g} s")
        while self._due and self._due[0][0] <= time:
            self._now, _, timer = heapq.heappop(self._due)
            if timer.call is not None:
                timer.call(*timer.args)
        self._now = time
