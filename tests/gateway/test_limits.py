"""What a client can make the gateway do before its key is known, and all clients together."""

import resource
import subprocess
import sys
from typing import Any

import pytest

from pointsman.gateway.admission import Admission, NotAdmitted
from pointsman.http.buffers import READ_BYTES
from pointsman.http.heads import COPIED_BYTES, HttpRequest
from pointsman.http.parser import MAX_CHUNKS_PER_TURN
from pointsman.http.responses import TURN_BYTES
from tests.gateway.backends import Gate
from tests.gateway.bed import Bed, MakeBed, plan_of
from tests.gateway.memory import Memory, read_into_buffers, statuses
from tests.gateway.test_keys import RED, by, guarded
from tests.gateway.wire import CHAT, HEALTH, chat, wait_for

LARGE = 2 * COPIED_BYTES


def head(*lines: str, method: bytes = b"POST", path: bytes = CHAT, length: int = LARGE) -> bytes:
    """The head of a request with a body to come."""
    given = "".join(f"{line}\r\n" for line in lines).encode()
    return b"%b %b HTTP/1.1\r\nhost: gateway\r\ncontent-length: %d\r\n%b\r\n" % (method, path, length, given)


CHUNKED_HEAD = head().replace(b"content-length: %d" % LARGE, b"transfer-encoding: chunked")


# Before the body


@pytest.mark.parametrize("body", [b"", b" " * LARGE], ids=["not sent", "sent"])
@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (head(), 401),
        (head("authorization: Bearer wrong"), 401),
        (head("authorization: Bearer wrong", "expect: 100-continue"), 401),
        (CHUNKED_HEAD, 401),
        (head(path=b"/nowhere"), 404),
        (head(method=b"PUT"), 405),
        (head(path=b"/health", method=b"GET"), 413),
        (head(path=b"/metrics", method=b"GET"), 413),
        (head("origin: http://evil.example"), 401),
    ],
)
def test_a_request_that_will_not_be_served_is_answered_before_its_body_is_read(
    make_bed: MakeBed, request_head: bytes, status: int, body: bytes
) -> None:
    bed = make_bed(*guarded())
    client = bed.client()
    client.send(request_head + body)
    refused = client.read_response()
    assert (refused.status, refused.header("connection")) == (status, "close")
    assert client.is_closed()
    assert bed.gateway.buffered.held == 0


@pytest.mark.parametrize(
    "limit", [{"requestsPerMinute": 1}, {"costBudget": 1e-9, "costPeriod": "1h"}], ids=["requests", "budget"]
)
def test_a_tenant_beyond_its_limits_is_refused_before_its_body_is_read(
    make_bed: MakeBed, limit: dict[str, Any]
) -> None:
    bed = make_bed(*guarded({"name": "red", **limit}, price={"perMillionOutputTokens": 1000.0}))
    bed.backend()
    assert bed.fetch(by(RED)).status == 200
    client = bed.client()
    client.send(head(f"authorization: Bearer {RED}"))
    refused = client.read_response()
    assert refused.status == 429
    assert int(refused.header("retry-after") or 0) >= 1
    assert client.is_closed()
    assert bed.gateway.metrics.limited["red"] == 1


def test_a_valid_key_is_asked_for_the_body(make_bed: MakeBed) -> None:
    bed = make_bed(*guarded())
    bed.backend()
    request_head, _, body = by(RED, "expect: 100-continue", prompt="x" * LARGE).partition(b"\r\n\r\n")
    client = bed.client()
    client.send(request_head + b"\r\n\r\n")
    assert client.read_response().status == 100
    client.send(body)
    assert client.read_response().status == 200
    assert client.stays_open()


# Bytes of all clients together


def test_buffered_bytes_are_bounded_in_total(make_bed: MakeBed) -> None:
    """The bodies of slow clients, and of requests that wait for their answers, take memory."""
    bed = make_bed({"maxBufferedBytes": 100_000})
    gate = Gate()
    bed.backend(gate)
    served, slow, refused = bed.client(), bed.client(), bed.client()
    served.send(chat(prompt="x" * 40_000))
    wait_for(bed.running)
    slow.send(head(length=40_000) + b" " * 39_000)
    wait_for(lambda: bed.gateway.buffered.held > 75_000)
    refused.send(chat(prompt="x" * 60_000))
    answer = refused.read_response()
    assert (answer.status, answer.header("retry-after")) == (503, "1")
    assert refused.is_closed()
    assert bed.fetch(HEALTH).status == 200
    gate.open()
    assert served.read_response().status == 200
    slow.close()
    wait_for(lambda: bed.gateway.buffered.held == 0)
    assert bed.fetch(chat(prompt="x" * 60_000)).status == 200
    assert bed.gateway.buffered.held == 0


def test_requests_ahead_of_their_turn_count_too(make_bed: MakeBed) -> None:
    """They are dropped when there is no room, and the answer before them says that the connection ends."""
    bed = make_bed({"maxBufferedBytes": READ_BYTES - 1})
    gate = Gate()
    bed.backend(gate)
    client = bed.client()
    client.send(chat())
    wait_for(bed.running)
    client.send(chat() * 2000)
    wait_for(lambda: all(connection.parser.closed for connection in bed.gateway.clients))
    assert bed.gateway.buffered.held == 0
    gate.open()
    answer = client.read_response()
    assert (answer.status, answer.header("connection")) == (200, "close")
    assert client.is_closed()


def test_memory_of_large_bodies_is_given_back() -> None:
    """In a process of its own, because the memory of this one is not a function of one test."""
    subprocess.run([sys.executable, "-c", GIVES_BACK], check=True, timeout=120)


GIVES_BACK = """
import re
from pathlib import Path
from tests.gateway.bed import Bed
from tests.gateway.test_limits import head
from tests.gateway.wire import wait_for

def resident():
    return int(re.search(r"VmRSS:\\s+([0-9]+)", Path("/proc/self/status").read_text())[1]) * 1024

bed, size = Bed({}), 20_000_000
before = resident()
clients = [bed.client() for _ in range(8)]
for client in clients:
    client.send(head(length=size) + b" " * (size - 1))
wait_for(lambda: bed.gateway.buffered.held == 8 * (size - 1))
most = resident()
assert most - before > 7 * size, (before, most)
for client in clients:
    client.close()
wait_for(lambda: bed.gateway.buffered.held == 0)
wait_for(lambda: resident() - before < (most - before) / 4, f"{before} {most}")
bed.close()
"""


# Work per turn of the loop


def test_one_request_per_connection_and_turn() -> None:
    memory = Memory()
    client, transport = memory.client()
    client.data_received(HEALTH * 300)
    assert statuses(bytes(transport.written)) == [200]
    memory.loop.turn()
    assert statuses(bytes(transport.written)) == [200] * 300
    memory.disconnect_all()


def test_a_client_that_sends_much_waits_for_the_others() -> None:
    """Else the loop reads up to 8 MB of each client before it turns to the next one."""
    memory = Memory()
    client, transport = memory.client()
    read_into_buffers(client, head(length=10 * TURN_BYTES) + b" " * TURN_BYTES)
    assert transport.reads
    read_into_buffers(client, b" " * TURN_BYTES)
    assert not transport.reads
    memory.loop.turn()
    assert transport.reads
    memory.disconnect_all()


def test_a_refused_client_waits_for_the_others_too() -> None:
    """What it still sends is discarded, which takes time as well."""
    memory = Memory()
    client, transport = memory.client()
    read_into_buffers(client, head(path=b"/nowhere", length=10 * TURN_BYTES))
    assert transport.finished
    read_into_buffers(client, b" " * READ_BYTES)
    assert not transport.reads
    memory.loop.turn()
    assert transport.reads
    memory.disconnect_all()


def test_chunks_are_read_over_many_turns() -> None:
    memory = Memory()
    client, _ = memory.client()
    client.data_received(CHUNKED_HEAD + b"1\r\nx\r\n" * 20_000)
    chunks = client.parser._chunks
    assert chunks is not None
    assert chunks.count < 3 * MAX_CHUNKS_PER_TURN
    memory.loop.turn()
    assert chunks.count == 20_000
    memory.disconnect_all()


@pytest.mark.parametrize("piece", [0, 70])
def test_chunks_of_a_body_are_bounded(make_bed: MakeBed, piece: int) -> None:
    bed = make_bed({"limits": {"maxChunks": 50}})
    backend = bed.backend()
    for count, status in ((50, 400), (51, 413)):
        client = bed.client()
        client.send(CHUNKED_HEAD + b"1\r\n \r\n" * count + b"0\r\n\r\n", piece=piece)
        assert client.read_response().status == status
    assert backend.received == []


@pytest.mark.parametrize("is_plain", [True, False], ids=["fast parser", "llhttp"])
def test_headers_of_a_request_are_bounded(make_bed: MakeBed, is_plain: bool) -> None:
    bed = make_bed({"limits": {"maxHeaders": 50}})
    bed.backend()
    lines = [f"x-{n}: y" for n in range(50)]
    unusual = () if is_plain else ("te: trailers",)
    assert bed.fetch(chat(*lines[:40], *unusual)).status == 200
    refused = bed.fetch(chat(*lines, *unusual))
    assert refused.status == 431
    assert "50" in refused.error["message"]


# Connections


def test_idle_connections_are_closed_for_new_ones_the_longest_idle_first(make_bed: MakeBed) -> None:
    bed = make_bed({"limits": {"maxConnections": 3}})
    gate = Gate()
    bed.backend(gate)
    busy, first, second = bed.client(), bed.client(), bed.client()
    busy.send(chat())
    wait_for(bed.running)
    assert first.fetch(HEALTH).status == second.fetch(HEALTH).status == 200
    assert first.fetch(HEALTH).status == 200  # so the second is idle longer
    third = bed.client()
    assert third.fetch(HEALTH).status == 200
    assert second.is_closed()
    assert first.stays_open()
    gate.open()
    assert busy.read_response().status == 200


def test_a_client_in_the_middle_of_a_body_is_not_idle(make_bed: MakeBed) -> None:
    bed = make_bed({"limits": {"maxConnections": 2}})
    bed.backend()
    request = chat()
    sending = bed.client()
    sending.send(request[:-5])
    wait_for(lambda: any(one.parser.in_body for one in bed.gateway.clients))
    idle = bed.client()
    assert idle.fetch(HEALTH).status == 200  # it is idle for a shorter time
    assert bed.client().fetch(HEALTH).status == 200
    assert idle.is_closed()
    sending.send(request[-5:])
    assert sending.read_response().status == 200


def test_strangers_cannot_have_the_connections_of_clients_with_a_key_closed(make_bed: MakeBed) -> None:
    settings, deployment = guarded()
    bed = make_bed({**settings, "limits": {"maxConnections": 3}}, deployment)
    bed.backend()
    client = bed.client()
    assert client.fetch(by(RED)).status == 200
    strangers = [bed.client() for _ in range(8)]  # all are idle for a shorter time
    assert strangers[0].is_closed()
    assert client.fetch(by(RED)).status == 200


def test_connections_that_are_all_in_use_are_not_closed(make_bed: MakeBed) -> None:
    bed = make_bed({"limits": {"maxConnections": 2}})
    gate = Gate()
    bed.backend(gate)
    clients = [bed.client(), bed.client()]
    for client in clients:
        client.send(chat())
    wait_for(lambda: bed.running() == 2)
    third = bed.client()
    refused = third.read_response()
    assert (refused.status, refused.header("retry-after")) == (503, "1")
    assert third.is_closed()
    gate.open()
    assert [client.read_response().status for client in clients] == [200, 200]


def test_the_limit_on_open_files_leaves_a_reserve(bed: Bed) -> None:
    clients = bed.gateway.clients
    clients.max_files = 1024
    assert clients.limit < 1024 / 2 - 50
    assert clients.problems() == []
    before = clients.limit
    for _ in range(20):
        bed.backend()
    assert clients.limit < before


def test_a_setting_beyond_the_limit_on_open_files_is_a_problem(make_bed: MakeBed) -> None:
    clients = make_bed({"limits": {"maxConnections": 5000}}).gateway.clients
    assert clients.problems() == []
    clients.max_files = 1024
    [problem] = clients.problems()
    assert str(problem).startswith("gateway.limits.maxConnections is 5000, but 1024 open files allow only ")


def test_the_limit_on_open_files_is_raised() -> None:
    program = (
        "import resource\nfrom pointsman.gateway.listeners import allow_many_files\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, min(hard, 2000) if hard > 0 else 2000))\n"
        "assert allow_many_files() == 2000 == resource.getrlimit(resource.RLIMIT_NOFILE)[0]"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 < hard < 2000:
        pytest.skip("too few files are allowed here")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# Browsers


OWN = [b"127.0.0.1:8080", b"localhost:8080", b"LOCALHOST", b"[::1]:8080", b"127.9.9.9", b"app.localhost:1", b"mine.lan"]
FOREIGN = [b"evil.example", b"evil.example:8080", b"10.0.0.1", b"localhost.evil.example", b"127.0.0.1.evil.example"]
INVALID = [b"a b", b"a/b", b"user@localhost", b"[::1", b"localhost:port", b"a,b c"]


def asked(host: bytes, *lines: bytes) -> bytes:
    request = chat().replace(b"host: gateway", b"\r\n".join([b"host: " + host, *lines]))
    assert host in request
    return request


@pytest.mark.parametrize(
    ("host", "status"),
    [*((one, 200) for one in OWN), *((one, 403) for one in FOREIGN), *((one, 400) for one in INVALID)],
)
def test_a_gateway_for_this_machine_is_called_by_its_own_names(make_bed: MakeBed, host: bytes, status: int) -> None:
    """A page cannot reach it through a name that leads here."""
    bed = make_bed({"allowedHosts": ["mine.lan"]})
    backend = bed.backend()
    client = bed.client()
    for _ in range(2):
        assert client.fetch(asked(host)).status == status
    assert len(backend.received) == (2 if status == 200 else 0)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (b"http://localhost:3000", 200),
        (b"http://127.0.0.1:8080", 200),
        (b"https://mine.lan", 200),
        (b"http://evil.example", 403),
        (b"null", 403),
        (b"", 403),
        (b"http://", 403),
        (b"file://", 403),
        (b"http://localhost.evil.example", 403),
        (b"http://localhost@evil.example", 403),
    ],
)
def test_foreign_pages_may_not_use_a_gateway_without_keys(make_bed: MakeBed, origin: bytes, status: int) -> None:
    bed = make_bed({"allowedHosts": ["mine.lan"]})
    bed.backend()
    request = asked(b"localhost", b"content-type: text/plain", b"origin: " + origin)
    assert bed.fetch(request).status == status


def test_with_keys_the_key_decides(make_bed: MakeBed) -> None:
    bed = make_bed(*guarded())
    bed.backend()
    request = by(RED, "origin: http://elsewhere.example").replace(b"host: gateway", b"host: elsewhere.example")
    assert bed.fetch(request).status == 200


# Pages about the gateway


@pytest.mark.parametrize(
    ("listen", "has_keys", "public_pages", "is_open"),
    [
        ("127.0.0.1:0", False, None, True),
        ("127.0.0.1:0", True, None, True),
        ("0.0.0.0:0", False, None, True),
        ("0.0.0.0:0", True, None, False),
        ("0.0.0.0:0", True, True, True),
        ("127.0.0.1:0", True, False, False),
    ],
)
def test_pages_need_a_key_where_strangers_can_reach_them(
    listen: str, has_keys: bool, public_pages: bool | None, is_open: bool
) -> None:
    gateway: dict[str, Any] = {"listen": listen} | (guarded()[0] if has_keys else {})
    if public_pages is not None:
        gateway["publicPages"] = public_pages
    admission = Admission(plan_of(gateway).gateway, limited={}, in_flight=())  # type: ignore[arg-type]
    key = HttpRequest(headers={b"authorization": b"Bearer " + RED.encode()})
    assert (admission.page_reader(key) is None) is (is_open or not has_keys)
    if is_open:
        assert admission.page_reader(HttpRequest()) is None
    else:
        with pytest.raises(NotAdmitted):
            admission.page_reader(HttpRequest())


def test_metrics_need_a_key_if_the_setting_says_so(make_bed: MakeBed) -> None:
    settings, deployment = guarded()
    bed = make_bed({**settings, "publicPages": False}, deployment)
    request = b"GET /metrics HTTP/1.1\r\nhost: gateway\r\n%b\r\n"
    assert bed.fetch(request % b"").status == 401
    assert bed.fetch(request % b"authorization: Bearer wrong\r\n").status == 401
    assert bed.fetch(request % (b"authorization: Bearer %b\r\n" % RED.encode())).status == 200
