"""Long JSON bodies: what they consist of is counted before they are parsed, and few are parsed in one turn."""

import gc
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.gateway import long_bodies
from pointsman.gateway.known_bodies import KnownBodies
from pointsman.gateway.long_bodies import JsonCounter, JsonCounts
from pointsman.http.buffers import LARGE_BYTES
from pointsman.http.heads import HttpRequest
from tests.gateway.bed import Bed
from tests.gateway.wire import chat, wait_for
from tests.properties import examples

TEXT = st.text(alphabet='ab"\\[]{},: \né', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | TEXT,
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(TEXT, inside, max_size=4),
    max_leaves=20,
)


def counted(body: bytes) -> JsonCounts:
    counter = JsonCounter(body)
    while not counter.step():
        pass
    return counter.counts


def expected(value: Any) -> JsonCounts:
    """What `msgspec.json.encode` writes of a value: no blanks."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    commas = max(len(inside) - 1, 0)
    own = JsonCounts(int(isinstance(value, list | dict)), commas, len(value) if isinstance(value, dict) else 0, 0)
    return JsonCounts(*(sum(each) for each in zip(own, *map(expected, inside), strict=True)))


@given(VALUES, st.integers(1, 9))
@settings(max_examples=examples(200))
def test_counts_do_not_depend_on_strings_and_pieces(value: Any, piece: int) -> None:
    body = msgspec.json.encode(value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(long_bodies, "PIECE_BYTES", piece)
        assert counted(body) == expected(value)
        indented = msgspec.json.format(body, indent=2)
        assert counted(indented)[:3] == expected(value)[:3]
        assert counted(indented).blanks == len(indented) - len(body)


def listed(one: bytes, count: int) -> bytes:
    return b'{"model":"m","messages":[%b]}' % b",".join([one] * count)


TOO_MUCH: dict[str, bytes] = {
    "lists": listed(b"[]", 3_000_000),
    "mappings in mappings": listed(b'{"a":{}}', 1_000_000),
    "numbers": listed(b"1", 4_000_000),
    "messages": listed(b'{"role":"user","content":""}', 300_000),
    "fields": b'{"model":"m"%b}' % (b',"a":1' * 1_000_000),
    "blanks": b" " * 20_000_000 + listed(b"{}", 1),
    "strings": listed(b'""', 4_000_000),
}


@pytest.mark.parametrize("what", TOO_MUCH)
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/messages"])
def test_bodies_of_too_many_parts_are_refused(bed: Bed, what: str, path: bytes) -> None:
    refused = bed.fetch(post(TOO_MUCH[what], path))
    assert refused.status == 413
    assert b"the body has more than " in refused.body
    assert bed.gateway.buffered.held == 0


@pytest.mark.parametrize("where", ["x", "tools", "messages"])
def test_requests_for_messages_may_consist_of_less(bed: Bed, where: str) -> None:
    """Each of their values is made and written again, so a body below 1 MiB is counted, too."""
    body = b'{"model":"m","%b":[%b]}' % (where.encode(), b",".join([b'{"a":{}}'] * 20_000))
    refused = bed.fetch(post(body, b"/v1/messages"))
    assert (refused.status, refused.json()["error"]["type"]) == (413, "request_too_large")
    assert b"more than 15,000 lists and mappings" in refused.body


@pytest.mark.parametrize(
    "content", [b"x" * 20_000_000, b"[{,:]} " * 3_000_000, rb"\"\\" * 4_000_000], ids=["x", "brackets", "escapes"]
)
def test_long_strings_are_served_whatever_they_contain(bed: Bed, content: bytes) -> None:
    backend = bed.backend()
    body = listed(b'{"role":"user","content":"%b"}' % content, 1)
    assert bed.fetch(post(body)).status == 200
    assert backend.received[-1].body == body


def test_a_client_that_disconnects_while_its_body_is_counted_is_forgotten(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_bodies, "PIECE_BYTES", 16)  # longer than this test
    backend = bed.backend()
    client = bed.client()
    client.send(post(listed(b'{"role":"user","content":"%b"}' % (b"x" * 2 * LARGE_BYTES), 1)))
    wait_for(lambda: len(bed.gateway.long_bodies) == 1)
    assert bed.gateway.in_flight == 1
    client.close()
    wait_for(lambda: len(bed.gateway.long_bodies) == 0)
    assert bed.fetch(chat()).status == 200
    assert len(backend.received) == 1


def test_a_body_is_freed_without_the_garbage_collector(bed: Bed) -> None:
    """Otherwise it frees those of many requests at once, which takes 0.1 s for 190 MB."""
    bed.backend()

    def held() -> int:
        return sum(isinstance(one, HttpRequest) and len(one.body) > LARGE_BYTES for one in gc.get_objects())

    bed.thread.call(gc.disable)
    try:
        request = post(listed(b'{"role":"user","content":"%b"}' % (b"x" * 2 * LARGE_BYTES), 1))
        assert bed.fetch(request.replace(b"host", b"connection: close\r\nhost")).status == 200
        wait_for(lambda: bed.thread.call(held) == 0, "the body is freed")
    finally:
        bed.thread.call(gc.enable)


def test_several_long_bodies_at_once_are_all_served(bed: Bed) -> None:
    backend = bed.backend()
    clients = [bed.client() for _ in range(6)]
    for number, client in enumerate(clients):
        client.send(post(listed(b'{"role":"user","content":"%b"}' % (b"x" * number * 400_000), 1)))
    assert {client.read_response().status for client in clients} == {200}
    assert len(backend.received) == 6


@pytest.mark.parametrize("element", [b"1", b"[]", b"{}", b'{"":[]}'])
def test_many_small_elements_are_not_remembered(element: bytes) -> None:
    """They would have to be told apart one by one, which took half a second, each time."""
    known, body = KnownBodies(), listed(element, 900_000 // (len(element) + 1))

    def longest(read: Callable[[], object]) -> float:
        taken = []
        for _ in range(4):
            began = time.thread_time()
            read()
            taken.append(time.thread_time() - began)
        return max(taken)

    alone = longest(lambda: msgspec.json.decode(body))
    assert longest(lambda: known.read(body)) <= 3 * alone
    assert len(known) == 0


def test_forms_of_too_many_fields_are_refused(bed: Bed) -> None:
    """Each field is looked at: a million of them took seconds."""
    part = b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n'
    request = post(part * 100_000 + b"--b--", b"/v1/messages")
    head = b"content-length"
    refused = bed.fetch(request.replace(head, b"content-type: multipart/form-data; boundary=b\r\n" + head, 1))
    assert refused.status == 400
    assert b"more than 1000 fields" in refused.body


def post(body: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: gateway\r\ncontent-length: %d\r\n\r\n%b" % (path, len(body), body)
