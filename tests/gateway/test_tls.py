"""TLS for clients, and to instances that use HTTPS."""

import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from pointsman.http import pool as pool_module
from tests.gateway.backends import DONE, OK, Backend, answers, event, hangs, stream
from tests.gateway.bed import Bed, MakeBed
from tests.gateway.wire import CHAT, HEALTH, Client, chat, wait_for

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="a certificate is made with openssl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for this machine, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    return certificate, key


@pytest.fixture
def guarded(make_bed: MakeBed, certificate: tuple[Path, Path]) -> Bed:
    """A gateway with HTTPS."""
    files = {"certFile": str(certificate[0]), "keyFile": str(certificate[1])}
    return make_bed({"tls": files, "limits": {"maxBodyBytes": 1000, "headerTimeout": "1s"}})


def connected(bed: Bed, certificate: tuple[Path, Path]) -> Client:
    context = ssl.create_default_context(cafile=str(certificate[0]))
    context.set_alpn_protocols(["h2", "http/1.1"])
    raw = socket.create_connection(bed.address)
    client = Client(context.wrap_socket(raw, server_hostname="127.0.0.1"))
    bed._clients.append(client)
    return client


def test_clients_connect_over_tls(guarded: Bed, certificate: tuple[Path, Path]) -> None:
    guarded.backend(answers(OK, stream(event(0), DONE)))
    assert guarded.listeners.url.startswith("https://127.0.0.1:")
    client = connected(guarded, certificate)
    assert isinstance(client.socket, ssl.SSLSocket)
    assert client.socket.selected_alpn_protocol() == "http/1.1"
    assert client.fetch(chat()).status == 200
    assert client.fetch(chat(stream=True)).events()[-1] == DONE[:-2]
    client.send(HEALTH * 5)
    assert [client.read_response().status for _ in range(5)] == [200] * 5
    assert client.stays_open()


def test_a_refusal_over_tls_is_readable(guarded: Bed, certificate: tuple[Path, Path]) -> None:
    for sent, status in (
        (b"NONSENSE\r\n\r\n", 400),
        (b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n" % CHAT, 413),
    ):
        client = connected(guarded, certificate)
        client.send(sent)
        assert client.read_response().status == status
        assert client.is_closed()


def test_plain_http_on_a_tls_port(guarded: Bed, certificate: tuple[Path, Path]) -> None:
    client = guarded.client()
    client.send(HEALTH)
    client.rest()
    assert connected(guarded, certificate).fetch(HEALTH).status == 200


def test_a_tls_client_disconnects(guarded: Bed, certificate: tuple[Path, Path]) -> None:
    backend = guarded.backend(hangs())
    client = connected(guarded, certificate)
    client.send(chat())
    wait_for(lambda: backend.received)
    client.close()
    wait_for(backend.all_closed, "the instance must hear of it")


def test_an_unfinished_handshake_blocks_nothing(guarded: Bed, certificate: tuple[Path, Path]) -> None:
    silent = [guarded.client() for _ in range(5)]
    assert connected(guarded, certificate).fetch(HEALTH).status == 200
    for client in silent:
        client.close()


@pytest.fixture(autouse=True)
def _fresh_trust() -> None:
    """Trusted certificates are read once per process; reset them."""
    pool_module._tls.cache_clear()


def secret(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


def test_instances_are_reached_over_tls(
    bed: Bed, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    backend = Backend([answers(OK, stream(event(0), DONE))], secret(certificate))
    bed.backends.append(backend)
    bed.admit(backend.port, tls=True)
    client = bed.client()
    assert client.fetch(chat()).status == 200
    assert client.fetch(chat(stream=True)).events()[-1] == DONE[:-2]
    assert len(backend.connections) == 1


def test_an_instance_with_an_untrusted_certificate_gets_no_request(bed: Bed, certificate: tuple[Path, Path]) -> None:
    backend = Backend([answers(OK)], secret(certificate))
    bed.backends.append(backend)
    bed.admit(backend.port, tls=True)
    got = bed.fetch(chat())
    assert got.status == 502
    assert "certificate" in got.error["message"]
    assert backend.received == []
