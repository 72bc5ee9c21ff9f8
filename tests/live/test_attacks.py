"""One client may not take the others down: attacks on a real plane over real sockets.

During each, other clients are served, `/health` is answered, and memory and files of the plane stay bounded. A run with
`-s` prints the numbers.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

import pointsman as pm
from bench.chaos.faults import inject_fault
from bench.chaos.planes import LivePlane
from pointsman.gateway.grpc.server import SERVICE, PredictRequest
from tests.gateway.grpc.grpc_bed import refusal
from tests.live import pipeline_nodes as nodes
from tests.live.manifests import manifest, simulated
from tests.live.siege import KEY, KEYS, MIB, Siege, exchange, memory, statuses
from tests.live.test_gateway_processes import are_connected

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
UNUSED = b'{"model":"m","max_tokens":1,"messages":[],"x":['
"""The start of a request for a message."""
WITH_KEY = f"authorization: Bearer {KEY}"
BIG = 31 * MIB
"""Below the default limit of a body."""


@pytest.fixture(scope="module")
def plane(module_plane: LivePlane) -> LivePlane:
    """Two engines behind a gateway that needs keys; everything else has its default."""
    module_plane.up(manifest(simulated("m", 2), **KEYS))
    return module_plane


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def chat(**fields: Any) -> bytes:
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}
    ).encode()


# Descriptors


def test_idle_connections_of_strangers_cost_no_engine(tmp_path: Path) -> None:
    plane = LivePlane(tmp_path, open_files=1024)
    with ExitStack() as stack:
        stack.callback(plane.close)
        plane.up(manifest(simulated("m", 2), **KEYS))
        engines = plane.pids()
        with Siege(plane, "1,100 idle connections with 1,024 files").laid() as siege:
            strangers = [stack.enter_context(siege.connect()) for _ in range(1100)]
            asked = len(siege.load.samples)
            # Long enough for many probes, and for a dead engine to be noticed.
            plane.until(lambda: len(siege.load.samples) > asked + 60, "load goes on")
            answer = siege.send(siege.post(CHAT, chat(), WITH_KEY))
            assert statuses(answer) == [200], "a newcomer is served"
        siege.check(grown_mib=64, files=1024)
        assert plane.pids() == engines
        assert all(one["restarts"] == 0 for one in plane.instances().values())
        assert len(strangers) == 1100


# Memory


def test_bodies_without_a_key_are_not_read(plane: LivePlane) -> None:
    with Siege(plane, "20 x 31 MB without a key").laid() as siege, ThreadPoolExecutor(20) as pool:
        request = siege.post(CHAT, bytes(BIG))
        answers = list(pool.map(siege.send, [request] * 20))
    assert [statuses(answer) for answer in answers] == [[401]] * 20
    siege.check(grown_mib=64)


def test_bodies_of_unknown_paths_are_not_read(plane: LivePlane) -> None:
    with Siege(plane, "10 x 31 MB to unknown paths").laid() as siege, ThreadPoolExecutor(10) as pool:
        request = siege.post("/nowhere", bytes(BIG), WITH_KEY)
        answers = list(pool.map(siege.send, [request] * 10))
    assert [statuses(answer) for answer in answers] == [[404]] * 10
    siege.check(grown_mib=64)


def test_buffered_bytes_are_bounded_in_total_and_given_back(tmp_path: Path) -> None:
    plane = LivePlane(tmp_path)
    with ExitStack() as stack:
        stack.callback(plane.close)
        plane.up(manifest(simulated("m", 2), maxBufferedBytes=f"{64 * MIB}", **KEYS))
        with Siege(plane, "12 x 31 MB held with a key, 64 MiB allowed").laid() as siege, ThreadPoolExecutor(12) as pool:
            part = siege.post(CHAT, bytes(BIG), WITH_KEY)[:-1]  # the last byte never comes
            held = [stack.enter_context(siege.connect()) for _ in range(12)]
            answers = [pool.submit(exchange, one, part) for one in held]
            plane.until(lambda: sum(answer.done() for answer in answers) >= 10, "all but two are refused")
            asked = len(siege.load.samples)
            plane.until(lambda: len(siege.load.samples) > asked + 10, "others are served meanwhile")
            for one in held:
                with suppress(OSError):  # the plane has closed those that it refused
                    one.shutdown(socket.SHUT_RDWR)
        refused = [answer.result() for answer in answers if answer.result()]
        assert {status for answer in refused for status in statuses(answer)} == {503}
        assert all(b"\r\nretry-after: " in answer.lower() for answer in refused)
        siege.check(grown_mib=64 + 64)
        given_back = siege.before_bytes + 48 * MIB
        plane.until(lambda: memory(siege.pid, "VmRSS") < given_back, "memory is given back")


# gRPC


@pytest.fixture
def over_grpc(tmp_path: Path) -> Iterator[tuple[LivePlane, int]]:
    """A plane with few files that also listens for gRPC, and the port of that."""
    port = free_port()
    plane = LivePlane(tmp_path, open_files=1024)
    try:
        plane.up(manifest(simulated("m", 2), grpcListen=f"127.0.0.1:{port}", **KEYS))
        yield plane, port
    finally:
        plane.close()


def test_idle_connections_over_grpc_cost_no_engine(over_grpc: tuple[LivePlane, int]) -> None:
    plane, port = over_grpc
    engines = plane.pids()
    with ExitStack() as stack, Siege(plane, "1,100 idle connections over gRPC").laid() as siege:
        for _ in range(1100):
            stack.enter_context(socket.create_connection((siege.host, port), 20.0))
        asked = len(siege.load.samples)
        plane.until(lambda: len(siege.load.samples) > asked + 60, "load goes on")
    siege.check(grown_mib=64, files=1024 - 64)
    assert plane.pids() == engines
    assert plane.status()["problems"] == []


def test_messages_over_grpc_without_a_key_are_not_read(over_grpc: tuple[LivePlane, int]) -> None:
    plane, port = over_grpc
    message = PredictRequest(application="a", json=" " * BIG).SerializeToString()

    def send(_: int) -> str:
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            return refusal(lambda: channel.unary_unary(f"/{SERVICE}/Predict")(message, timeout=60)).code

    with Siege(plane, "20 x 31 MB over gRPC without a key").laid() as siege, ThreadPoolExecutor(20) as pool:
        codes = list(pool.map(send, range(20)))
    assert set(codes) == {"UNAUTHENTICATED"}
    siege.check(grown_mib=64)


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


@pytest.mark.parametrize("key", [WITH_KEY, "x-no-key: 1"], ids=["with a key", "without a key"])
def test_bodies_of_tiny_chunks_are_refused(plane: LivePlane, key: str) -> None:
    with Siege(plane, "4 x 5 MB in chunks of a byte").laid() as siege, ThreadPoolExecutor(4) as pool:
        head = siege.post(CHAT, b"", key).replace(b"content-length: 0", b"transfer-encoding: chunked")
        request = head + b"1\r\n \r\n" * (5 * MIB) + b"0\r\n\r\n"
        answers = list(pool.map(siege.send, [request] * 4))
    assert {tuple(statuses(answer)) for answer in answers} == {(413,) if key == WITH_KEY else (401,)}
    siege.check(grown_mib=64)


def test_many_headers_are_refused(plane: LivePlane) -> None:
    with Siege(plane, "7,000 headers, 50 times").laid() as siege:
        request = siege.post(CHAT, chat(), WITH_KEY, *[f"a{number}:" for number in range(7_000)])
        assert len(request) < 64 * 1024 + 200
        answers = [siege.send(request) for _ in range(50)]
    assert {tuple(statuses(answer)) for answer in answers} == {(431,)}
    siege.check(grown_mib=32)


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


# Large JSON


def filled(element: bytes, size: int, start: bytes = b'{"model":"m","messages":[', end: bytes = b"]}") -> bytes:
    """A body of about this size, of many equal elements."""
    return start + b",".join([element] * (size // (len(element) + 1))) + end


LARGE_JSON: Mapping[str, Callable[[int], tuple[bytes, int]]] = {
    "one string": lambda size: (chat(messages=[{"role": "user", "content": "x" * size}]), 400),
    "lists": lambda size: (filled(b"[]", size), 413),
    "mappings": lambda size: (filled(b'{"a":{}}', size), 413),
    "messages": lambda size: (filled(b'{"role":"user","content":"hi"}', size), 413),
    "numbers": lambda size: (filled(b"1", size), 413),
    "fields": lambda size: (filled(b'"a":1', size, b'{"model":"m",', b"}"), 413),
    "blanks": lambda size: (b" " * size + chat(), 413),
    "lists in lists": lambda size: (b'{"model":"m","messages":' + b"[" * size, 413),
    "quotation marks": lambda size: (filled(b'""', size), 413),
}
"""Bodies, and how they are answered if they are large. One string is read, and too long for the engine."""


@pytest.mark.parametrize("what", LARGE_JSON)
def test_large_json_disturbs_no_client(plane: LivePlane, what: str) -> None:
    body, status = LARGE_JSON[what](BIG)
    with Siege(plane, f"6 x 31 MB of JSON: {what}").laid() as siege, ThreadPoolExecutor(6) as pool:
        request = siege.post(CHAT, body, WITH_KEY)
        answers = list(pool.map(lambda one: siege.send(one, 60.0), [request] * 6))
    assert [statuses(answer) for answer in answers] == [[status]] * 6
    siege.check(grown_mib=6 * 31 * 2 + 64)


# A hundred at once


def hundred(plane: LivePlane, name: str, request: Callable[[Siege], bytes], *expected: int) -> None:
    """Send a request on each of 100 connections, the last byte of all of them at the same time."""
    with Siege(plane, f"100 x {name}").laid() as siege, ThreadPoolExecutor(100) as pool:
        sent, gate = request(siege), threading.Barrier(100)

        def send(_: int) -> list[int]:
            with siege.connect(60.0) as connection:
                with suppress(OSError):  # it is refused before all is sent
                    connection.sendall(sent[:-1])
                gate.wait()
                return statuses(exchange(connection, sent[-1:]))

        answers = list(pool.map(send, range(100)))
    assert {status for answer in answers for status in answer} == set(expected)
    siege.check(grown_mib=100 * 2 * len(sent) / MIB + 64, files=800)


def pages(path: str, count: int) -> Callable[[Siege], bytes]:
    def request(siege: Siege) -> bytes:
        one = f"GET {path} HTTP/1.1\r\nhost: {siege.host}:{siege.port}\r\n{WITH_KEY}\r\n"
        return f"{one}\r\n".encode() * (count - 1) + f"{one}connection: close\r\n\r\n".encode()

    return request


NEARLY_LARGE = 900_000
"""Such bodies are parsed without being counted, unless they may have to be translated."""
HUNDREDS: Mapping[str, tuple[Callable[[Siege], bytes], int]] = {
    "20 pipelined GET /metrics": (pages("/metrics", 20), 200),
    "20 pipelined GET /v1/models/unknown": (pages("/v1/models/nn", 20), 404),
    "900 kB of numbers": (lambda siege: siege.post(CHAT, filled(b"1", NEARLY_LARGE), WITH_KEY), 400),
    "900 kB of mappings": (lambda siege: siege.post(CHAT, filled(b'{"a":{}}', NEARLY_LARGE), WITH_KEY), 400),
    "2 MB of mappings": (lambda siege: siege.post(CHAT, filled(b'{"a":{}}', 2 * MIB), WITH_KEY), 413),
    "900 kB of mappings beside messages": (
        lambda siege: siege.post(MESSAGES, filled(b'{"a":{}}', NEARLY_LARGE, UNUSED), WITH_KEY),
        413,
    ),
    "900 kB of tools": (
        lambda siege: siege.post(MESSAGES, filled(b"{}", NEARLY_LARGE, UNUSED.replace(b'"x"', b'"tools"')), WITH_KEY),
        413,
    ),
    "a session of 1 MB": (lambda siege: siege.post(CHAT, chat(pointsman={"session": "x" * MIB}), WITH_KEY), 400),
    "2 MB without a key": (lambda siege: siege.post(CHAT, bytes(2 * MIB)), 401),
}


@pytest.mark.parametrize("name", HUNDREDS)
def test_a_hundred_hostile_connections_disturb_no_client(plane: LivePlane, name: str) -> None:
    request, status = HUNDREDS[name]
    hundred(plane, name, request, status)


def test_attacks_on_two_gateway_processes(tmp_path: Path) -> None:
    plane = LivePlane(tmp_path)
    with ExitStack() as stack:
        stack.callback(plane.close)
        idle = [{**simulated(f"idle-{number}", 0), "lifecycle": {}} for number in range(100)]
        plane.up(manifest(simulated("m", 2), *idle, processes=2, listen=f"127.0.0.1:{free_port()}", **KEYS))
        plane.until(lambda: are_connected(plane), "both gateways listen")
        for name, (request, status) in HUNDREDS.items():
            hundred(plane, f"{name}, two processes", request, status)


# Decoders


def array(dtype: str) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(2, msgspec.msgpack.encode([dtype, [1], b"\0" * 8]))


ARGUMENTS: Mapping[str, Callable[[], Any]] = {
    "a type that numpy cannot parse": lambda: array("(1,,2)i4"),
    "a type of a million fields": lambda: array("i4," * 1_000_000),
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


NUMBER = b"1.2345678901234567"
INPUTS: Mapping[str, tuple[bytes, int, int]] = {
    "98,000 lists": (b"[]", 49_000, 413),
    "98,000 mappings": (b'{"a":1}', 49_000, 413),
    "980,000 numbers": (NUMBER, 490_000, 413),
    "19,600 mappings": (b'{"a":1}', 9_800, 500),
    "290,000 numbers": (NUMBER, 145_000, 500),
}
"""Elements, how many of them are in each of two lists, and how they are answered. What is read is nothing that the
nodes of this application can use."""


@pytest.mark.parametrize("name", INPUTS)
def test_many_values_as_the_input_of_an_application(plane: LivePlane, application: str, name: str) -> None:
    element, count, status = INPUTS[name]
    part = b"[%b]" % b",".join([element] * count)
    with Siege(plane, f"10 x {name} as an input").laid() as siege, ThreadPoolExecutor(10) as pool:
        request = siege.post(application, b"[%b,%b,1]" % (part, part), WITH_KEY)
        answers = list(pool.map(lambda one: siege.send(one, 60.0), [request] * 10))
    assert {tuple(statuses(answer)) for answer in answers} == {(status,)}
    siege.check(grown_mib=10 * 2 * len(request) / MIB + 64)


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


class TinyChunks(BaseHTTPRequestHandler):
    """Passes probes, and answers with streams of many events, a byte in each chunk."""

    protocol_version = "HTTP/1.1"
    payload = b'data: {"choices": []}\n\n' * 40_000 + b"data: [DONE]\n\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in payload) + b"0\r\n\r\n"

    def do_GET(self) -> None:
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": "hm"}}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        if b'"stream": true' not in self.rfile.read(int(self.headers["content-length"])):
            self.do_GET()  # a probe
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(self.chunks)

    def log_message(self, *args: object) -> None: ...


def test_an_engine_that_answers_in_tiny_chunks_disturbs_no_client(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), TinyChunks))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        plane = LivePlane(tmp_path)
        stack.callback(plane.close)
        url = f"http://127.0.0.1:{server.server_port}"
        plane.up(manifest(simulated("m", 2), {"name": "tiny", "model": "tiny", "endpoints": [{"url": url}]}, **KEYS))
        with Siege(plane, "3 answers of 6 MB in chunks of a byte").laid() as siege, ThreadPoolExecutor(3) as pool:
            request = siege.post(CHAT, chat(model="tiny", stream=True), WITH_KEY)
            answers = list(pool.map(lambda one: siege.send(one, 60.0), [request] * 3))
        assert [answer.count(b"data: {") for answer in answers] == [40_000] * 3
        assert all(b"data: [DONE]" in answer for answer in answers)
        siege.check(grown_mib=64)
