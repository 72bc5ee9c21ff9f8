"""One gateway for all tests of a module: gRPC needs one loop, and replicas take a while to start."""

from collections.abc import Iterator

import pytest

from tests.gateway.grpc.grpc_bed import Door, opened


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with opened(tmp_path_factory.mktemp("replicas")) as door:
        yield door
