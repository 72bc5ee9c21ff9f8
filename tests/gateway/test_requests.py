"""Valid and invalid HTTP/1.1 from clients: the response, whether the connection stays open, what is forwarded."""

import json
import socket
from contextlib import suppress
from typing import NamedTuple

import pytest

from pointsman.gateway.connection import GatewayConnection
from pointsman.gateway.gateway import GatewayPage, needs_no_key
from pointsman.gateway.listeners import CannotListen, Listeners
from tests.gateway.backends import Gate
from tests.gateway.bed import Bed, MakeBed, plan_of
from tests.gateway.wire import CHAT, HEALTH, chat, post, wait_for

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}]}).encode()
HEAD = b"POST %b HTTP/1.1\r\nhost: gateway\r\n" % CHAT
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
GOOD = post(BODY)


def in_chunks(size: int, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    """The valid request with a body in chunks of `size` bytes."""
    parts = [BODY[start : start + size] for start in range(0, len(BODY), size)]
    framed = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
    return CHUNKED + framed + b"0%b\r\n%b\r\n" % (extension, trailers)


class Row(NamedTuple):
    """Sent bytes and the expected responses."""

    name: str
    sent: bytes
    statuses: list[int]
    stays_open: bool = True
    forwarded: int = 0


def get(path: bytes, *lines: bytes, method: bytes = b"GET", version: bytes = b"1.1") -> bytes:
    head = b"".join(line + b"\r\n" for line in (b"host: gateway", *lines))
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, path, version, head)


ROWS = [
    # Framing
    Row("a body with a length", GOOD, [200], forwarded=1),
    Row("a body in one chunk", in_chunks(1000), [200], forwarded=1),
    Row("a body in chunks of one byte", in_chunks(1), [200], forwarded=1),
    Row("chunk extensions", in_chunks(7, b';a=b;c="d e"'), [200], forwarded=1),
    Row("trailers", in_chunks(7, trailers=b"x-late: 1\r\nauthorization: Bearer x\r\n"), [200], forwarded=1),
    Row("no body at all", HEAD + b"\r\n", [400]),
    Row("an empty body", post(b""), [400]),
    Row("an empty chunked body", CHUNKED + b"0\r\n\r\n", [400]),
    Row("a GET with a body", get(b"/health", b"content-length: 3") + b"abc", [200]),
    Row("empty lines before a request", b"\r\n\r\n" + GOOD, [200], forwarded=1),
    # Keep-alive
    Row("connection: close", chat("connection: close"), [200], False, 1),
    Row("connection: Close, x", chat("Connection: x, Close"), [200], False, 1),
    Row("HTTP/1.0", chat(version=b"1.0"), [200], False, 1),
    Row("HTTP/1.0 with keep-alive", chat("connection: keep-alive", version=b"1.0"), [200], True, 1),
    Row("HTTP/1.0 without a host", b"GET /health HTTP/1.0\r\n\r\n", [200], False),
    Row("an error keeps the connection", get(b"/nowhere"), [404]),
    Row("an error on HTTP/1.0 does not", get(b"/nowhere", version=b"1.0"), [404], False),
    # Pipelining
    Row("three in one packet", GOOD * 3, [200] * 3, forwarded=3),
    Row("pages between", HEALTH + GOOD + HEALTH + GOOD, [200] * 4, forwarded=2),
    Row("forty in one packet", GOOD * 40, [200] * 40, forwarded=40),
    Row("many pipelined pages", HEALTH * 500, [200] * 500),
    Row("an error after good ones", GOOD * 2 + b"NONSENSE\r\n\r\n", [200, 200, 400], False, 2),
    Row("nothing after an error", GOOD + b"NONSENSE\r\n\r\n" + GOOD, [200, 400], False, 1),
    Row("nothing after connection: close", GOOD + chat("connection: close") + GOOD, [200, 200], False, 2),
    Row("refusals in between", GOOD + get(b"/nowhere") + post(b"{") + GOOD, [200, 404, 400, 200], forwarded=2),
    # Methods and targets
    Row("GET where POST is expected", get(CHAT), [405]),
    Row("PUT where POST is expected", get(CHAT, method=b"PUT"), [405]),
    Row("DELETE of a page", get(b"/health", method=b"DELETE"), [405]),
    Row("OPTIONS", get(b"/health", method=b"OPTIONS"), [405]),
    Row("OPTIONS *", get(b"*", method=b"OPTIONS"), [404]),
    Row("an unknown path", get(b"/v1/chat"), [404]),
    Row("POST to an unknown path", post(BODY, b"/v1/nowhere"), [404]),
    Row("a query", post(BODY, CHAT + b"?a=b&c"), [200], forwarded=1),
    Row("absolute form", post(BODY, b"http://gateway" + CHAT), [200], forwarded=1),
    Row("absolute form with a query", post(BODY, b"HTTP://gateway:80" + CHAT + b"?a=b"), [200], forwarded=1),
    Row("absolute form without a path", get(b"http://gateway"), [404]),
    Row("another scheme", get(b"ftp://gateway/health"), [404]),
    Row("an unknown method", get(b"/health", method=b"BREW"), [400], False),
    Row("a method in lower case", get(b"/health", method=b"get"), [400], False),
    Row("CONNECT to two hosts", b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", [400], False),
    Row("an upgrade of two hosts", get(b"/", b"host: x", b"connection: upgrade", b"upgrade: x"), [400], False),
    Row("CONNECT", b"CONNECT gateway:443 HTTP/1.1\r\nhost: gateway\r\n\r\n", [405], False),
    # Expectations
    Row("an unknown expectation", chat("expect: the-best"), [417], False),
    Row("HTTP/1.0 may not expect anything", chat("expect: 100-continue", version=b"1.0"), [200], False, 1),
    # Other protocols
    Row("an offer of websockets", get(b"/health", b"connection: upgrade", b"upgrade: websocket"), [200]),
    Row(
        "an offer of HTTP/2",
        chat("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAoAAAAAIAAAAA"),
        [200],
        forwarded=1,
    ),
    Row(
        "an offer of HTTP/2 with a chunked body, and one more",
        in_chunks(9).replace(b"\r\n", b"\r\nconnection: upgrade\r\nupgrade: h2c\r\n", 1) + GOOD,
        [200, 200],
        forwarded=2,
    ),
    Row("an upgrade without connection: upgrade", chat("upgrade: h2c"), [200], forwarded=1),
    Row("HTTP/2 from the start", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400], False),
    Row("TLS on a plain port", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 32, [400], False),
    Row("HTTP/2.0 in a request line", b"GET /health HTTP/2.0\r\nhost: gateway\r\n\r\n", [505], False),
    Row("HTTP/1.2 in a request line", b"GET /health HTTP/1.2\r\nhost: gateway\r\n\r\n", [400], False),
    Row("HTTP/0.9", b"GET /health\r\n\r\n", [505], False),
    Row("RTSP", b"OPTIONS /health RTSP/1.0\r\n\r\n", [400], False),
    Row("ICE", b"SOURCE /health ICE/1.0\r\n\r\n", [400], False),
    Row("RTSP, which llhttp reports as HTTP/1.0", GOOD.replace(b"HTTP/1.1", b"RTSP/1.0"), [400], False),
    Row("RTSP behind a request", GOOD + GOOD.replace(b"HTTP/1.1", b"RTSP/1.0"), [200, 400], False, 1),
    Row("RTSP behind chunks", in_chunks(9) + GOOD.replace(b"HTTP/1.1", b"RTSP/1.0"), [200, 400], False, 1),
    Row("POST over ICE", GOOD.replace(b"HTTP/1.1", b"ICE/1.0"), [400], False),
    # Hosts
    Row("no host", b"GET /health HTTP/1.1\r\n\r\n", [400], False),
    Row("two hosts", get(b"/health", b"host: other"), [400], False),
    Row("an empty host", b"GET /health HTTP/1.1\r\nhost:\r\n\r\n", [403]),
    # Invalid bytes
    Row("garbage", b"\x00\x01\x02\xff" * 50, [400], False),
    Row("a NUL in a value", get(b"/health", b"x: a\x00b"), [400], False),
    Row("a NUL in a name", get(b"/health", b"x\x00y: a"), [400], False),
    Row("a NUL in the target", get(b"/hea\x00lth"), [400], False),
    Row("a control character in a value", get(b"/health", b"x: a\x01b"), [400], False),
    Row("non-ASCII letters in a value", get(b"/health", b"x: caf\xc3\xa9"), [200]),
    Row("non-ASCII letters in a name", get(b"/health", b"caf\xc3\xa9: x"), [400], False),
    Row("an empty name", get(b"/health", b": a"), [400], False),
    Row("no colon", get(b"/health", b"nothing"), [400], False),
    Row("a space before the colon", get(b"/health", b"x : a"), [400], False),
    Row("a space in a name", get(b"/health", b"x y: a"), [400], False),
    Row("spaces around a value", get(b"/health", b"x: \t a \t "), [200]),
    Row("a folded line", get(b"/health", b"x: a\r\n b"), [400], False),
    Row("a line folded by a tab", get(b"/health", b"x: a\r\n\tb"), [400], False),
    Row("a space before the first name", b"GET /health HTTP/1.1\r\n host: gateway\r\n\r\n", [400], False),
    Row("line ends of one LF", b"GET /health HTTP/1.1\nhost: gateway\n\n", [400], False),
    Row("one bare LF", b"GET /health HTTP/1.1\r\nhost: gateway\nx: a\r\n\r\n", [400], False),
    Row("one bare CR", b"GET /health HTTP/1.1\r\nhost: gateway\rx: a\r\n\r\n", [400], False),
    Row("a fragment", get(b"/health#top"), [400], False),
    # Bodies
    Row("not JSON", post(b"{"), [400]),
    Row("not an object", post(b"[]"), [400]),
    Row("not UTF-8", post(b'{"model": "\xff"}'), [400]),
    Row("JSON as deep as a well", post(b'{"model": "m", "x": ' + b"[" * 100_000), [400]),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_requests_get_the_expected_responses(bed: Bed, row: Row) -> None:
    backend = bed.backend()
    client = bed.client()
    client.send(row.sent)
    answers = [client.read_response() for _ in row.statuses]
    assert [answer.status for answer in answers] == row.statuses
    for answer in answers:
        if answer.status >= 400:
            assert answer.error["message"]
    assert client.stays_open() == row.stays_open
    assert len(backend.received) == row.forwarded
    assert {request.body for request in backend.received} <= {BODY}
    assert {request.header("x-late") for request in backend.received} <= {None}


@pytest.mark.parametrize("row", [row for row in ROWS if len(row.sent) < 1000], ids=lambda row: row.name)
def test_requests_sent_byte_by_byte_get_the_same_responses(bed: Bed, row: Row) -> None:
    backend = bed.backend()
    client = bed.client()
    try:
        client.send(row.sent, piece=1)
    except ConnectionError:
        assert not row.stays_open
    assert [client.read_response().status for _ in row.statuses] == row.statuses
    assert client.stays_open() == row.stays_open
    assert len(backend.received) == row.forwarded
    assert {request.body for request in backend.received} <= {BODY}


def test_pipelined_responses_are_in_order(bed: Bed) -> None:
    """The first goes to a slow instance, the others are faster."""
    gate = Gate()
    bed.backend(gate, max_concurrency=1)
    client = bed.client()
    client.send(chat("x-request-id: slow") + HEALTH + chat("x-request-id: quick"))
    wait_for(bed.running)
    bed.backend()
    gate.open()
    assert [client.read_response().header("x-request-id") for _ in range(3)] == ["slow", None, "quick"]


def test_all_pipelined_requests_are_answered(bed: Bed) -> None:
    bed.backend()
    client = bed.client()
    client.send((chat() + HEALTH) * 10)
    for _ in range(10):
        client.send(chat())
    assert [client.read_response().status for _ in range(30)] == [200] * 30


@pytest.mark.parametrize("path", [b"/health", b"/v1/models", b"/nowhere", CHAT])
def test_head_is_get_without_a_body(bed: Bed, path: bytes) -> None:
    client = bed.client()
    page = client.fetch(get(path))
    client.send(get(path, method=b"HEAD"))
    head = client.read_response(to_head=True)
    assert (head.status, head.headers) == (page.status, page.headers)
    assert client.stays_open()


@pytest.mark.parametrize(("path", "allowed"), [(CHAT, "POST"), (b"/health", "GET, HEAD"), (b"/v1/models", "GET, HEAD")])
def test_a_method_not_allowed_lists_the_allowed_ones(bed: Bed, path: bytes, allowed: str) -> None:
    assert bed.fetch(get(path, method=b"PATCH")).header("allow") == allowed


def test_http_1_0_keep_alive_is_confirmed(bed: Bed) -> None:
    bed.backend()
    client = bed.client()
    for request in (
        chat("connection: keep-alive", version=b"1.0"),
        get(b"/health", b"connection: keep-alive", version=b"1.0"),
        get(b"/nowhere", b"connection: keep-alive", version=b"1.0"),
    ):
        assert client.fetch(request).header("connection") == "keep-alive"
    assert client.fetch(chat(version=b"1.0")).header("connection") == "close"
    assert client.is_closed()


# Expect: 100-continue


def test_a_client_that_expects_100_continue_is_answered(bed: Bed) -> None:
    backend = bed.backend()
    client = bed.client()
    head, _, body = chat("expect: 100-continue").partition(b"\r\n\r\n")
    client.send(head + b"\r\n\r\n")
    assert client.read_response().status == 100
    assert backend.received == []
    client.send(body)
    assert client.read_response().status == 200
    assert backend.received[0].header("expect") is None
    assert client.stays_open()


def test_100_continue_waits_for_the_answers_before(bed: Bed) -> None:
    bed.backend()
    client = bed.client()
    head, _, body = chat("expect: 100-continue").partition(b"\r\n\r\n")
    client.send(GOOD + head + b"\r\n\r\n")
    assert client.read_response().status == 200
    assert client.read_response().status == 100
    client.send(body)
    assert client.read_response().status == 200


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("content-length: 1000000\r\nexpect: 100-continue", 413),
        ("content-length: 5\r\nexpect: 200-ok", 417),
        ("transfer-encoding: gzip, chunked\r\nexpect: 100-continue", 501),
    ],
)
def test_100_continue_is_not_sent_for_a_refused_body(make_bed: MakeBed, lines: str, status: int) -> None:
    bed = make_bed({"limits": {"maxBodyBytes": 1000}})
    client = bed.client()
    client.send(HEAD + lines.encode() + b"\r\n\r\n")
    assert client.read_response().status == status
    assert client.is_closed()


# Sizes


LIMITS = {"limits": {"maxHeaderBytes": 4096, "maxBodyBytes": 10_000}}


@pytest.mark.parametrize(
    "piece", [0, 1, 300, 3000, 4000], ids=lambda size: f"in pieces of {size}" if size else "at once"
)
@pytest.mark.parametrize(
    "large",
    [
        get(b"/health", b"x: " + b"y" * 9000),
        get(b"/health", *(b"x%d: y" % n for n in range(1000))),
        get(b"/health", *[b"x: y"] * 1500),
        get(b"/health", b"x" * 9000 + b": y"),
        get(b"/health?" + b"x" * 9000),
    ],
    ids=["a value", "names", "the same name", "a name", "a target"],
)
def test_heads_over_the_limit_are_refused(make_bed: MakeBed, large: bytes, piece: int) -> None:
    bed = make_bed(LIMITS)
    client = bed.client()
    try:
        client.send(large, piece=piece)
    except ConnectionError:
        assert piece  # refused before everything was sent
    assert client.read_response().status == 431
    assert client.is_closed()


@pytest.mark.parametrize("piece", [0, 1, 500], ids=lambda size: f"in pieces of {size}" if size else "at once")
def test_a_head_within_the_limits_is_accepted(make_bed: MakeBed, piece: int) -> None:
    client = make_bed(LIMITS).client()
    for _ in range(3):
        client.send(get(b"/health", b"x: " + b"y" * 3500), piece=piece)
        assert client.read_response().status == 200


def test_the_limit_applies_to_each_head_however_they_are_packed(make_bed: MakeBed) -> None:
    client = make_bed(LIMITS).client()
    client.send(get(b"/health", b"x: " + b"y" * 1000) * 20)
    assert [client.read_response().status for _ in range(20)] == [200] * 20


@pytest.mark.parametrize("piece", [0, 999], ids=lambda size: f"in pieces of {size}" if size else "at once")
@pytest.mark.parametrize(
    "large",
    [
        HEAD + b"content-length: 10001\r\n\r\n" + b" " * 10_001,
        HEAD + b"content-length: 18446744073709551615\r\n\r\n" + b" " * 20_000,
        CHUNKED + b"2711\r\n" + b" " * 10_001 + b"\r\n0\r\n\r\n",
        CHUNKED + b"3e8\r\n%b\r\n" % (b" " * 1000) * 11 + b"0\r\n\r\n",
        CHUNKED + b"ffffffffffffffff\r\n" + b" " * 20_000,
    ],
    ids=["by its length", "by an absurd length", "in one chunk", "in chunks", "in an absurd chunk"],
)
def test_bodies_over_the_limit_are_refused(make_bed: MakeBed, large: bytes, piece: int) -> None:
    bed = make_bed(LIMITS)
    backend = bed.backend()
    client = bed.client()
    try:
        client.send(large, piece=piece)
    except ConnectionError:
        assert piece
    assert client.read_response().status == 413
    assert client.is_closed()
    assert backend.received == []


def test_a_body_of_exactly_the_limit_is_accepted(make_bed: MakeBed) -> None:
    bed = make_bed(LIMITS)
    backend = bed.backend()
    body = BODY + b" " * (10_000 - len(BODY))
    assert bed.fetch(post(body)).status == 200
    assert bed.fetch(CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)).status == 200
    assert [len(request.body) for request in backend.received] == [10_000, 10_000]


def test_a_client_reads_that_its_body_is_too_large_although_it_goes_on_sending(make_bed: MakeBed) -> None:
    """Closing a connection with unread bytes resets it, and a reset may overtake the response."""
    bed = make_bed({"limits": {"maxBodyBytes": "1M"}})
    client = bed.client()
    size = 40 * 1024 * 1024
    client.send(HEAD + b"content-length: %d\r\n\r\n" % size)
    sent = 0
    try:
        while sent < size:
            sent += client.socket.send(b" " * min(size - sent, 256 * 1024))
    except ConnectionError:
        pytest.fail(f"cut off after {sent} bytes, with the answer unread")
    assert client.read_response().status == 413
    assert client.is_closed()


@pytest.mark.parametrize("trailer", [b"x: " + b"y" * 100_000, b"x: y\r\n" * 20_000], ids=["one long", "many"])
def test_trailers_over_the_limit_are_refused(make_bed: MakeBed, trailer: bytes) -> None:
    bed = make_bed(LIMITS)
    client = bed.client()
    with suppress(ConnectionError):  # refused before everything was sent
        client.send(CHUNKED + b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY) + trailer, piece=1000)
    assert client.read_response().status == 431
    assert client.is_closed()


def test_a_body_of_tiny_chunks_takes_no_more_memory_than_its_bytes(make_bed: MakeBed) -> None:
    bed = make_bed({"limits": {"maxBodyBytes": "4M"}})
    client = bed.client()
    size = 400_000
    client.send(CHUNKED + b"2\r\n  \r\n" * (size // 2))
    bed.thread.call(lambda: None)
    [connection] = bed.gateway.clients
    assert len(connection.parser._body._parts) < 1000


# Internal errors


def test_an_internal_error_is_500_and_reported(bed: Bed) -> None:
    """It is reported as a server error and affects no other request."""

    def broken(client: GatewayConnection, *_: object) -> None:
        raise RuntimeError("oops")

    bed.gateway.pages.exact[b"/broken"] = GatewayPage(broken, needs_no_key)
    other = bed.client()
    assert other.fetch(HEALTH).status == 200
    client = bed.client()
    client.send(get(b"/broken"))
    assert client.is_closed()
    [report] = bed.thread.errors
    assert isinstance(report["exception"], RuntimeError)
    bed.thread.errors.clear()
    assert other.stays_open()


def test_an_address_in_use_is_named(bed: Bed) -> None:
    host, port = bed.address
    taken = plan_of({"listen": f"{host}:{port}"}).gateway
    with pytest.raises(CannotListen, match=f"cannot listen on {host}:{port}: .*set gateway.listen"):
        bed.thread.run(Listeners(bed.gateway).bind(taken))


# Half-closed connections


def test_a_half_closed_client_gets_immediate_responses(bed: Bed) -> None:
    client = bed.client()
    client.send(HEALTH)
    client.finish_writing()
    assert client.read_response().status == 200
    assert client.is_closed()


def test_a_client_that_only_connects_and_disconnects(bed: Bed) -> None:
    for _ in range(20):
        bed.client().close()
        bed.client().reset()
        half = bed.client()
        half.send(HEAD)
        half.reset()
    assert bed.fetch(HEALTH).status == 200


def test_urgent_data_changes_nothing(bed: Bed) -> None:
    client = bed.client()
    client.send(HEALTH[:10])
    client.socket.send(b"!", socket.MSG_OOB)
    client.send(HEALTH[10:])
    assert client.read_response().status == 200
