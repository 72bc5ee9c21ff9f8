"""Chance under control: cases that are the same on every run, and the global generator of `random`, seeded."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

SEEDS = (1, 5)
"""Their first number, shuffle and sample differ for any range of 2 to 8."""


def drawn(values: Mapping[str, Sequence[Any]], rng: random.Random) -> dict[str, Any]:
    """One value for each field."""
    return {field: rng.choice(choices) for field, choices in values.items()}


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed the global generator, and restore it afterwards. A policy that draws from it decides differently."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
