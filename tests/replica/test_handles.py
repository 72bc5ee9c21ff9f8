"""Code of a replica calls other nodes and models over a unix socket, with the context of its own call."""

import json
import socketserver
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from pointsman.pipeline.graph import CALL
from pointsman.wire import (
    BlobAt,
    CallHead,
    SharedBuffers,
    arguments,
    decode_call,
    encode_call,
    encode_value,
    placeholder_of_handle,
    read_template,
    template,
)
from tests.replica.replicas import SECRET, Replica, replica, until

CODE = """
import asyncio, threading
import pointsman as pm

class Router:
    def __init__(self, cheap, nested, llm=None):
        self.cheap, self.other, self.llm = cheap, nested["deep"][0], llm
        self.failed = None
    async def both(self, x): return [await self.cheap.add(x, y=(1,)), await self.other(x)]
    async def at_once(self, n):
        return await asyncio.gather(*(self.cheap.add(x) for x in range(n)))
    def plain(self, x): return self.cheap.add.remote(x).result(10)
    async def blocks(self): return self.cheap.add.remote(1).result()
    async def pieces(self, n): return [piece async for piece in self.cheap.count.stream(n)]
    def plain_pieces(self, n): return [piece for piece in self.cheap.count.stream(n)]
    async def first_piece(self):
        async for piece in self.cheap.count.stream(1000):
            return piece
    async def fails(self):
        try:
            await self.cheap.fail()
        except pm.errors.PointsmanError as error:
            return [type(error).__name__, str(error), error.kind, error.status]
    async def breaks_off(self, how):
        try:
            if how == "stream":
                return [piece async for piece in self.cheap.cut.stream(how)]
            return await self.cheap.cut(how)
        except pm.errors.PointsmanError as error:
            return str(error)
    async def fails_loudly(self): return await self.cheap.fail()
    async def too_late(self): return await self.cheap.late()
    async def hangs(self): return await self.cheap.hang()
    async def gives_up(self):
        response = self.cheap.hang()
        await asyncio.sleep(0.05)
        response.cancel()
        try:
            await response
        except asyncio.CancelledError:
            return "gave up"
    async def array(self):
        import numpy
        return float((await self.cheap.add(numpy.ones(100_000)))[0].sum())
    async def talk(self):
        messages = [{"role": "user", "content": "hi"}]
        return [await self.llm.chat(messages, max_tokens=3), await self.llm.complete("once", temperature=0),
                await self.llm.embed(["a", "b"]), [piece async for piece in self.llm.chat.stream(messages)],
                (await self.llm.chat.raw(messages))["id"], repr(self.llm), repr(self.cheap)]
    async def refused(self):
        try:
            await self.llm.chat([], user="refuse")
        except pm.errors.PointsmanError as error:
            return str(error)

def handed(handle, x): return handle.add.remote(x).result(10)
"""


class Gateway(socketserver.ThreadingUnixStreamServer):
    """A fake gateway that records its requests."""

    daemon_threads = True

    def __init__(self, path: Path, shared: SharedBuffers) -> None:
        super().__init__(str(path), Handler)
        self.shared = shared
        self.requests: list[tuple[str, Any, dict[str, str]]] = []
        self.connections = 0
        self.hung_up = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def setup(self) -> None:
        self.client_address = ("unix", 0)
        super().setup()
        self.server.connections += 1

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        if self.path == "/pipelines/call":
            head, blobs = decode_call(body)
            self.server.requests.append((f"{head.app}.{head.node}.{head.method}", head, headers))
            args, kwargs = arguments(head, blobs, self.server.shared)
            getattr(self, f"do_{head.method}")(*args, **kwargs)
        else:
            self.server.requests.append((self.path, json.loads(body), headers))
            self.model(json.loads(body))

    def do___call__(self, x: Any) -> None:
        self.say(encode_value(["called", x]))

    def do_add(self, x: Any, y: Any = None) -> None:
        self.say(encode_value([x, y], self.server.shared))

    def do_fail(self) -> None:
        self.say(b'{"type":"ValueError","message":"cheap is cheap","traceback":"T"}', 500)

    def do_cut(self, how: str) -> None:
        self.close_connection = True
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        if how == "head":
            return
        if how == "length":
            self.wfile.write(b"content-length: 100\r\n\r\nabc")
        else:
            self.wfile.write(b"transfer-encoding: chunked\r\n\r\n5\r\nab")

    def do_late(self) -> None:
        self.say(b'{"type":"DeadlineExceeded","message":"over"}', 504)

    def do_hang(self) -> None:
        assert self.connection.recv(1) == b""
        self.server.hung_up.set()
        self.close_connection = True

    def do_count(self, n: int) -> None:
        self.chunks([len(blob).to_bytes(4, "little") + blob for blob in (encode_value((index,)) for index in range(n))])

    def model(self, body: dict[str, Any]) -> None:
        if body.get("user") == "refuse":
            self.say(b'{"error":{"message":"no seat","type":"overloaded","code":429}}', 429)
        elif body.get("stream"):
            deltas = [{"role": "assistant"}, {"content": "Hel"}, {"content": "lo"}]
            words = [*({"choices": [{"delta": delta}]} for delta in deltas), {"choices": []}]
            text = b"".join(b"data: " + json.dumps(word).encode() + b"\n\n" for word in words) + b"data: [DONE]\n\n"
            self.chunks([text[index : index + 7] for index in range(0, len(text), 7)])
        elif self.path == "/pipelines/v1/embeddings":
            self.say(b'{"data":[{"index":1,"embedding":[2.0]},{"index":0,"embedding":[1.0]}]}')
        elif self.path == "/pipelines/v1/completions":
            self.say(b'{"choices":[{"text":"upon a time"}]}')
        else:
            self.say(b'{"id":"chat-1","choices":[{"message":{"content":"Hello"}}]}')

    def say(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def chunks(self, pieces: list[bytes]) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    (tmp_path / "shm").mkdir()
    (tmp_path / "app.py").write_text(CODE.replace("import pointsman as pm", "import pointsman as pm, pointsman.errors"))
    server = Gateway(tmp_path / "gateway", SharedBuffers(tmp_path / "shm"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
    server.shared.close()


@pytest.fixture
def router(gateway: Gateway, tmp_path: Path) -> Iterator[Replica]:
    args = [{"$handle": "cheap"}, {"deep": [{"$handle": "other"}]}]
    with replica(tmp_path, code="app.py:Router", args=args, kwargs={"llm": {"$model": "smollm2"}}) as running:
        yield running


def test_a_call_through_a_handle(router: Replica, gateway: Gateway) -> None:
    assert router.value("both", {"a": (1, 2)}) == [[{"a": (1, 2)}, (1,)], ["called", {"a": (1, 2)}]]
    assert [path for path, _, _ in gateway.requests] == ["app.cheap.add", "app.other.__call__"]
    _, head, headers = gateway.requests[0]
    assert read_template(head.args) == [BlobAt(0)]
    assert read_template(head.kwargs) == {"y": BlobAt(1)}
    assert headers["x-pointsman-secret"] == SECRET
    assert gateway.connections == 1


def test_calls_inherit_their_context(router: Replica, gateway: Gateway) -> None:
    known: dict[str, Any] = {"request_id": "r7", "priority": 3, "tenant": "t", "step": "s2", "deadline_s": 20.0}
    for method in ("both", "plain"):
        router.value(method, 1, **known)
        _, head, _ = gateway.requests[-1]
        assert (head.request_id, head.priority, head.tenant, head.step) == ("r7", 3, "t", "s2")
        assert head.deadline_s is not None
        assert 15 < head.deadline_s < 20
    router.value("both", 1)
    assert gateway.requests[-1][1].deadline_s is None


def test_concurrent_calls_and_calls_from_plain_code(router: Replica, gateway: Gateway) -> None:
    assert router.value("at_once", 20) == [[x, None] for x in range(20)]
    for x in range(20):  # although it is quick, it stays in its thread
        assert router.call_again("plain", x).value() == [x, None]


def test_blocking_on_the_loop_is_an_error(router: Replica) -> None:
    assert "await the response" in router.call("blocks").json()["message"]


def test_streamed_pieces_are_read(router: Replica, gateway: Gateway) -> None:
    assert router.value("pieces", 3) == [(0,), (1,), (2,)]
    assert gateway.requests[-1][1].form == "pieces"
    assert router.value("plain_pieces", 100) == [(index,) for index in range(100)]
    assert router.value("first_piece") == (0,)
    assert router.value("both", 1)


def test_errors_of_other_nodes(router: Replica) -> None:
    assert router.value("fails") == ["CallFailed", "cheap: ValueError: cheap is cheap", "ValueError", 500]
    answer = router.call("fails_loudly")
    assert answer.status == 500
    assert answer.json() == {"type": "ValueError", "message": "cheap is cheap", "traceback": "T", "node": "cheap"}
    assert router.call("too_late").status == 504


@pytest.mark.parametrize("how", ["length", "chunks", "stream"])
def test_a_truncated_response_raises(router: Replica, how: str) -> None:
    assert router.value("breaks_off", how) == "the answer broke off in the middle"


def test_no_response_raises(router: Replica) -> None:
    assert "does not answer" in router.value("breaks_off", "head")


def test_a_cancelled_call_cancels_the_calls_it_made(router: Replica, gateway: Gateway) -> None:
    with router.send("hangs"):
        until(lambda: len(gateway.requests) == 1)
    assert gateway.hung_up.wait(10)
    gateway.hung_up.clear()
    assert router.value("gives_up") == "gave up"
    assert gateway.hung_up.wait(10)
    gateway.hung_up.clear()
    assert router.call("hangs", deadline_s=0.1).status == 504
    assert gateway.hung_up.wait(10)


def test_large_arrays_go_through_shared_memory(router: Replica, gateway: Gateway) -> None:
    assert router.value("array") == 100_000.0
    assert max(gateway.requests[-1][1].blobs) < 1000


def test_calls_to_a_model(router: Replica, gateway: Gateway) -> None:
    known: dict[str, Any] = {"request_id": "r7", "priority": 3, "tenant": "t", "deadline_s": 20.0}
    assert router.value("talk", **known) == [
        "Hello", "upon a time", [[1.0], [2.0]], ["Hel", "lo"], "chat-1", "<model smollm2>", "<handle to cheap>",
    ]  # fmt: skip
    path, body, headers = gateway.requests[0]
    assert path == "/pipelines/v1/chat/completions"
    assert body == {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    assert headers["x-pointsman-caller"] == "r7."
    assert (headers["x-pointsman-priority"], headers["x-pointsman-tenant"]) == ("3", "t")
    assert 15 < float(headers["x-pointsman-timeout-s"]) <= 20
    assert router.value("refused") == "smollm2: overloaded: no seat"


def test_handles_among_the_arguments_of_a_call(gateway: Gateway, tmp_path: Path) -> None:
    with replica(tmp_path, code="app.py:handed", kind="function") as running:
        for x in range(12):
            sent = CallHead(method=CALL, args=template([placeholder_of_handle("cheap"), x]))
            assert running.fetch("POST", "/call", encode_call(sent)).value() == [x, None]


def test_calls_without_a_gateway_raise(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(CODE)
    with replica(tmp_path, code="app.py:Router", args=[{"$handle": "a"}, {"deep": [1]}]) as running:
        began = time.monotonic()
        answer = running.call("plain", 1)
        assert answer.status == 500
        assert "does not answer" in answer.json()["message"]
        assert time.monotonic() - began < 5


def test_a_gateway_that_restarts(router: Replica, gateway: Gateway, tmp_path: Path) -> None:
    """Its keep-alive connections are closed by then."""
    assert router.value("plain", 1) == [1, None]
    gateway.shutdown()
    gateway.server_close()
    (tmp_path / "gateway").unlink()
    call_again = Gateway(tmp_path / "gateway", gateway.shared)
    thread = threading.Thread(target=call_again.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        assert router.value("plain", 2) == [2, None]
    finally:
        call_again.shutdown()
        thread.join()
        call_again.server_close()
