"""Responses become gRPC messages however their bytes are split."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.gateway.grpc.response_sink import JsonPieces

CASES = [
    (b"application/json", b'{"a":1}', ['{"a":1}']),
    (b"application/octet-stream", b"\xff\x00", ['"/wA="']),
    (b"application/x-ndjson", b'{"a":1}\n[2]\n', ['{"a":1}', "[2]"]),
    (b"application/x-ndjson", b'1\n"no end', ["1", '"no end']),
    (b"application/x-ndjson", b"", []),
    (b"text/event-stream; charset=utf-8", b'data: {"a":1}\n\ndata:2\r\n\r\ndata: [DONE]\n\n', ['{"a":1}', "2"]),
    (b"Text/Event-Stream", b"event: x\n: comment\ndata: two\ndata: lines\n\nid: 1\n\n", ['"two\\nlines"']),
]


def read(content_type: bytes, body: bytes, cuts: list[int]) -> list[str]:
    pieces, found, start = JsonPieces(content_type), [], 0
    for cut in [*sorted(cut for cut in cuts if cut <= len(body)), len(body)]:
        found += pieces.feed(body[start:cut])
        start = cut
    return found + pieces.end()


@pytest.mark.parametrize(("content_type", "body", "expected"), CASES)
@given(cuts=st.lists(st.integers(0, 60)))
def test_each_piece_is_json_wherever_the_bytes_are_split(
    content_type: bytes, body: bytes, expected: list[str], cuts: list[int]
) -> None:
    assert read(content_type, body, cuts) == expected


@given(text=st.text(), cuts=st.lists(st.integers(0, 20)))
def test_pieces_of_text_join_to_the_whole_text(text: str, cuts: list[int]) -> None:
    pieces = read(b"text/plain; charset=utf-8", text.encode(), cuts)
    assert "".join(msgspec.json.decode(piece, type=str) for piece in pieces) == text


def test_content_types_with_several_messages() -> None:
    several = {
        kind: JsonPieces(kind).are_several
        for kind in (b"application/json", b"text/plain", b"application/x-ndjson", b"")
    }
    assert several == {b"application/json": False, b"text/plain": True, b"application/x-ndjson": True, b"": False}
