"""One test bed per module: gRPC needs a single loop, and replicas take a while to start."""

from collections.abc import Iterator

import pytest

from tests.gateway.grpc.grpc_bed import GrpcBed, running_grpc_bed


@pytest.fixture(scope="module")
def grpc_bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcBed]:
    with running_grpc_bed(tmp_path_factory.mktemp("replicas")) as grpc_bed:
        yield grpc_bed
