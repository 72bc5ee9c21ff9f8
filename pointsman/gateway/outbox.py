"""Bytes on their way out, written together at the end of a turn of the event loop.

A write wakes whoever reads at the other end. Written one by one between bits of work, every one of them wakes somebody
who has just gone to sleep; written in a row, the first wakes them and they find the rest. That takes a third off the
cost of a request. With few requests under way nothing is gained, and what is written goes out at once.
"""

from asyncio import AbstractEventLoop, Transport
from collections.abc import Sized

from pointsman.gateway.requests import Bytes

FEW = 2
"""With so many requests under way, nobody waits for others."""
LARGE = 8 * 1024
"""Longer pieces do not wait either."""


class Outbox:
    """What is to be written, in its order."""

    __slots__ = ("_loop", "_pending", "_under_way")

    def __init__(self, loop: AbstractEventLoop, under_way: Sized) -> None:
        self._loop = loop
        self._under_way = under_way
        self._pending: list[tuple[Transport, Bytes]] = []

    def write(self, transport: Transport, data: Bytes) -> None:
        """Write, soon or at once. What is written to one transport keeps its order."""
        if len(data) > LARGE:  # how much a client leaves unread must be known before there is more of it
            self.flush()
            transport.write(data)
        elif self._pending:
            self._pending.append((transport, data))
        elif len(self._under_way) <= FEW:
            transport.write(data)
        else:
            self._pending.append((transport, data))
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write everything now."""
        pending, self._pending = self._pending, []
        for transport, data in pending:
            if not transport.is_closing():
                transport.write(data)
