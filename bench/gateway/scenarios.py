"""The scenarios and their traffic."""

from collections.abc import Sequence

import msgspec

from bench.gateway import traffic

TOKENS, PACE_MS = 50, 5
"""Of the measured streams."""
KB = 1024


class Scenario(msgspec.Struct, frozen=True):
    """Clients that each send a request as soon as the last response is complete."""

    name: str
    requests: Sequence[bytes]
    connections: int
    tokens: int = 0
    """Chunks of a streamed response; 0 if it is not streamed."""
    spread_ms: float = 0.0
    """The first requests are spread over this time, so that streams are not synchronized."""
    direct: bool = False
    """Also measured without a proxy."""

    @property
    def events(self) -> int:
        """Server-sent events per response: one per token, and [DONE]."""
        return self.tokens + 1 if self.tokens else 0


PLAIN = {
    connections: Scenario(f"plain {connections}", traffic.small(), connections, direct=True)
    for connections in (32, 256)
}
STREAMS = Scenario("streams", traffic.small(TOKENS, PACE_MS, stream=True), 64, TOKENS, spread_ms=PACE_MS)
FIRST_TOKEN = Scenario("first token", traffic.small(2, 1, stream=True), 1, 2, direct=True)
BIG = {size: Scenario(f"{size} KB", traffic.big(size * KB), 16) for size in (64, 256)}
ALL = (*PLAIN.values(), STREAMS, FIRST_TOKEN, *BIG.values())

CHECK = Scenario("check", traffic.small(), 32)
"""Run before the measurement, to check the responses and the endpoints used."""
OPEN_STREAMS = Scenario("open streams", traffic.small(30, 100, stream=True), 256, 30, spread_ms=100)
"""For memory: slow streams of three seconds."""
