"""Almost valid messages: joined, cut, repeated, and mixed with bytes that confuse parsers."""

from collections.abc import Sequence

from hypothesis import strategies as st

TOKENS = [
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\n\n", b"\x00", b"\xff", b" ", b"\t", b":", b";", b",", b"0", b"-1", b"+",
    b"f" * 17, b"0\r\n\r\n", b"5\r\nhello\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n",
    b"transfer-encoding: identity\r\n", b"Connection: close\r\n", b"connection: upgrade\r\nupgrade: h2c\r\n",
    b"expect: 100-continue\r\n", b"host: x\r\n", b"HTTP/1.0", b"HTTP/1.1", b"HTTP/2.0", b"GET ", b"CONNECT ",
    b"/v1/chat/completions", b"/health", b"data: ", b"[DONE]", b"data: [DONE]\n\n", b"{", b"}", b'"',
    b"text/event-stream", b"content-length: 0\r\n", b"204", b"500", b"101", b"x" * 2000,
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, good: Sequence[bytes], most: int = 4) -> bytes:
    """Some valid messages in a row, with a few mutations."""
    made = bytearray(b"".join(draw(st.lists(st.sampled_from(good), min_size=1, max_size=4))))
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, len(made)))
        what = draw(st.integers(0, 5))
        if what == 0:
            del made[at : at + draw(st.integers(1, 30))]
        elif what == 1:
            made[at:at] = draw(st.sampled_from(TOKENS))
        elif what == 2:
            made[at:at] = draw(st.binary(max_size=8))
        elif what == 3:
            made[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif what == 4:
            made[at:at] = made[at : at + draw(st.integers(1, 60))]
        else:
            del made[at:]
    return bytes(made)


@st.composite
def pieces(draw: st.DrawFn, data: bytes, most: int = 12) -> list[bytes]:
    """The same bytes, split into pieces."""
    if len(data) < 80 and draw(st.booleans()):
        return [data[n : n + 1] for n in range(len(data))]
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=most)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < end]
