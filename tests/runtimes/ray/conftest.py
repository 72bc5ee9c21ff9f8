"""No process of a test survives it."""

from tests.runtimes.local.conftest import no_survivors, state

__all__ = ["no_survivors", "state"]
