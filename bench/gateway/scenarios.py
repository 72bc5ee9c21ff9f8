"""What is measured: the traffic of each scenario."""

from collections.abc import Sequence

import msgspec

from bench.gateway import traffic

TOKENS, PACE_MS = 50, 5
"""Of a measured stream."""
KB = 1024


class Scenario(msgspec.Struct, frozen=True):
    """Clients that send a request as soon as their last one is answered."""

    name: str
    requests: Sequence[bytes]
    connections: int
    tokens: int = 0
    """Chunks of a streamed answer; 0: it is not streamed."""
    spread_ms: float = 0.0
    """The first requests are spread over this time, so that streams are not in step."""
    direct: bool = False
    """Measured without a proxy too."""

    @property
    def events(self) -> int:
        """Server-sent events per answer: one per token, and the end."""
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
"""Before anything is measured: is everything answered, and by whom?"""
OPEN_STREAMS = Scenario("open streams", traffic.small(30, 100, stream=True), 256, 30, spread_ms=100)
"""For their memory: three seconds of slow streams."""
