"""A gateway for each test. Leftovers fail the test."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.gateway.bed import Bed, MakeBed


@pytest.fixture
def make_bed() -> Iterator[MakeBed]:
    """Makes gateways with given settings and deployments."""
    beds: list[Bed] = []

    def make(gateway: Mapping[str, Any] | None = None, *deployments: Mapping[str, Any]) -> Bed:
        beds.append(Bed(gateway, *deployments))
        return beds[-1]

    yield make
    for bed in reversed(beds):
        bed.close()


@pytest.fixture
def bed(make_bed: MakeBed) -> Bed:
    """A gateway with one deployment, without instances."""
    return make_bed()
