"""The dice of the program itself, loaded: whoever draws from them instead of the seed given is found out."""

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loaded(seed: int) -> Iterator[None]:
    """The standard library's generator starts from this seed, and is put back as it was."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
