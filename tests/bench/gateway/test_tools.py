"""The load generator against the backend, in C and in Python: both must count what they send."""

import http.client
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from bench.gateway import traffic
from bench.gateway.tools import LoadResult, Tools

CORE = min(os.sched_getaffinity(0))
COMPILER = pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")


@pytest.fixture(params=[pytest.param(True, id="C", marks=COMPILER), pytest.param(False, id="Python")])
def tools(request: pytest.FixtureRequest, tmp_path: Path) -> Tools:
    return Tools(tmp_path, CORE, native=request.param)


@pytest.fixture
def ports(tools: Tools) -> Iterator[list[int]]:
    with tools.backend(2) as backend:
        yield [int(port) for port in backend.read_line().split()]


def page(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def loaded(
    tools: Tools,
    port: int,
    requests: list[bytes],
    folder: Path,
    *,
    events: int,
    warm_s: float = 0.01,
    seconds: float = 0.0,
) -> LoadResult:
    file = traffic.write(requests, folder / "requests")
    with tools.load(port, file, connections=4, warm_s=warm_s, seconds=seconds, spread_ms=1, events=events) as load:
        assert load.read_line() == "ready"
        load.write_line("go")
        return msgspec.json.decode(load.read_line(), type=LoadResult)


def test_every_request_is_answered_and_counted(tools: Tools, ports: list[int], tmp_path: Path) -> None:
    seen = loaded(tools, ports[0], traffic.small(), tmp_path, events=0, seconds=0.05)
    assert seen.requests >= 4
    assert (seen.errors, seen.events, seen.first_error) == (0, 0, "")
    assert 0 < seen.latency_p50_us <= seen.latency_p99_us
    assert json.loads(page(ports[0], "/counts"))["requests"] >= seen.requests
    assert json.loads(page(ports[1], "/counts")) == {"requests": 0, "open": 0}


def test_streams_bring_all_of_their_events(tools: Tools, ports: list[int], tmp_path: Path) -> None:
    seen = loaded(tools, ports[0], traffic.small(5, 1, stream=True), tmp_path, events=6)
    assert (seen.requests, seen.errors, seen.events) == (4, 0, 24)
    assert 0 < seen.first_p50_us < seen.latency_p99_us


def test_requests_larger_than_socket_buffers_arrive(tools: Tools, ports: list[int], tmp_path: Path) -> None:
    seen = loaded(tools, ports[0], traffic.big(1 << 20)[:2], tmp_path, events=0)
    assert (seen.requests, seen.errors) == (4, 0)


def test_a_wrong_answer_is_an_error(tools: Tools, ports: list[int], tmp_path: Path) -> None:
    lost = [request.replace(b"/v1/chat/completions", b"/nowhere") for request in traffic.small()]
    # No time to warm up: the load ends at a limit of wrong answers, which a fast machine reaches in milliseconds.
    seen = loaded(tools, ports[0], lost, tmp_path, events=0, warm_s=0)
    assert (seen.requests, seen.errors) == (4, 4)
    assert seen.first_error.startswith("HTTP/1.1 404")
    short = loaded(tools, ports[0], traffic.small(5, 1, stream=True), tmp_path, events=7, warm_s=0)
    assert (short.errors, short.first_error) == (4, "a response with another number of events")


def test_a_proxy_that_is_not_there_ends_the_load(tools: Tools, ports: list[int], tmp_path: Path) -> None:
    file = traffic.write(traffic.small(), tmp_path / "requests")
    ended = pytest.raises(RuntimeError, match=r"ended without an answer.*refused")
    with tools.load(1, file, connections=1, warm_s=0, seconds=0, spread_ms=0, events=0) as load, ended:
        load.read_line()


def test_the_backend_says_what_routers_ask(tools: Tools, ports: list[int]) -> None:
    assert page(ports[0], "/health") == "ok"
    assert json.loads(page(ports[0], "/v1/models"))["data"][0]["id"] == traffic.MODEL
    for path in ("/get_server_info", "/server_info", "/model_info"):
        assert json.loads(page(ports[0], path))["served_model_name"] == traffic.MODEL
    assert "vllm:num_requests_running{" in page(ports[0], "/metrics")
