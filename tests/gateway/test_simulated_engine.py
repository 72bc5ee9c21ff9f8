"""The gateway in front of real server processes: the same bytes as without it, and all of their faults."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pointsman.engines import Simulated
from tests.gateway.bed import CHAT_DEPLOYMENT, Bed, MakeBed
from tests.gateway.wire import Message, post
from tests.simulator.servers import Served, serving

ENGINE = Simulated(tokens_per_second=2000, first_token_ms=0, output_tokens=8)
FIFO = {**CHAT_DEPLOYMENT, "scheduling": {"policy": "fifo"}}
PROMPT = {"model": "m", "prompt": "hello"}
PATH = b"/v1/completions"


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[Served, Served]]:
    with serving(ENGINE, "m") as first, serving(ENGINE, "m") as second:
        yield first, second


@pytest.fixture
def pair(make_bed: MakeBed, processes: tuple[Served, Served]) -> Iterator[tuple[Bed, Served]]:
    """A gateway in front of two servers, and the one that gets every request first."""
    bed = make_bed({"upstream": {"firstTokenTimeout": "200ms", "stallTimeout": "200ms"}}, FIFO)
    first, second = processes
    bed.admit(first.port)
    bed.admit(second.port, current_load=5)
    yield bed, first
    first.fetch("/faults", method="DELETE")


def fetch(bed: Bed, **fields: Any) -> Message:
    return bed.fetch(post(PROMPT | fields, PATH, ["x-request-id: it"]))


def without_ids_and_times(body: bytes) -> bytes:
    """Ids and times differ between responses."""
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line and b"[DONE]" not in line]
    return json.dumps(
        [{k: v for k, v in json.loads(line).items() if k not in ("id", "created")} for line in lines]
    ).encode()


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
def test_responses_are_the_same_with_and_without_the_gateway(pair: tuple[Bed, Served], streams: bool) -> None:
    bed, server = pair
    direct = server.fetch("/v1/completions", PROMPT | {"stream": streams}).body
    through = fetch(bed, stream=streams)
    assert through.header("x-pointsman-instance") == "chat-0"
    assert without_ids_and_times(through.body) == without_ids_and_times(direct)
    assert through.body.endswith(direct[-10:])
    assert bed.record("it").output_tokens == 8


BEFORE = ["hang", "reset", "cut", "end", "garbage", "status", "garbage-body", "short-body", "long-body"]


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("fault", BEFORE)
def test_a_fault_before_the_first_byte_is_hidden(pair: tuple[Bed, Served], fault: str, streams: bool) -> None:
    bed, server = pair
    server.fetch("/faults", {"fault": fault, "count": 1})
    got = fetch(bed, stream=streams)
    assert (got.status, got.header("x-pointsman-instance")) == (200, "chat-1")
    record = bed.record("it")
    assert (record.state, [instance for instance, _ in record.failures]) == ("served", ["chat-0"])
    assert record.output_tokens == 8


@pytest.mark.parametrize("fault", ["hang", "reset", "cut", "end", "garbage"])
def test_a_fault_within_a_stream_becomes_an_error_event(pair: tuple[Bed, Served], fault: str) -> None:
    bed, server = pair
    server.fetch("/faults", {"fault": fault, "count": 1, "afterTokens": 3})
    got = fetch(bed, stream=True)
    assert got.status == 200
    *tokens, last = got.events()
    if (
        got.header("x-pointsman-instance") == "chat-1"
    ):  # tokens and fault arrived together, before anything was forwarded
        assert (last, bed.record("it").state) == (b"data: [DONE]", "served")
        return
    assert len(tokens) >= 1
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stream_interrupted"
    assert bed.record("it").state == "failed"


def test_a_slow_server_does_not_count_as_hung(make_bed: MakeBed, processes: tuple[Served, Served]) -> None:
    bed = make_bed({"upstream": {"firstTokenTimeout": "5s"}}, FIFO)
    first, _ = processes
    bed.admit(first.port)
    first.fetch("/faults", {"fault": "slow-headers", "count": 1, "delayMs": 300})
    assert fetch(bed).status == 200
    assert bed.record("it").failures == ()
