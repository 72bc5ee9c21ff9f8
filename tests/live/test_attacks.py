"""One client may not take the others down: attacks on a real plane over real sockets.

During each, other clients are served, `/health` is answered, and memory and files of the plane stay bounded. A run with
`-s` prints the numbers.
"""

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pointsman as pm
from bench.chaos.faults import inject_fault
from bench.chaos.planes import LivePlane
from tests.live import pipeline_nodes as nodes
from tests.live.manifests import manifest, simulated
from tests.live.siege import KEY, KEYS, MIB, Siege, exchange, statuses

CHAT = "/v1/chat/completions"
WITH_KEY = f"authorization: Bearer {KEY}"
BIG = 31 * MIB
"""Below the default limit of a body."""


@pytest.fixture(scope="module")
def plane(module_plane: LivePlane) -> LivePlane:
    """Two engines behind a gateway that needs keys; everything else has its default."""
    module_plane.up(manifest(simulated("m", 2), **KEYS))
    return module_plane


def chat(**fields: Any) -> bytes:
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}
    ).encode()


# Names


@pytest.mark.parametrize("field", ["model", "session", "tenant", "cache_salt"])
def test_long_names_in_bodies_are_refused(plane: LivePlane, field: str) -> None:
    name = "x" * (BIG if field == "model" else MIB)
    fields = {field: name} if field in ("model", "cache_salt") else {"pointsman": {field: name}}
    times = 2 if field == "model" else 20
    with Siege(plane, f"{field} of {len(name):,} characters, {times} times").laid() as siege:
        request = siege.post(CHAT, chat(**fields), WITH_KEY)
        answers = [siege.send(request) for _ in range(times)]
    assert {status for answer in answers for status in statuses(answer)} == {400}
    assert all(len(answer) < 2000 for answer in answers), "an error does not repeat the name"
    siege.check(grown_mib=5 * len(request) / MIB + 32)


@pytest.mark.parametrize("header", ["x-request-id", "x-pointsman-session", "x-pointsman-tenant", "x-session-id"])
def test_long_names_in_headers_are_refused(plane: LivePlane, header: str) -> None:
    with Siege(plane, f"{header} of 60,000 characters, 200 times").laid() as siege:
        request = siege.post(CHAT, chat(), WITH_KEY, f"{header}: {'x' * 60_000}")
        answers = [siege.send(request) for _ in range(200)]
    assert {status for answer in answers for status in statuses(answer)} == {400}
    siege.check(grown_mib=32)


# Many small things


def test_pipelined_pages_wait_their_turn(tmp_path: Path) -> None:
    """With many models, `/metrics` is long; all its requests arrive in one write."""
    plane = LivePlane(tmp_path)
    with ExitStack() as stack:
        stack.callback(plane.close)
        idle = [{**simulated(f"idle-{number}", 0), "lifecycle": {}} for number in range(300)]
        plane.up(manifest(simulated("m", 2), *idle, **KEYS))
        for path, lines in (("/metrics", ""), ("/v1/models", f"{WITH_KEY}\r\n"), ("/health", "")):
            with Siege(plane, f"500 pipelined GET {path} with 301 models").laid() as siege:
                one = f"GET {path} HTTP/1.1\r\nhost: {siege.host}:{siege.port}\r\n{lines}"
                requests = f"{one}\r\n".encode() * 499 + f"{one}connection: close\r\n\r\n".encode()
                answer = siege.send(requests, timeout_s=120.0)
            assert statuses(answer) == [200] * 500
            siege.check(grown_mib=64)


def test_heads_and_bodies_byte_by_byte_disturb_no_client(plane: LivePlane) -> None:
    with Siege(plane, "20 requests byte by byte").laid() as siege, ThreadPoolExecutor(20) as pool:

        def send(_: int) -> list[int]:
            with siege.connect() as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for byte in (request := siege.post(CHAT, chat(), WITH_KEY))[:-1]:
                    connection.sendall(bytes([byte]))
                return statuses(exchange(connection, request[-1:]))

        assert list(pool.map(send, range(20))) == [[200]] * 20
    siege.check(grown_mib=32)


# Decoders


def array(dtype: str) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(2, msgspec.msgpack.encode([dtype, [1], b"\0" * 8]))


ARGUMENTS: Mapping[str, Callable[[], Any]] = {
    "objects": lambda: array("O"),
    "lists in lists": lambda: msgspec.Raw(b"\x91" * 100_000 + b"\xc0"),
}


@pytest.fixture(scope="module")
def application(plane: LivePlane) -> Iterator[str]:
    text = pm.build(nodes.diamond(), name="diamond", folder=plane.folder).to_yaml()
    plane.admin.post("applications", body={"text": text, "folder": str(plane.folder)})
    plane.until(plane.is_settled, "the application is ready")
    yield "/diamond"
    plane.admin.delete("applications", "diamond")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_in_binary_that_cannot_be_read_are_refused(plane: LivePlane, application: str, name: str) -> None:
    body = b"\0" + msgspec.msgpack.encode({"args": [ARGUMENTS[name]()], "kwargs": {}})
    with Siege(plane, f"10 x {name}").laid() as siege:
        request = siege.post(application, body, WITH_KEY, "content-type: application/x-pointsman-arguments")
        answers = [siege.send(request) for _ in range(10)]
    assert {tuple(statuses(answer)) for answer in answers} == {(400,)}
    siege.check(grown_mib=64)


# Engines


def test_a_dripping_engine_holds_no_client(tmp_path: Path) -> None:
    plane = LivePlane(tmp_path)
    with ExitStack() as stack:
        stack.callback(plane.close)
        slow = simulated("slow", 1)
        upstream = {"firstTokenTimeout": "1s", "stallTimeout": "1s", "maxTries": 1}
        plane.up(manifest(simulated("m", 2), slow, upstream=upstream, **KEYS))
        for after, expected in ((0, b"502"), (2, b"stream_interrupted")):
            url = plane.instances("slow")["slow-1"]["url"]
            inject_fault(url, {"fault": "drip", "delayMs": 300, "afterTokens": after, "count": 1})
            with Siege(plane, f"a byte every 300 ms after {after} tokens").laid() as siege:
                answer = siege.send(siege.post(CHAT, chat(model="slow", stream=True, max_tokens=9), WITH_KEY))
            assert expected in answer, answer
            siege.check(grown_mib=32)
