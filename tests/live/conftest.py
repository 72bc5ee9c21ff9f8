"""Real planes, each in its own directory. A test fails if its plane leaves a process behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.chaos.planes import LivePlane


@pytest.fixture(scope="module")
def module_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlane]:
    """One plane shared by the tests of a module, not yet started."""
    plane = LivePlane(tmp_path_factory.mktemp("plane"))
    yield plane
    plane.close()


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[LivePlane]:
    """A plane for one test, not yet started."""
    plane = LivePlane(tmp_path)
    yield plane
    plane.close()
