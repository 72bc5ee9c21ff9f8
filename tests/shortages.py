"""Processes that cannot open another file."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

STANDARD = 3
"""Input, output and errors are always open, so no lower descriptor becomes free. With 0, poll(2) would fail."""


@contextmanager
def no_descriptors(pid: int = 0) -> Iterator[None]:
    """A process (0: this one) has no file descriptor left, even if it closes some; those that are open stay."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (STANDARD, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
