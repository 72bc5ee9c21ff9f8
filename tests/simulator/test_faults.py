"""Every fault, as clients see it."""

import http.client
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from pointsman.engines import Samples, Simulated
from pointsman.engines.simulated import FaultSpec
from pointsman.simulator.answers import answer_text
from pointsman.simulator.faults import ANY_TIME, AT_ONCE, AT_THE_START
from tests.simulator.servers import MODEL, Served, read_all, serving, until

ENGINE = Simulated(tokens_per_second=2000, first_token_ms=0, output_tokens=8)
PLAIN = {"model": MODEL, "prompt": "hello"}
STREAM = PLAIN | {"stream": True}
SHORT_S = 0.3


@pytest.fixture(scope="module")
def process() -> Iterator[Served]:
    with serving(ENGINE) as served:
        yield served


@pytest.fixture
def server(process: Served) -> Iterator[Served]:
    yield process
    assert process.fetch("/faults", method="DELETE").json() == []


def inject(server: Served, **fault: Any) -> None:
    answer = server.fetch("/faults", fault)
    assert answer.status == 200, answer.body


def received_from(server: Served, body: dict[str, Any]) -> bytes:
    """Everything until the connection closes or no more data arrives."""
    client = server.send("/v1/completions", body)
    client.settimeout(SHORT_S)
    received = b""
    try:
        while piece := client.recv(65536):
            received += piece
    except TimeoutError:
        received += b"..."
    except ConnectionResetError:
        received += b"RESET"
    finally:
        client.close()
    return received


def words(received: bytes) -> int:
    """Number of tokens in a stream."""
    return received.count(b'"text": "') - received.count(b'"text": ""')


def is_fine(server: Served) -> bool:
    return bool(server.fetch("/v1/completions", PLAIN).json()["choices"][0]["text"] == answer_text("hello", 8))


def test_hang(server: Served) -> None:
    inject(server, fault="hang", count=2)
    assert received_from(server, PLAIN) == b"..."
    assert received_from(server, STREAM) == b"..."
    assert is_fine(server)


def test_hang_during_the_stream(server: Served) -> None:
    inject(server, fault="hang", count=2, afterTokens=3)
    received = received_from(server, STREAM)
    assert received.endswith(b"...")
    assert words(received) == 3
    half = received_from(server, PLAIN)
    assert half.startswith(b"HTTP/1.1 200 OK")
    assert half.endswith(b"...")


def test_hang_after_the_head(server: Served) -> None:
    inject(server, fault="hang", count=1, afterTokens=0)
    received = received_from(server, STREAM)
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert received.endswith(b"\r\n\r\n...")


def test_reset(server: Served) -> None:
    inject(server, fault="reset", count=1)
    assert received_from(server, PLAIN) == b"RESET"
    inject(server, fault="reset", count=1, afterTokens=2)
    received = received_from(server, STREAM)
    assert received.endswith(b"RESET")
    assert words(received) <= 2


def test_cut(server: Served) -> None:
    inject(server, fault="cut", count=1)
    assert received_from(server, PLAIN) == b""
    inject(server, fault="cut", count=2, afterTokens=2)
    received = received_from(server, STREAM)
    assert words(received) == 2
    assert not received.endswith(b"0\r\n\r\n")
    head, _, half = received_from(server, PLAIN).partition(b"\r\n\r\n")
    assert len(half) < int(head.partition(b"content-length: ")[2])


def test_end_without_the_last_chunk(server: Served) -> None:
    inject(server, fault="end", count=1, afterTokens=2)
    answer = server.fetch("/v1/completions", STREAM)
    assert words(answer.body) == 2
    assert b"[DONE]" not in answer.body
    inject(server, fault="end", count=1)
    assert server.fetch("/v1/completions", PLAIN).body == b""
    inject(server, fault="end", count=1, afterTokens=2)
    assert received_from(server, PLAIN).count(b"HTTP/1.1") == 1


def test_a_fault_after_too_many_tokens_happens_after_the_last(server: Served) -> None:
    inject(server, fault="cut", count=1, afterTokens=100)
    received = received_from(server, STREAM)
    assert words(received) == 8
    assert b"[DONE]" not in received


def test_garbage_instead_of_http(server: Served) -> None:
    inject(server, fault="garbage", count=1)
    with pytest.raises(http.client.BadStatusLine):
        server.fetch("/v1/completions", PLAIN)
    inject(server, fault="garbage", count=1, afterTokens=1)
    assert b"this is not what you asked for" in received_from(server, STREAM)


@pytest.mark.parametrize("status", [500, 503, 429, 400])
def test_an_error_status(server: Served, status: int) -> None:
    inject(server, fault="status", status=status, count=1)
    answer = server.fetch("/v1/completions", PLAIN)
    assert answer.status == status
    assert answer.json()["error"]["code"] == status
    assert is_fine(server)


def test_an_error_status_with_the_time_to_retry(server: Served) -> None:
    inject(server, fault="status", status=429, retryAfter=7, count=1)
    assert b"\r\nretry-after: 7\r\n" in received_from(server, PLAIN)
    assert b"retry-after" not in received_from(server, PLAIN)


def test_dripping_bytes_complete_nothing(server: Served) -> None:
    for body, after in ((PLAIN, None), (STREAM, 0), (STREAM, 2)):
        inject(server, fault="drip", count=1, delayMs=10, **({} if after is None else {"afterTokens": after}))
        client = server.send("/v1/completions", body)
        received = b""
        while received.count(b":\r\n") + received.count(b" ") < 20 + 4 * (after or 0):
            received += client.recv(65536)
        client.close()
        assert words(received) == (after or 0)
        assert received.startswith(b"HTTP/1.1 200 OK")
        assert b"[DONE]" not in received
    until(lambda: server.fetch("/stats").json()["running"] == 0)
    assert is_fine(server)


def test_garbage_in_the_body(server: Served) -> None:
    inject(server, fault="garbage-body", count=1)
    answer = server.fetch("/v1/completions", PLAIN)
    assert answer.status == 200
    with pytest.raises(ValueError, match=r"."):
        answer.json()


def test_wrong_content_lengths(server: Served) -> None:
    inject(server, fault="short-body", count=1)
    with pytest.raises(http.client.IncompleteRead):
        server.fetch("/v1/completions", PLAIN)
    inject(server, fault="long-body", count=1)
    head, _, body = received_from(server, PLAIN).partition(b"\r\n\r\n")
    assert b"content-length: 4" in head
    assert len(body) > 4


def test_slow_headers(server: Served) -> None:
    inject(server, fault="slow-headers", delayMs=5000, count=1)
    assert received_from(server, STREAM) == b"..."
    inject(server, fault="slow-headers", delayMs=1, count=1)
    assert is_fine(server)


def test_slow_tokens(server: Served) -> None:
    inject(server, fault="slow-tokens", delayMs=100, count=1)
    client = server.send("/v1/completions", STREAM)
    received = b""
    most = 0
    while b"[DONE]" not in received:
        piece = client.recv(65536)
        most = max(most, words(piece))
        received += piece
    client.close()
    assert words(received) == 8
    assert most < 8  # they arrived one after the other
    inject(server, fault="slow-tokens", delayMs=1, count=1)
    assert is_fine(server)


def test_faults_of_health_and_of_work_are_independent(server: Served) -> None:
    inject(server, fault="status", on="work")
    assert server.fetch("/health").status == 200
    assert server.fetch("/v1/completions", PLAIN).status == 500
    server.fetch("/faults", method="DELETE")
    inject(server, fault="status", status=503, on="health")
    assert server.fetch("/health").status == 503
    assert is_fine(server)


def test_when_everything_hangs_faults_can_still_be_cleared(server: Served) -> None:
    inject(server, fault="hang", on="all")
    for path in ("/health", "/metrics", "/v1/models"):
        with pytest.raises(TimeoutError):
            server.fetch(path, timeout_s=0.1)
    assert [one["fault"] for one in server.fetch("/faults").json()] == ["hang"]


def test_metrics_that_are_missing_stale_or_nonsense(server: Served) -> None:
    inject(server, fault="status", status=404, on="metrics", count=1)
    assert server.fetch("/metrics").status == 404
    inject(server, fault="garbage-body", on="metrics", count=1)
    assert ENGINE.metrics(Samples(server.fetch("/metrics").body)) is None
    inject(server, fault="stale", on="metrics")
    before = server.fetch("/metrics").body
    assert ENGINE.metrics(Samples(before)) is not None
    assert is_fine(server)
    assert server.fetch("/metrics").body == before
    server.fetch("/faults", method="DELETE")
    assert server.fetch("/metrics").body != before


def test_connections_are_refused_for_a_time(server: Served) -> None:
    idle = socket.create_connection(("127.0.0.1", server.port))
    until(lambda: idle.getsockname() is not None)
    inject(server, fault="refuse", seconds=SHORT_S)
    with pytest.raises(ConnectionRefusedError):
        server.fetch("/health")
    assert read_all(idle) == b""  # an idle connection is closed
    idle.close()

    def answers_again() -> bool:
        try:
            return server.fetch("/health").status == 200
        except ConnectionRefusedError:
            return False

    until(answers_again)


def test_a_fault_with_a_probability(server: Served) -> None:
    inject(server, fault="status", probability=0.5)
    results = [server.fetch("/v1/completions", PLAIN).status for _ in range(60)]
    assert 10 < results.count(500) < 50


def test_a_fault_for_a_time(server: Served) -> None:
    inject(server, fault="status", seconds=0.05)
    assert server.fetch("/v1/completions", PLAIN).status == 500
    until(lambda: server.fetch("/v1/completions", PLAIN).status == 200)
    assert server.fetch("/faults").json() == []


def test_a_sequence_of_faults(server: Served) -> None:
    faults = [{"fault": "status", "count": 1}, {"fault": "status", "status": 503, "count": 2}]
    assert server.fetch("/faults", faults).json() == faults
    statuses = [server.fetch("/v1/completions", PLAIN).status for _ in range(4)]
    assert statuses == [500, 503, 503, 200]


def test_faults_are_counted(server: Served) -> None:
    before = server.fetch("/stats").json()["faults"].get("garbage-body", 0)
    inject(server, fault="garbage-body", count=1)
    server.fetch("/v1/completions", PLAIN)
    assert server.fetch("/stats").json()["faults"]["garbage-body"] == before + 1


def test_a_hung_request_uses_no_seat(server: Served) -> None:
    inject(server, fault="hang", count=1, afterTokens=1)
    client = server.send("/v1/completions", STREAM | {"max_tokens": 10_000, "ignore_eos": True})
    until(lambda: server.fetch("/stats").json()["running"] == 0)
    client.close()


@pytest.mark.parametrize("body", [None, STREAM])
def test_crash(body: dict[str, Any] | None) -> None:
    faults = [FaultSpec("crash", after_tokens=None if body is None else 2)]
    with serving(Simulated(tokens_per_second=1000, output_tokens=8, faults=faults)) as served:
        received = received_from(served, body or PLAIN)
        assert served.process.wait(timeout=5) == 1
        assert words(received) <= 2


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ({"fault": "rust"}, "there is no fault 'rust'; known: hang, reset, "),
        ({}, "there is no fault None"),
        (["hang"], "a fault is written"),
        ({"fault": "hang", "on": "tuesdays"}, "on is one of work, health, metrics, models, all"),
        ({"fault": "hang", "counts": 1}, "'counts' is not a field of a fault"),
        ({"fault": "hang", "count": 0}, "count must be a number from 1"),
        ({"fault": "hang", "probability": 2}, "from 0 to 1, not 2"),
        ({"fault": "hang", "count": True}, "count must be a number"),
        ({"fault": "status", "afterTokens": 1}, "status cannot strike after tokens"),
        ({"fault": "refuse", "count": 1}, "refuse strikes the whole server"),
    ],
)
def test_invalid_faults_are_refused(server: Served, fault: object, why: str) -> None:
    answer = server.fetch("/faults", fault)
    assert answer.status == 400
    assert why in answer.json()["error"]["message"]
    assert server.fetch("/faults").json() == []


def test_every_fault_has_a_description() -> None:
    assert all(function.__doc__ for function in (*ANY_TIME.values(), *AT_THE_START.values(), *AT_ONCE.values()))
