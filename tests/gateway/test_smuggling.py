"""Requests that two servers might parse differently: neither they nor the bytes after them reach an instance.

Whatever gets through is written anew: one request, one length, no header that is for one connection alone.
"""

import json

import pytest

from tests.gateway.backends import OK, answers
from tests.gateway.bed import Bed
from tests.gateway.wire import CHAT, chat, post

BODY = json.dumps({"model": "m", "messages": []}).encode()
LINE = b"POST %b HTTP/1.1\r\n" % CHAT
HEAD = LINE + b"host: gateway\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
ONE_CHUNK = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = post(b'{"model": "m", "messages": ["smuggled"]}')


def sized(value: bytes, name: bytes = b"content-length") -> bytes:
    return HEAD + b"%b: %b\r\n\r\n" % (name, value) + BODY


def coded(*lines: bytes, body: bytes = ONE_CHUNK) -> bytes:
    return HEAD + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


def chunked(body: bytes) -> bytes:
    return coded(b"transfer-encoding: chunked", body=body)


SIZE = b"%d" % len(BODY)

REFUSED = {
    "length and chunks": coded(LENGTH[:-2], b"transfer-encoding: chunked"),
    "chunks and length": coded(b"transfer-encoding: chunked", LENGTH[:-2]),
    "length 0 and chunks": coded(b"content-length: 0", b"transfer-encoding: chunked"),
    "length and an unknown coding": coded(LENGTH[:-2], b"transfer-encoding: x", body=BODY),
    "two equal lengths": coded(LENGTH[:-2], LENGTH[:-2], body=BODY),
    "two different lengths": coded(LENGTH[:-2], b"content-length: 0", body=BODY),
    "two lengths in one line": sized(SIZE + b", " + SIZE),
    "two lengths in one line without a space": sized(SIZE + b"," + SIZE),
    "a length with a plus": sized(b"+" + SIZE),
    "a length with a minus": sized(b"-" + SIZE),
    "a length with an underscore": sized(b"1_0"),
    "a length with a space within": sized(b"4 2"),
    "a length with a dot": sized(SIZE + b".0"),
    "a length with an exponent": sized(b"1e2"),
    "a length in hex": sized(b"0x20"),
    "a length with a NUL": sized(SIZE + b"\x00"),
    "a length with a vertical tab": sized(b"\x0b" + SIZE),
    "a length with a newline": sized(b"\r\n " + SIZE),
    "a length in other digits": sized("٣".encode()),
    "no length": sized(b""),
    "a length beyond 64 bits": sized(b"18446744073709551616"),
    "a length of a thousand digits": sized(b"9" * 1000),
    "a space after the name of the length": sized(SIZE, b"content-length "),
    "a tab after the name of the length": sized(SIZE, b"content-length\t"),
    "a space before the name of the length": sized(SIZE, b" content-length"),
    "chunked twice": coded(b"transfer-encoding: chunked", b"transfer-encoding: chunked"),
    "chunked twice in one line": coded(b"transfer-encoding: chunked, chunked"),
    "chunked and identity": coded(b"transfer-encoding: chunked", b"transfer-encoding: identity"),
    "identity and chunked": coded(b"transfer-encoding: identity", b"transfer-encoding: chunked"),
    "identity": coded(b"transfer-encoding: identity", body=BODY),
    "xchunked": coded(b"transfer-encoding: xchunked"),
    "chunkedx": coded(b"transfer-encoding: chunkedx"),
    "chunked, gzip": coded(b"transfer-encoding: chunked, gzip"),
    "gzip, chunked": coded(b"transfer-encoding: gzip, chunked"),
    "chunked with a parameter": coded(b"transfer-encoding: chunked;q=1"),
    "chunked in quotes": coded(b'transfer-encoding: "chunked"'),
    "chunked with a comma": coded(b"transfer-encoding: chunked,"),
    "a comma before chunked": coded(b"transfer-encoding: ,chunked"),
    "an empty coding": coded(b"transfer-encoding:"),
    "chunked with a tab behind": coded(b"transfer-encoding: chunked\t"),
    "chunked with a vertical tab": coded(b"transfer-encoding: \x0bchunked"),
    "chunked with a form feed": coded(b"transfer-encoding: chunked\x0c"),
    "chunked with a NUL": coded(b"transfer-encoding: chunked\x00"),
    "chunked with a soft hyphen": coded(b"transfer-encoding: chunk\xaded"),
    "chunked on the next line": coded(b"transfer-encoding:\r\n chunked"),
    "chunked after a tab on the next line": coded(b"transfer-encoding:\r\n\tchunked"),
    "chunked after a bare LF": coded(b"x: y\ntransfer-encoding: chunked"),
    "chunked after a bare CR": coded(b"x: y\rtransfer-encoding: chunked"),
    "a space after the name of the coding": coded(b"transfer-encoding : chunked"),
    "a tab after the name of the coding": coded(b"transfer-encoding\t: chunked"),
    "a NUL in the name of the coding": coded(b"transfer\x00-encoding: chunked"),
    "chunks over HTTP/1.0": chunked(ONE_CHUNK).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "chunks over HTTP/1.0 kept alive": coded(b"connection: keep-alive", b"transfer-encoding: chunked").replace(
        b"HTTP/1.1", b"HTTP/1.0"
    ),
    "a chunk size beyond 64 bits": chunked(b"10000000000000000\r\n" + BODY),
    "a chunk size of a thousand digits": chunked(b"f" * 1000 + b"\r\n" + BODY),
    "a chunk size with a minus": chunked(b"-1\r\n" + BODY),
    "a chunk size with a plus": chunked(b"+%b" % ONE_CHUNK),
    "a chunk size with 0x": chunked(b"0x%b" % ONE_CHUNK),
    "a chunk size with an underscore": chunked(b"1_0\r\n" + BODY),
    "a chunk size with a space before": chunked(b" %b" % ONE_CHUNK),
    "a chunk size with a space behind": chunked(ONE_CHUNK.replace(b"\r\n", b" \r\n", 1)),
    "a chunk size with a tab behind": chunked(ONE_CHUNK.replace(b"\r\n", b"\t\r\n", 1)),
    "a chunk size that is not a number": chunked(b"xyz\r\n" + BODY),
    "no chunk size": chunked(b"\r\n" + BODY),
    "a chunk size ended by LF": chunked(ONE_CHUNK.replace(b"\r\n", b"\n", 1)),
    "a chunk size ended by CR": chunked(ONE_CHUNK.replace(b"\r\n", b"\r", 1)),
    "a chunk longer than its size": chunked(b"1\r\n%b\r\n0\r\n\r\n" % BODY),
    "a chunk that does not end": chunked(ONE_CHUNK.replace(b"\r\n0", b"0")),
    "a chunk ended by LF": chunked(ONE_CHUNK.replace(b"\r\n0", b"\n0")),
    "a chunk extension with a newline": chunked(ONE_CHUNK.replace(b"\r\n", b";a\nb\r\n", 1)),
    "a chunk extension with a CR": chunked(ONE_CHUNK.replace(b"\r\n", b";a\rb\r\n", 1)),
    "a chunk extension in quotes over lines": chunked(ONE_CHUNK.replace(b"\r\n", b';a="\r\n', 1)),
    "a length among trailers": chunked(ONE_CHUNK[:-2] + LENGTH + b"\r\n"),
    "a coding among trailers": chunked(ONE_CHUNK[:-2] + b"transfer-encoding: chunked\r\n\r\n"),
    "a space before a trailer": chunked(ONE_CHUNK[:-2] + b" x: y\r\n\r\n"),
    "trailers ended by LF": chunked(ONE_CHUNK[:-2] + b"x: y\n\r\n"),
    "lines ended by CR": post(BODY).replace(b"\r\n", b"\r"),
    "lines ended by LF": post(BODY).replace(b"\r\n", b"\n"),
    "lines ended by LF CR": post(BODY).replace(b"\r\n", b"\n\r"),
    "an empty line of LF": HEAD + LENGTH + b"\n" + BODY,
    "tabs in the request line": post(BODY).replace(b" ", b"\t", 2),
    "a tab behind the target": post(BODY).replace(b" HTTP", b"\tHTTP", 1),
    "a vertical tab in the request line": post(BODY).replace(b" HTTP", b"\x0bHTTP", 1),
    "a target with a space": post(BODY, CHAT + b" x"),
    "a second version": post(BODY, CHAT + b" HTTP/1.1"),
    "no version": b"POST %b\r\nhost: gateway\r\n" % CHAT + LENGTH + b"\r\n" + BODY,
    "no target": b"POST HTTP/1.1\r\nhost: gateway\r\n" + LENGTH + b"\r\n" + BODY,
    "a version with more digits": post(BODY, version=b"1.10"),
    "a version with a comma": post(BODY, version=b"1,1"),
    "another version": post(BODY, version=b"1.2"),
    "HTTP/2.0": post(BODY, version=b"2.0"),
    "HTTP/0.9": post(BODY, version=b"0.9"),
    "a fragment": post(BODY, CHAT + b"#x"),
    "a fragment behind a query": post(BODY, CHAT + b"?a=b#x"),
    "a CR LF in the target": post(BODY, CHAT + b"\r\nx"),
    "a NUL in the target": post(BODY, CHAT + b"\x00"),
    "letters beyond ASCII in the target": post(BODY, CHAT + b"?\xff"),
    "a space within a name": HEAD + b"x y: z\r\n" + LENGTH + b"\r\n" + BODY,
    "a colon before the name": HEAD + b":x: z\r\n" + LENGTH + b"\r\n" + BODY,
    "two hosts": HEAD + b"host: other\r\n" + LENGTH + b"\r\n" + BODY,
    "no host": LINE + LENGTH + b"\r\n" + BODY,
    "two authorizations": HEAD + b"authorization: Bearer a\r\nauthorization: Bearer b\r\n" + LENGTH + b"\r\n" + BODY,
    "a tunnel": b"CONNECT gateway:80 HTTP/1.1\r\nhost: gateway\r\n\r\n",
    "a tunnel with a body": b"CONNECT gateway:80 HTTP/1.1\r\nhost: gateway\r\n" + LENGTH + b"\r\n" + BODY,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}

OURS = {b"host", b"x-request-id", b"content-length"}
"""Headers that every request to an instance has."""


@pytest.mark.parametrize("piece", [0, 1], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("name", REFUSED)
def test_ambiguous_requests_are_refused(bed: Bed, name: str, piece: int) -> None:
    backend = bed.backend()
    client = bed.client()
    try:
        client.send(REFUSED[name] + SMUGGLED, piece=piece)
    except ConnectionError:
        assert piece
    answer = client.read_response()
    assert answer.status in (400, 405, 413, 501, 505), answer
    assert answer.error["type"] == ("server_error" if answer.status >= 500 else "invalid_request_error")
    assert client.is_closed()
    assert backend.received == []


@pytest.mark.parametrize("name", REFUSED)
def test_ambiguous_requests_behind_a_valid_one_are_refused(bed: Bed, name: str) -> None:
    backend = bed.backend()
    client = bed.client()
    client.send(chat() + REFUSED[name] + SMUGGLED)
    assert client.read_response().status == 200
    assert client.read_response().status in (400, 405, 413, 501, 505)
    assert client.is_closed()
    assert len(backend.received) == 1


ACCEPTED = {
    "a length": sized(SIZE),
    "a length with spaces around": sized(b"  " + SIZE + b" "),
    "a length with zeros before": sized(b"000" + SIZE),
    "chunks": chunked(ONE_CHUNK),
    "chunks with many zeros before their size": chunked(b"0" * 30 + ONE_CHUNK),
    "chunks in capitals": coded(b"TRANSFER-ENCODING: CHUNKED"),
    "chunks after a tab": coded(b"transfer-encoding:\tchunked"),
    "two spaces before the target": post(BODY, b" " + CHAT),
    "two spaces behind the target": post(BODY, CHAT + b" "),
    "a target with a host in it": post(BODY, b"http://elsewhere:99" + CHAT),
    "headers that look like lengths": HEAD
    + b"content_length: 0\r\ntransfer_encoding: chunked\r\n" + LENGTH + b"\r\n" + BODY,
    "headers for one connection": HEAD
    + b"connection: x-mine, close, Keep-Alive\r\nx-mine: 1\r\nkeep-alive: 5\r\nproxy-connection: keep-alive\r\n"
    + b"te: trailers\r\ntrailer: x\r\nproxy-authorization: Basic x\r\n" + LENGTH + b"\r\n" + BODY,
    "an offer to upgrade": HEAD
    + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAA\r\n" + LENGTH + b"\r\n" + BODY,
    "keys": HEAD + b"authorization: Bearer secret\r\nx-api-key: secret\r\n" + LENGTH + b"\r\n" + BODY,
    "where an engine should fetch from": HEAD
    + b"x-prefiller-host-port: 10.0.0.1:80\r\nx-encoder-hosts-ports: 10.0.0.1:80\r\n" + LENGTH + b"\r\n" + BODY,
    "trailers": chunked(ONE_CHUNK[:-2] + b"authorization: Bearer secret\r\nx-mine: 1\r\n\r\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_requests_are_rewritten(bed: Bed, name: str) -> None:
    """An unambiguous request is forwarded with one length and only the headers meant for instances."""
    backend = bed.backend()
    assert bed.fetch(ACCEPTED[name]).status == 200
    [request] = backend.received
    assert request.start == LINE[:-2]
    assert {known for known, _ in request.headers} == OURS
    assert request.header("host") == f"127.0.0.1:{backend.port}"
    assert request.header("content-length") == SIZE.decode()
    assert request.body == BODY


def test_other_headers_and_the_query_are_forwarded(bed: Bed) -> None:
    backend = bed.backend()
    sent = [
        "Accept: application/json", "user-agent: me/1", "X-Custom: a", "x-custom: b", "traceparent: 00-1-2-01",
        "cookie: a=b", "content-type: application/json", "x-empty:", "x-bytes: caf\xc3\xa9",
    ]  # fmt: skip
    assert bed.fetch(post(BODY, CHAT + b"?api-version=1&x=%20", headers=sent)).status == 200
    [request] = backend.received
    assert request.start == LINE[:-2].replace(CHAT, CHAT + b"?api-version=1&x=%20")
    assert {known: request.header(known.decode()) for known, _ in request.headers if known not in OURS} == {
        b"accept": "application/json",
        b"user-agent": "me/1",
        b"x-custom": "a, b",
        b"traceparent": "00-1-2-01",
        b"cookie": "a=b",
        b"content-type": "application/json",
        b"x-empty": "",
        b"x-bytes": "caf\xc3\xa9",
    }


@pytest.mark.parametrize(
    "session",
    ["x\r\nx-evil: 1", "x\r\n\r\n" + SMUGGLED.decode(), "x\ny", "x\ry", "x\x00y", "x\x7f"],
    ids=["a header", "a request", "LF", "CR", "NUL", "DEL"],
)
def test_a_body_cannot_smuggle_headers(bed: Bed, session: str) -> None:
    backend = bed.backend()
    answer = bed.fetch(chat(pointsman={"session": session}))
    assert answer.status == 400
    assert "session" in answer.error["message"]
    assert backend.received == []


@pytest.mark.parametrize("given", ["a\x01", "caf\xe9", "x" * 257, "", "a\tb"], ids=ascii)
def test_a_request_id_that_is_not_a_valid_header_is_refused(bed: Bed, given: str) -> None:
    backend = bed.backend()
    assert bed.fetch(chat(f"x-request-id: {given}")).status == 400
    assert backend.received == []


def test_an_incomplete_body_is_not_forwarded(bed: Bed) -> None:
    """A request is read completely before it is forwarded."""
    backend = bed.backend(answers(OK))
    client = bed.client()
    client.send(HEAD + b"content-length: 1000\r\n\r\n" + BODY)
    client.finish_writing()
    assert client.is_closed()
    assert backend.received == []
