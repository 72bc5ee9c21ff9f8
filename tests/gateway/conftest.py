"""A gateway for each test, which is looked through for leftovers when the test is over."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.gateway.bed import Bed, Lay


@pytest.fixture
def lay() -> Iterator[Lay]:
    """Makes a gateway with settings and deployments of the test's own."""
    beds: list[Bed] = []

    def make(gateway: Mapping[str, Any] | None = None, *deployments: Mapping[str, Any]) -> Bed:
        beds.append(Bed(gateway, *deployments))
        return beds[-1]

    yield make
    for bed in reversed(beds):
        bed.close()


@pytest.fixture
def bed(lay: Lay) -> Bed:
    """A gateway with one deployment, without instances."""
    return lay()
