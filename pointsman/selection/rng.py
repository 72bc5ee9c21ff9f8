"""A random generator that is cheap to seed, so that every decision can have its own and be repeated."""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_UNIT = 2.0**-53


def mixed(seed: int, salt: int) -> int:
    """A 64-bit seed from two numbers, well spread even for 0, 1, 2..."""
    return _spread(seed + (salt + 1) * _STEP)


def _spread(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class SplitMix64:
    """Seeding `random.Random` instead would take a quarter of a scheduling cycle."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed

    def random(self) -> float:
        """Uniform in [0, 1)."""
        self._state += _STEP
        return (_spread(self._state) >> 11) * _UNIT

    def below(self, n: int) -> int:
        """Uniform in 0..n-1."""
        return int(self.random() * n)

    def shuffled(self, items: Iterable[T]) -> list[T]:
        """The items in random order."""
        shuffled = list(items)
        for last in range(len(shuffled) - 1, 0, -1):
            other = self.below(last + 1)
            shuffled[last], shuffled[other] = shuffled[other], shuffled[last]
        return shuffled
