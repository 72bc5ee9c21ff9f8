"""The requests of `bench.request_path` go all the way through the gateway, whatever their size."""

import asyncio

from bench import request_path


def test_requests_and_streams_of_each_size_are_answered() -> None:
    async def story() -> None:
        for size in (300, 64 * 1024, 256 * 1024):
            harness = request_path.Harness(size)
            harness.serve(2)
            harness.stream(1, 3)
            [counts] = [harness.gateway.metrics.of("chat")]
            assert counts.statuses == {200: 3 * request_path.CONNECTIONS}
            harness.gateway.close()

    asyncio.run(story())
