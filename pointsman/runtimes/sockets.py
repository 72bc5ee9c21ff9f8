"""Unix sockets, whatever the length of their path."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pointsman.errors import PointsmanError

SHORT_ENOUGH = 100
"""Bytes of a unix socket's path; systems take 104 to 108."""


@contextmanager
def reachable(path: Path) -> Iterator[str]:
    """A path to a socket that is short enough to bind or connect to, while this is open."""
    if len(os.fsencode(path)) <= SHORT_ENOUGH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if Path("/proc/self/fd").exists():
            yield f"/proc/self/fd/{folder}/{path.name}"
        else:
            raise PointsmanError(f"{path} is too long for a socket here; choose a state directory with a shorter path")
    finally:
        os.close(folder)
