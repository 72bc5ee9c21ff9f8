"""The dice of the program itself, loaded: whoever draws from them instead of the seed given is found out."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

SEEDS = (1, 5)
"""Two whose first throw, shuffle and sample differ for any number of sides from 2 to 8."""


@contextmanager
def loaded(seed: int) -> Iterator[None]:
    """The standard library's generator starts from this seed, and is put back as it was."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
