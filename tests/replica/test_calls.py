"""Calls of a replica: results, exceptions, generators, threads, deadlines and cancellation."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pointsman.pipeline.graph import CALL
from pointsman.wire import BLOB, PIECES, CallHead, decode_value, encode_call, failure_after_pieces
from tests.replica.replicas import Replica, call, replica, until
from tests.simulator.servers import TIMEOUT_S, read_all

CODE = """
import asyncio, datetime, os, threading, time
from dataclasses import dataclass
import pointsman as pm

@dataclass
class Point:
    x: int
    at: datetime.date

class Model:
    def __init__(self, val, name="none"):
        self.val, self.name, self.began, self.cancelled, self.closed = val, name, 0, 0, 0
    def forward(self, x): return self.val * x
    def __call__(self, *args, **kwargs): return [self.name, args, kwargs]
    async def later(self, x):
        await asyncio.sleep(0)
        return self.val + x
    def raises(self): raise ValueError("not today")
    def exits(self): raise SystemExit(3)
    def thread(self): return threading.current_thread().name
    def sleep(self, seconds):
        self.began += 1
        time.sleep(seconds)
        return threading.current_thread().name
    def counts(self): return [self.began, self.cancelled, self.closed]
    async def wait(self):
        self.began += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
    def words(self, count):
        for place in range(count):
            yield f"w{place} "
    async def numbers(self, count):
        for place in range(count):
            yield {"n": place}
    async def endless(self):
        try:
            while True:
                yield "more"
                await asyncio.sleep(0)
        finally:
            self.closed += 1
    def endless_plain(self):
        try:
            while True:
                yield "x" * 1000
        finally:
            self.closed += 1
    def breaks(self):
        yield "one\\ntwo"
        raise KeyError("broke")
    async def nothing(self):
        return
        yield
    def returns_generator(self): return (place for place in range(3))
    def rich(self): return {"point": Point(1, datetime.date(2024, 1, 2)), "when": datetime.datetime(2024, 1, 2, 3)}
    def text(self): return "plain"
    def raw(self): return b"\\x00\\x01"
    def lock(self): return threading.Lock()
    def arrays(self):
        import numpy
        return {"a": numpy.arange(3), "b": numpy.float32(1.5)}
    def context(self):
        known = pm.current()
        return [known.app, known.node, known.rank, known.shards, known.request_id, known.priority, known.tenant,
                known.step, known.time_left_s]
    async def context_later(self):
        await asyncio.sleep(0)
        return pm.current().request_id
    def _private(self): return "secret"

def double(x): return 2 * x
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.py").write_text(CODE)
    with replica(folder, code="model.py:Model", args=[2], kwargs={"name": "m"}, rank=1, shards=3, node="m1") as running:
        yield running


def test_methods_coroutines_and_callable_objects(model: Replica) -> None:
    answer = model.call("forward", 21)
    assert (answer.status, answer.kind) == (200, BLOB)
    assert answer.value() == 42
    assert model.value("forward", "ab") == "abab"
    assert model.value("later", 5) == 7
    assert model.value(CALL, 1, (2,), kwargs={"a": {3}}) == ["m", (1, (2,)), {"a": {3}}]


def test_functions_can_be_called(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(CODE)
    with replica(tmp_path, code="f.py:double", kind="function") as running:
        assert running.value(CALL, 4) == 8
        assert running.call("forward", 1).status == 404


def test_calls_need_the_secret(model: Replica) -> None:
    assert model.fetch("POST", "/call", call("forward", 1), secret="guess").status == 403
    assert model.fetch("POST", "/configure", b"1", secret="").status == 403
    assert model.fetch("GET", "/health", secret="").status == 200
    assert model.fetch("GET", "/ready", secret="").status == 200
    assert model.fetch("GET", "/elsewhere").status == 404


@pytest.mark.parametrize(
    ("method", "message"),
    [("forwrad", 'did you mean "forward"?'), ("_private", "_private"), ("__init__", "__init__"), ("val", "val")],
)
def test_an_unknown_method(model: Replica, method: str, message: str) -> None:
    answer = model.call(method)
    assert answer.status == 404
    assert answer.json()["type"] == "UnknownMethod"
    assert message in answer.json()["message"]


def test_tracebacks_begin_with_user_code(model: Replica) -> None:
    for _ in range(20):  # in a thread, then on the loop
        answer = model.call_again("raises")
        assert answer.status == 500
        error = answer.json()
        assert (error["type"], error["message"]) == ("ValueError", "not today")
        assert "model.py" in error["traceback"]
        assert "pointsman/replica" not in error["traceback"]
    for method in ("forward", "later", "words", "numbers"):
        for form in ("blob", "json"):
            assert model.call(method, 1, 2, 3, form=form).json()["type"] == "TypeError"
    assert model.call("exits").json()["type"] == "SystemExit"
    assert model.value("forward", 1) == 2
    assert "lock" in model.call("lock").json()["message"]


def test_what_is_not_a_call_is_refused(model: Replica) -> None:
    assert model.fetch("POST", "/call", b"garbage").status == 400
    assert model.fetch("POST", "/call", encode_call(CallHead(method="forward"))[:-1]).status == 400


def test_response_formats_for_clients(model: Replica) -> None:
    assert model.call("text", form="json")[1:] == ("application/json", b'"plain"')
    assert model.call("raw", form="json")[1:] == ("application/octet-stream", b"\x00\x01")
    assert model.call("rich", form="json").json() == {
        "point": {"x": 1, "at": "2024-01-02"}, "when": "2024-01-02T03:00:00",
    }  # fmt: skip
    assert model.call("arrays", form="json").json() == {"a": [0, 1, 2], "b": 1.5}
    assert "has no JSON" in model.call("lock", form="json").json()["message"]
    assert model.call("forward", 2, form="events").body == b"data: 4\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    ("method", "args", "kind", "body"),
    [
        ("words", [2], "text/plain; charset=utf-8", b"w0 w1 "),
        ("numbers", [2], "application/x-ndjson", b'{"n":0}\n{"n":1}\n'),
        ("returns_generator", [], "application/x-ndjson", b"0\n1\n2\n"),
        ("nothing", [], "application/x-ndjson", b""),
        ("words", [0], "application/x-ndjson", b""),
    ],
)
def test_generators_stream(model: Replica, method: str, args: list[Any], kind: str, body: bytes) -> None:
    answer = model.call(method, *args, form="json")
    assert (answer.kind, answer.body) == (kind, body)


def test_generators_as_events_values_and_pieces(model: Replica) -> None:
    answer = model.call("words", 2, form="events")
    assert answer.kind.startswith("text/event-stream")
    assert answer.body == b"data: w0 \n\ndata: w1 \n\ndata: [DONE]\n\n"
    assert model.call("numbers", 1, form="events").body == b'data: {"n":0}\n\ndata: [DONE]\n\n'
    assert model.value("words", 2) == ["w0 ", "w1 "]
    assert model.value("numbers", 2) == [{"n": 0}, {"n": 1}]
    assert model.value("words", 0) == []
    answer = model.call("numbers", 2, form="pieces")
    assert answer.kind == PIECES
    length = int.from_bytes(answer.body[:4], "little")
    assert decode_value(answer.body[4 : 4 + length]) == {"n": 0}


def read_failed_stream(client: socket.socket) -> tuple[bytes, tuple[int, bytes]]:
    """What came before the error, and the status and body of the error."""
    received = b""
    while not received.endswith(b"\r\n\r\n") or b"\r\n0\r\n" not in received:
        piece = client.recv(65536)
        assert piece, received[-1000:]
        received += piece
    pieces, _, trailers = received.rpartition(b"\r\n0\r\n")
    return pieces, failure_after_pieces(trailers) or (0, b"")


def test_a_stream_that_fails_ends_with_the_error(model: Replica) -> None:
    with model.send("breaks", form="events") as client:
        pieces, (status, body) = read_failed_stream(client)
        assert pieces.endswith(b"data: one\ndata: two\n\n"), "the error is no event of the code"
        assert (status, json.loads(body)["type"]) == (500, "KeyError")
        client.sendall(b"GET /health HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
        assert b" 200 OK" in read_all(client), "the connection serves other calls"


def test_a_client_that_disconnects_cancels_its_call(model: Replica) -> None:
    began, cancelled, _ = model.value("counts")
    with model.send("wait"):
        until(lambda: model.value("counts")[0] == began + 1)
    until(lambda: model.value("counts")[1] == cancelled + 1)


@pytest.mark.parametrize("method", ["endless", "endless_plain"])
@pytest.mark.parametrize("form", ["events", "json"])
def test_a_client_that_disconnects_ends_its_stream(model: Replica, method: str, form: str) -> None:
    closed = model.value("counts")[2]
    with model.send(method, form=form) as client:
        assert client.recv(1000)
    until(lambda: model.value("counts")[2] == closed + 1)


def test_a_slow_client_pauses_the_generator(model: Replica) -> None:
    with model.send("endless_plain", form="json") as client:
        assert client.recv(1000)
        resident = _resident_mb(model.process.pid)
        until(lambda: _is_idle(model.process.pid))
        assert _resident_mb(model.process.pid) < resident + 30


def test_health_is_answered_while_plain_code_runs_and_abandoned_calls_are_not_begun(model: Replica) -> None:
    began = model.value("counts")[0]
    with model.send("sleep", 1.0) as first:
        until(lambda: model.value("context_later") == "")
        with model.send("sleep", 0.0):
            started = time.monotonic()
            assert model.fetch("GET", "/health").status == 200
            assert time.monotonic() - started < 0.5
        assert b"200 OK" in first.recv(1000)
    assert model.value("counts")[0] == began + 1


def test_calls_past_their_deadline_are_not_begun(model: Replica) -> None:
    began = model.value("counts")[0]
    answer = model.call("sleep", 0.0, deadline_s=0.0)
    assert (answer.status, answer.json()["type"]) == (504, "DeadlineExceeded")
    assert model.call("sleep", 0.0, deadline_s=-1.0).status == 504
    with model.send("sleep", 0.5):  # nor does a call start that waited past its deadline
        until(lambda: model.fetch("GET", "/health").status == 200)
        assert model.call("sleep", 0.0, deadline_s=0.05).status == 504
    assert model.value("counts")[0] == began + 1


def test_a_call_is_cancelled_at_its_deadline(model: Replica) -> None:
    cancelled = model.value("counts")[1]
    started = time.monotonic()
    assert model.call("wait", deadline_s=0.05).status == 504
    assert time.monotonic() - started < 5
    until(lambda: model.value("counts")[1] == cancelled + 1)
    with model.send("endless", form="events", deadline_s=0.1) as client:
        received, (status, body) = read_failed_stream(client)
    assert (status, json.loads(body)["type"]) == (504, "DeadlineExceeded")
    assert b"[DONE]" not in received
    assert model.call("later", 1, deadline_s=10.0).value() == 3


def test_code_can_read_the_context_of_its_call(model: Replica) -> None:
    known = model.value("context", request_id="r", priority=7, tenant="t", step="s", deadline_s=30.0)
    assert known[:-1] == ["app", "m1", 1, 3, "r", 7, "t", "s"]
    assert 29 < known[-1] <= 30
    assert model.value("context")[-1] is None
    assert model.value("context_later", request_id="other") == "other"


def test_quick_methods_move_to_the_loop_and_slow_ones_move_back(model: Replica) -> None:
    def where(seconds: float = 0.0) -> Any:
        return model.call_again("sleep", seconds).value()

    assert model.call_again("thread").value() == "call-1"
    until(lambda: model.call_again("thread").value() == "MainThread")

    def on_the_loop(seconds: float) -> bool:
        until(lambda: where() == "MainThread")
        for _ in range(50):
            where()
        return bool(where(seconds) == "MainThread")

    until(lambda: on_the_loop(0.05))
    assert where() == "call-1"  # it does not count as quick any more
    until(lambda: on_the_loop(0.3))
    for _ in range(300):  # it has blocked the loop too often
        where()
    assert where() == "call-1"


def test_plain_calls_run_on_at_most_the_configured_threads(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        """
import threading, time
class Model:
    def __init__(self): self.now, self.most, self.lock = 0, 0, threading.Lock()
    def quick(self): return self._counted(0)
    def slow(self): return self._counted(0.02)
    def _counted(self, seconds):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(seconds)
        with self.lock:
            self.now -= 1
        return self.most
"""
    )
    for threads in (1, 3):
        with replica(tmp_path, code="m.py:Model", threads=threads) as running:
            for _ in range(20):
                running.call_again("quick")
            results: list[Any] = []
            asking = [
                threading.Thread(target=lambda name, results: results.append(running.value(name)), args=(name, results))
                for name in ["slow", "quick"] * 6
            ]
            for thread in asking:
                thread.start()
            for thread in asking:
                thread.join(TIMEOUT_S)
            assert len(results) == 12
            assert running.value("slow") == threads


def test_pipelined_requests_are_answered_in_order(model: Replica) -> None:
    body = [call("sleep", 0.05), call("forward", 1), call("later", 1)]
    head = "POST /call HTTP/1.1\r\nhost: x\r\nx-pointsman-secret: open sesame\r\ncontent-length: {}\r\n\r\n"
    with model.send("forward", 5) as client:
        client.sendall(b"".join(head.format(len(one)).encode() + one for one in body))
        client.sendall(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        received = read_all(client)
    answers = received.split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200"] * 5
    assert answers[0].endswith(b"\x00\x0a")
    assert answers[2].endswith(b"\x00\x02")
    assert json.loads(answers[4].partition(b"\r\n\r\n")[2]) == {"status": "ok"}


def test_a_replica_without_arrays_does_not_import_numpy(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def same(x): return x")
    with replica(tmp_path, code="m.py:same", kind="function") as running:
        for _ in range(20):
            assert running.call_again(CALL, [1, (2,), "x"]).value() == [1, (2,), "x"]
        mapped = Path(f"/proc/{running.process.pid}/maps").read_text()
        assert "numpy" not in mapped
        assert "yaml" not in mapped
        assert _resident_mb(running.process.pid) < 40


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _is_idle(pid: int) -> bool:
    """Whether it used almost no CPU for a while."""
    before = _ticks(pid)
    time.sleep(0.1)
    return _ticks(pid) - before <= 1


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
