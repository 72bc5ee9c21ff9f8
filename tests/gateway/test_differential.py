"""Each fast way to read input agrees with the plain one; `tests.gateway.differential` runs by itself for millions."""

from collections.abc import Callable
from random import Random

import msgspec
import pytest

from pointsman.gateway.known_bodies import LONG_BYTES, KnownBodies
from pointsman.gateway.openai import read_body
from tests.gateway.differential import COMPARISONS, KNOWN, bodies, buffers, compare, verdict


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_the_fast_way_reads_what_the_plain_one_reads(comparison: Callable[[Random], None]) -> None:
    compare(comparison, 300 if comparison is buffers else 1500)


def test_bodies_are_compared_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the comparison would be of the full decoder with itself."""
    known = []
    rest = KnownBodies._read_rest

    def counted(self: KnownBodies, body: memoryview, start: int, shared: int) -> object:
        found = rest(self, body, start, shared)
        known.append(found is not None)
        return found

    monkeypatch.setattr(KnownBodies, "_read_rest", counted)
    compare(bodies, 300)
    assert known.count(True) > 300
    assert known.count(False) > 30
    assert 0 < KNOWN.kept <= 20_000


def conversation(turns: int, turn_bytes: int = 4000) -> bytes:
    messages = [{"role": "user", "content": f"turn {turn} " + "text\n" * (turn_bytes // 6)} for turn in range(turns)]
    return msgspec.json.encode({"model": "chat", "messages": messages, "max_tokens": 5})


def test_of_a_conversation_that_goes_on_only_what_is_new_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    known, decoded = KnownBodies(), []

    def counted(body: bytes) -> object:
        decoded.append(len(body))
        return read_body(body)

    monkeypatch.setattr("pointsman.gateway.known_bodies.read_body", counted)
    for turns in range(10, 100):
        sent = bytearray(conversation(turns))
        assert verdict(known.read, memoryview(sent)) == verdict(read_body, bytes(sent))
    first, whole = len(conversation(10)), sum(len(conversation(turns)) for turns in range(10, 100))
    assert sum(decoded) < 0.15 * whole
    assert first > LONG_BYTES


def test_conversations_that_share_their_first_messages_are_each_known() -> None:
    known = KnownBodies()
    system = {"role": "system", "content": "rules\n" * LONG_BYTES}
    for _ in range(3):
        for number in range(8):
            messages = [system, {"role": "user", "content": f"{number}" * LONG_BYTES}]
            sent = msgspec.json.encode({"model": "chat", "messages": messages})
            assert verdict(known.read, sent) == verdict(read_body, sent)
    assert len(known) >= 8


def test_what_is_remembered_is_bounded() -> None:
    known = KnownBodies(max_kept=200_000)
    for number in range(40):
        sent = conversation(10).replace(b"turn", b"%04d" % number)
        for _ in range(2):
            assert verdict(known.read, sent) == verdict(read_body, sent)
        assert known.kept <= 200_000
    assert known.kept > 100_000
