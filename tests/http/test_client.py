"""Requests to real servers with every kind of response."""

import asyncio
import errno
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pointsman.control.desired import Address
from pointsman.http import pool as pool_module
from pointsman.http.client import AHEAD_BYTES, HttpClient, HttpResponse, NoResponse, fetch
from pointsman.http.pool import SHORTAGES, UnixSocket, descriptors_left, local_cause
from tests.runtimes.local.planes import run
from tests.shortages import no_descriptors

PLAIN = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


class Server:
    """Sends the same bytes in response to every request head, and records the heads."""

    def __init__(self, answer: bytes, *, closes: bool = False) -> None:
        self.answer, self.closes = answer, closes
        self.heads: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while head := await reader.read(65536):
            self.heads.append(head)
            writer.write(self.answer)
            if self.closes:
                break
        writer.close()


@asynccontextmanager
async def serving(server: Server, tls: ssl.SSLContext | None = None) -> AsyncIterator[Address]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield Address("127.0.0.1", listening.sockets[0].getsockname()[1], tls is not None)
    finally:
        listening.close()


ANSWERS = [
    (PLAIN, False, HttpResponse(200, b"hello")),
    (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", False, HttpResponse(503, b"")),
    (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", False, HttpResponse(200, b"ab")),
    (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", True, HttpResponse(200, b"until the end")),
    (b"HTTP/1.0 200 OK\r\n\r\nold", True, HttpResponse(200, b"old")),
    (b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, False, HttpResponse(200, b"hello")),
    (b"HTTP/1.1 204 Nothing\r\n\r\n", False, HttpResponse(204, b"")),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "closes", "expected"), ANSWERS, ids=lambda value: str(value)[:40])
def test_responses_with_any_framing_are_read(sent: bytes, closes: bool, expected: HttpResponse) -> None:
    async def main() -> None:
        server = Server(sent, closes=closes)
        async with serving(server) as address:
            assert await fetch(address, "POST", "/v1/x", b"{}", timeout_s=5.0) == expected
        [head] = server.heads
        assert head.startswith(b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:%d\r\n" % address.port)
        assert head.endswith(b"content-type: application/json\r\ncontent-length: 2\r\n\r\n{}")

    run(main())


NO_ANSWERS = [
    (b"", True, "closed the connection without an answer"),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nshort", True, "closed the connection in the middle"),
    (b"\x00\xff this is not HTTP\r\n\r\n", False, "something that is not HTTP"),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel", False, "no answer to GET / within 0.2 s"),
]


@pytest.mark.parametrize(("sent", "closes", "why"), NO_ANSWERS, ids=lambda value: str(value)[:40])
def test_failed_requests_say_why(sent: bytes, closes: bool, why: str) -> None:
    async def main() -> None:
        async with serving(Server(sent, closes=closes)) as address:
            with pytest.raises(NoResponse, match=why):
                await fetch(address, "GET", "/", timeout_s=0.2)

    run(main())


def test_a_server_that_does_not_listen() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def main() -> None:
        with pytest.raises(NoResponse, match="connection refused"):
            await fetch(Address("127.0.0.1", port, False), "GET", "/", timeout_s=5.0)
        with pytest.raises(NoResponse):
            await fetch(Address("no-such-host.invalid", port, False), "GET", "/", timeout_s=5.0)

    run(main())


def test_a_response_without_end_times_out() -> None:
    async def main() -> None:
        async with serving(Server(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000)) as address:
            with pytest.raises(NoResponse, match="longer than 1000 bytes"):
                await fetch(address, "GET", "/", timeout_s=5.0, max_bytes=1000)

    run(main())


def test_a_connection_is_kept_and_replaced_when_the_server_has_closed_it() -> None:
    async def main() -> None:
        server = Server(PLAIN)
        async with serving(server) as address:
            client = HttpClient(address)
            for _ in range(3):
                assert (await client.fetch("GET", "/", timeout_s=5.0)).status == 200
            assert server.connections == 1
            server.closes = True
            for _ in range(3):
                assert (await client.fetch("GET", "/", timeout_s=5.0)).status == 200
            assert server.connections > 1
            client.close()

    run(main())


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("makes a certificate with openssl, and there is none")
    both = tmp_path / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", both, "-out", tmp_path / "cert.pem"], check=True, capture_output=True)
    both.write_text(both.read_text() + (tmp_path / "cert.pem").read_text())
    return both


def test_tls_needs_a_certificate_that_the_system_trusts(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    async def main(trusted: bool) -> None:
        pool_module._tls.cache_clear()
        async with serving(Server(PLAIN), context) as address:
            if trusted:
                assert await fetch(address, "GET", "/", timeout_s=5.0) == HttpResponse(200, b"hello")
            else:
                with pytest.raises(NoResponse, match="its certificate is not trusted: self"):
                    await fetch(address, "GET", "/", timeout_s=5.0)

    run(main(trusted=False))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_name("cert.pem")))
    run(main(trusted=True))
    pool_module._tls.cache_clear()


def test_pieces_are_read_as_they_arrive_and_the_connection_is_reused(tmp_path: Path) -> None:
    """Over a unix socket whose path exceeds the system's limit."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    go_on = asyncio.Event()
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await reader.read(65536):
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
            await go_on.wait()
            writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
        writer.close()

    async def main() -> None:
        with pool_module.short_path(folder / "socket") as path:
            listening = await asyncio.start_unix_server(serve, path)
        client = HttpClient(UnixSocket(folder / "socket"))
        for _ in range(2):
            go_on.clear()
            async with client.stream("POST", "/", b"{}") as response:
                pieces = response.pieces()
                assert await anext(pieces) == b"one"
                go_on.set()
                assert [piece async for piece in pieces] == [b"two"]
        assert connections == 1
        go_on.clear()
        async with client.stream("POST", "/", b"{}") as response:
            assert response.status == 200  # leaving the block closes the connection
        go_on.set()
        assert (await client.fetch("GET", "/", timeout_s=5.0)).body == b"onetwo"
        assert connections == 2
        client.close()
        listening.close()

    run(main())


def test_a_truncated_response_raises_after_its_pieces() -> None:
    async def main() -> None:
        sent = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n"
        async with serving(Server(sent, closes=True)) as address:
            client = HttpClient(address)
            pieces = []
            with pytest.raises(NoResponse) as caught:
                async with client.stream("GET", "/") as response:
                    pieces += [piece async for piece in response.pieces()]
            assert caught.value.began
            client.close()

    run(main())


def test_a_response_that_is_read_slowly_pauses_the_server() -> None:
    size = 8 * AHEAD_BYTES

    async def main() -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
        async with serving(Server(head + b"x" * size)) as address:
            client = HttpClient(address)
            async with client.stream("GET", "/") as response:
                await asyncio.sleep(0.1)
                assert sum(map(len, response._pieces)) < size // 2
                assert len(await response.read()) == size
            client.close()

    run(main())


# Failures of this side


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.EMFILE, "too many open files"), "files"),
        (OSError(errno.ENFILE, "too many open files in system"), "files-of-machine"),
        (OSError(errno.ENOMEM, "out of memory"), "memory"),
        (OSError(errno.ENOBUFS, "no buffer space"), "memory"),
        (OSError(errno.EADDRNOTAVAIL, "cannot assign requested address"), "ports"),
        (OSError(errno.EACCES, "permission denied"), "permission"),
        (OSError(errno.EAFNOSUPPORT, "address family not supported"), "protocol"),
        (socket.gaierror(socket.EAI_AGAIN, "temporary failure in name resolution"), "names"),
        (socket.gaierror(socket.EAI_NONAME, "name or service not known"), ""),
        (ssl.SSLError(1, "an error of TLS whose number is that of EPERM"), ""),
        (ssl.SSLCertVerificationError(1, "self-signed"), ""),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), ""),
        (ConnectionResetError(errno.ECONNRESET, "reset"), ""),
        (OSError(errno.EHOSTUNREACH, "no route"), ""),
        (OSError(errno.ENETUNREACH, "no route"), ""),
        (TimeoutError("no connection within 2 s"), ""),
        (OSError("multiple exceptions"), ""),
        (None, ""),
    ],
)
def test_a_failure_of_this_side_is_distinguished_from_one_of_the_server(error: OSError | None, cause: str) -> None:
    assert local_cause(error) == cause


def test_a_server_is_not_to_blame_for_certificates_that_could_not_be_read() -> None:
    error = ssl.SSLCertVerificationError(1, "unable to get local issuer certificate")
    with no_descriptors():
        assert local_cause(error) == "files"
    assert local_cause(error) == ""


def test_a_refused_open_connection_is_not_short_of_ports() -> None:
    assert local_cause(OSError(errno.EACCES, "not executable"), SHORTAGES) == ""


def test_what_can_be_opened_is_counted_without_a_leak() -> None:
    assert descriptors_left(50)
    with no_descriptors():
        assert not descriptors_left()
    assert descriptors_left(50)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_without_descriptors_the_server_is_not_to_blame(host: str) -> None:
    async def story() -> None:
        async with serving(Server(PLAIN)) as address:
            where = address._replace(host=host)
            with no_descriptors(), pytest.raises(NoResponse) as short:
                await fetch(where, "GET", "/", timeout_s=5.0)
            assert (await fetch(where, "GET", "/", timeout_s=5.0)).status == 200
        with pytest.raises(NoResponse) as gone:
            await fetch(where, "GET", "/", timeout_s=5.0)
        assert (short.value.local, gone.value.local) == ("files", "")

    run(story())
