"""Data is written together at the end of a turn of the loop, in order, and not to closed transports."""

import asyncio
from typing import Any, cast

import pytest

from pointsman.http.pool import FEW, LARGE, Outbox


class FakeTransport:
    """Records the written data."""

    def __init__(self, log: list[tuple[str, bytes]], name: str) -> None:
        self.name, self.closing = name, False
        self._log = log

    def write(self, data: bytes) -> None:
        self._log.append((self.name, data))

    def is_closing(self) -> bool:
        return self.closing


class FakeLoop:
    """The part of an event loop that an outbox needs."""

    def __init__(self) -> None:
        self.soon: list[Any] = []

    def call_soon(self, call: Any) -> None:
        self.soon.append(call)

    def turn(self) -> None:
        calls, self.soon = self.soon, []
        for call in calls:
            call()


def make_outbox(in_flight: int) -> tuple[Outbox, FakeLoop, list[tuple[str, bytes]], Any, Any]:
    turns, log = FakeLoop(), list[tuple[str, bytes]]()
    outbox = Outbox(cast(asyncio.AbstractEventLoop, turns), range(in_flight))
    return outbox, turns, log, FakeTransport(log, "a"), FakeTransport(log, "b")


@pytest.mark.parametrize("in_flight", [0, FEW])
def test_with_few_requests_in_flight_writes_go_out_at_once(in_flight: int) -> None:
    outbox, turns, log, a, _ = make_outbox(in_flight)
    outbox.write(a, b"1")
    assert log == [("a", b"1")]
    assert turns.soon == []


def test_writes_of_one_turn_are_flushed_together_in_order() -> None:
    outbox, turns, log, a, b = make_outbox(FEW + 1)
    for line, data in ((a, b"1"), (b, b"2"), (a, b"3")):
        outbox.write(line, data)
    assert log == []
    assert len(turns.soon) == 1
    turns.turn()
    assert log == [("a", b"1"), ("b", b"2"), ("a", b"3")]
    outbox.write(b, b"4")
    turns.turn()
    assert log[3:] == [("b", b"4")]


def test_large_writes_do_not_overtake_pending_ones() -> None:
    requests = list(range(FEW + 1))
    turns, log = FakeLoop(), list[tuple[str, bytes]]()
    outbox, a = Outbox(cast(asyncio.AbstractEventLoop, turns), requests), cast(Any, FakeTransport(log, "a"))
    outbox.write(a, b"1")
    requests.clear()  # few are in flight now, but the first bytes are still pending
    outbox.write(a, b"2")
    assert log == []
    turns.turn()
    assert log == [("a", b"1"), ("a", b"2")]


def test_large_writes_go_out_at_once_after_pending_ones() -> None:
    outbox, turns, log, a, b = make_outbox(FEW + 1)
    outbox.write(a, b"1")
    outbox.write(b, b"x" * (LARGE + 1))
    assert log == [("a", b"1"), ("b", b"x" * (LARGE + 1))]
    turns.turn()
    assert len(log) == 2


def test_closing_transports_are_skipped_and_a_flush_leaves_nothing() -> None:
    outbox, turns, log, a, b = make_outbox(FEW + 1)
    outbox.write(a, b"1")
    outbox.write(b, b"2")
    a.closing = True
    outbox.flush()
    assert log == [("b", b"2")]
    turns.turn()
    assert log == [("b", b"2")]
