"""What a stranger may not reach or learn, on a real plane: other protocols, foreign hosts and pages, and headers."""

import json
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import pointsman as pm
from bench.chaos.planes import LivePlane
from tests.live import pipeline_nodes as nodes
from tests.live.manifests import manifest, simulated
from tests.live.siege import KEY, KEYS, Siege, statuses

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()


@pytest.fixture(scope="module")
def plane(module_plane: LivePlane) -> LivePlane:
    """One engine behind a gateway without keys; everything has its default."""
    module_plane.up(manifest(simulated("m", 1)))
    return module_plane


def status_of(plane: LivePlane, path: str, *headers: str, body: bytes = b"", version: str = "HTTP/1.1") -> int:
    """The status of one request. `headers` has the host, unless it is that of the gateway."""
    siege = Siege(plane, "")
    lines = (
        [*headers]
        if any(one.startswith("host:") for one in headers)
        else [f"host: {siege.host}:{siege.port}", *headers]
    )
    start = f"{'POST' if body else 'GET'} {path} {version}"
    framing = [f"content-length: {len(body)}", "connection: close", "", ""]
    answer = siege.send("\r\n".join([start, *lines, *framing]).encode() + body)
    [status] = statuses(answer)
    return status


@pytest.mark.parametrize("version", ["RTSP/1.0", "RTSP/1.1", "ICE/1.0", "ICE/1.1", "http/1.1", "HTTPS/1.1"])
def test_other_protocols_are_refused(plane: LivePlane, version: str) -> None:
    assert status_of(plane, "/health", version=version) in (400, 505)
    assert status_of(plane, CHAT, body=BODY, version=version) in (400, 505)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example"]
)
def test_a_name_that_leads_here_does_not_open_a_gateway_without_keys(plane: LivePlane, host: str) -> None:
    """DNS rebinding: a page's own name resolves to this machine, so the browser lets the page read the answer."""
    assert status_of(plane, CHAT, f"host: {host}", body=BODY) == 403
    assert status_of(plane, "/v1/models", f"host: {host}") == 403


@pytest.mark.parametrize("host", ["", "a b", "a/b", "a@b", "a:b", "[::1", "a,b", "x" * 300])
def test_hosts_that_are_not_valid_are_refused(plane: LivePlane, host: str) -> None:
    assert status_of(plane, CHAT, f"host: {host}", body=BODY) in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "localhost:1234", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_names_of_this_machine_are_known(plane: LivePlane, host: str) -> None:
    assert status_of(plane, CHAT, f"host: {host}", body=BODY) == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost.evil.example", "null", "nonsense"])
def test_a_foreign_page_cannot_use_a_gateway_without_keys(plane: LivePlane, origin: str) -> None:
    """A POST of text/plain needs no preflight, so the browser sends it."""
    assert status_of(plane, CHAT, f"origin: {origin}", "content-type: text/plain", body=BODY) == 403


def test_a_page_of_this_machine_can_use_the_gateway(plane: LivePlane) -> None:
    assert status_of(plane, CHAT, "origin: http://localhost:3000", body=BODY) == 200


def test_allowed_hosts_and_pages_that_need_a_key(tmp_path: Path) -> None:
    plane = LivePlane(tmp_path)
    try:
        plane.up(manifest(simulated("m", 1), allowedHosts=["gpu.example"]))
        assert status_of(plane, CHAT, "host: gpu.example", body=BODY) == 200
        assert status_of(plane, CHAT, "origin: https://gpu.example", body=BODY) == 200
        assert status_of(plane, CHAT, "host: evil.example", body=BODY) == 403
        assert status_of(plane, "/metrics") == 200
        text = pm.build(nodes.diamond(), name="diamond", folder=plane.folder).to_yaml()
        plane.admin.post("applications", body={"text": text, "folder": str(plane.folder)})
        assert status_of(plane, "/diamond/openapi.json") == 200
        plane.write(manifest(simulated("m", 1), publicPages=False, **KEYS))
        assert plane.pointsman("apply", plane.folder / "manifest.yaml").returncode == 0
        for page in ("/metrics", "/diamond/openapi.json"):
            assert status_of(plane, page) == 401
            assert status_of(plane, page, f"authorization: Bearer {KEY}") == 200
        assert status_of(plane, "/v1/models") == 401
        assert status_of(plane, "/health") == 200
    finally:
        plane.close()


# Headers to engines


@pytest.fixture
def recorder() -> Iterator[tuple[str, list[bytes]]]:
    """An engine outside of the plane: its URL, and the heads of the requests it got."""
    heads: list[bytes] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connected, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connected,)).start()

    def answer(connected: socket.socket) -> None:
        with connected:
            received = b""
            while part := connected.recv(65_536):
                received += part
                head, end, body = received.partition(b"\r\n\r\n")
                length = next(
                    (line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b"0"
                )
                if end and len(body) >= int(length):
                    heads.append(head)
                    received = b""
                    choice = {
                        "index": 0,
                        "text": "a",
                        "message": {"role": "assistant", "content": "a"},
                        "finish_reason": "stop",
                    }
                    data = json.dumps({"choices": [choice], "data": [{"id": "m"}], "usage": {}}).encode()
                    connected.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))

    accepting = threading.Thread(target=serve)
    accepting.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}", heads
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    accepting.join()


def test_headers_for_the_gateway_do_not_reach_engines(tmp_path: Path, recorder: tuple[str, list[bytes]]) -> None:
    url, heads = recorder
    plane = LivePlane(tmp_path)
    try:
        plane.up(manifest({"name": "m", "model": "m", "endpoints": [{"url": url}]}, **KEYS))
        mine = ["x-pointsman-tenant: other", "x-pointsman-secret: guessed", "x-pointsman-session: s", "x-mine: 1"]
        assert status_of(plane, CHAT, f"authorization: Bearer {KEY}", *mine, body=BODY) == 200
        [head] = [one.lower() for one in heads if b"x-mine: 1" in one]
        assert b"x-pointsman-" not in head
        assert b"authorization" not in head
        assert KEY.encode() not in head
    finally:
        plane.close()


# Files


def test_the_files_of_a_plane_are_for_its_owner_only(plane: LivePlane) -> None:
    status_of(plane, CHAT, body=BODY)
    assert stat.S_IMODE(plane.state.stat().st_mode) == 0o700  # so other users reach no file in it
    for name in ("admin.sock", "supervisor.sock", "secret"):
        assert stat.S_IMODE((plane.state / name).stat().st_mode) == 0o600
