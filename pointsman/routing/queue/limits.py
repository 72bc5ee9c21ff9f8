"""Usage limits: how saturated the pool may be before a band has to wait. At its ceiling or above, a band is blocked."""

from collections.abc import Sequence
from math import floor
from typing import Literal, Protocol, runtime_checkable


@runtime_checkable
class UsageLimitPolicy(Protocol):
    """Gives each band its ceiling."""

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        """One ceiling per band, from the highest priority to the lowest. Called once per dispatch."""
        ...


class StaticUsageLimitPolicy:
    """The same ceiling for every band."""

    def __init__(self, threshold: float = 1.0) -> None:
        self.threshold = threshold

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        return [self.threshold] * len(priorities)


class PriorityHoldbackPolicy:
    """Lower bands are blocked earlier, which keeps room for higher ones.

    Ceilings fall from `max_ceiling` for the highest band to `min_ceiling` for the lowest: in even steps by rank, or in
    proportion to the value of the priority.
    """

    def __init__(
        self,
        min_ceiling: float,
        max_ceiling: float = 1.0,
        shape: Literal["linear"] = "linear",
        domain: Literal["rank", "value"] = "rank",
    ) -> None:
        if not 0 <= min_ceiling < 1:
            raise ValueError(f"minCeiling is {min_ceiling:g}; it must be at least 0 and below 1")
        if not min_ceiling < max_ceiling:
            raise ValueError(f"minCeiling is {min_ceiling:g}; it must be below maxCeiling, which is {max_ceiling:g}")
        if shape != "linear":
            raise ValueError(f'shape is "{shape}"; it must be linear')
        if domain not in ("rank", "value"):
            raise ValueError(f'domain is "{domain}"; it must be rank or value')
        self.low, self.high = min_ceiling, max_ceiling
        self.domain = domain

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        bands, span = len(priorities), self.high - self.low
        if bands == 1:
            return (self.high,)
        if self.domain == "rank":
            return [self.high - rank * span / (bands - 1) for rank in range(bands)]
        highest, lowest = max(priorities), min(priorities)
        if highest == lowest:
            return [self.high] * bands
        return [self.low + (priority - lowest) / (highest - lowest) * span for priority in priorities]


class SoftReflectiveCeilingPolicy:
    """Lower bands are open less and less often as the pool fills, and not at all once it is full.

    Between half full and full, every k-th dispatch is open to them, k = s / (1 - s): 1 at 0.5, 3 at 0.75, 9 at 0.9.
    """

    def __init__(self) -> None:
        self._calls = 0

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        reflected = 1.0 if self._is_open(saturation) else 0.0
        last = max(1, len(priorities) - 1)
        return [
            1.0 if rank == 0 or saturation < 1 - rank * saturation / last else reflected
            for rank in range(len(priorities))
        ]

    def _is_open(self, saturation: float) -> bool:
        if saturation >= 1:
            return False
        if saturation < 0.5:
            return True
        self._calls += 1
        period = floor(saturation / (1 - saturation + 1e-9) + 0.5)
        return self._calls % max(1, period) == 0
