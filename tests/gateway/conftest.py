"""A gateway for each test, which must have nothing left over at the end."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.gateway.bed import Bed, Lay


@pytest.fixture
def lay() -> Iterator[Lay]:
    """Makes a gateway with the settings and deployments of a test."""
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
