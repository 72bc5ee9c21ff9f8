"""Planes for tests: real ones, each in a folder of its own. A test fails if any process of one is left behind."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.chaos.planes import LivePlane

MakePlane = Callable[[], LivePlane]


@pytest.fixture(scope="module")
def module_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlane]:
    """One plane for all tests of a module, not started yet."""
    plane = LivePlane(tmp_path_factory.mktemp("plane"))
    yield plane
    plane.close()


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[LivePlane]:
    """A plane for one test, not started yet."""
    plane = LivePlane(tmp_path)
    yield plane
    plane.close()
