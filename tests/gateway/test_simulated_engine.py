"""The gateway in front of real server processes: every fault they have, and the same bytes as without the gateway."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pointsman.engines import Simulated
from tests.gateway.bed import CHAT_DEPLOYMENT, Bed, Lay
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
def pair(lay: Lay, processes: tuple[Served, Served]) -> Iterator[tuple[Bed, Served]]:
    """A gateway in front of two servers, of which the first gets every request first; and that one."""
    bed = lay({"upstream": {"firstTokenTimeout": "200ms", "stallTimeout": "200ms"}}, FIFO)
    first, second = processes
    bed.admit(first.port)
    bed.admit(second.port, current_load=5)
    yield bed, first
    first.ask("/faults", method="DELETE")


def ask(bed: Bed, **fields: Any) -> Message:
    return bed.ask(post(PROMPT | fields, PATH, ["x-request-id: it"]))


def same_but_for_names(said: bytes) -> bytes:
    """Ids and times differ from answer to answer."""
    lines = [line.removeprefix(b"data: ") for line in said.split(b"\n\n") if line and b"[DONE]" not in line]
    return json.dumps(
        [{k: v for k, v in json.loads(line).items() if k not in ("id", "created")} for line in lines]
    ).encode()


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
def test_responses_are_the_same_with_and_without_the_gateway(pair: tuple[Bed, Served], streams: bool) -> None:
    bed, server = pair
    direct = server.ask("/v1/completions", PROMPT | {"stream": streams}).body
    through = ask(bed, stream=streams)
    assert through.header("x-pointsman-instance") == "chat-0"
    assert same_but_for_names(through.body) == same_but_for_names(direct)
    assert through.body.endswith(direct[-10:])
    assert bed.record("it").output_tokens == 8


BEFORE = ["hang", "reset", "cut", "end", "garbage", "status", "garbage-body", "short-body", "long-body"]


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("fault", BEFORE)
def test_a_fault_before_the_first_byte_is_hidden(pair: tuple[Bed, Served], fault: str, streams: bool) -> None:
    bed, server = pair
    server.ask("/faults", {"fault": fault, "count": 1})
    got = ask(bed, stream=streams)
    assert (got.status, got.header("x-pointsman-instance")) == (200, "chat-1")
    record = bed.record("it")
    assert (record.state, [who for who, _ in record.failures]) == ("served", ["chat-0"])
    assert record.output_tokens == 8


@pytest.mark.parametrize("fault", ["hang", "reset", "cut", "end", "garbage"])
def test_a_fault_within_a_stream_becomes_an_error_event(pair: tuple[Bed, Served], fault: str) -> None:
    bed, server = pair
    server.ask("/faults", {"fault": fault, "count": 1, "afterTokens": 3})
    got = ask(bed, stream=True)
    assert got.status == 200
    *tokens, last = got.events()
    if got.header("x-pointsman-instance") == "chat-1":  # tokens and fault came at once: nothing was sent yet
        assert (last, bed.record("it").state) == (b"data: [DONE]", "served")
        return
    assert len(tokens) >= 1
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stream_interrupted"
    assert bed.record("it").state == "refused"


def test_a_slow_server_does_not_count_as_hung(lay: Lay, processes: tuple[Served, Served]) -> None:
    bed = lay({"upstream": {"firstTokenTimeout": "5s"}}, FIFO)
    first, _ = processes
    bed.admit(first.port)
    first.ask("/faults", {"fault": "slow-headers", "count": 1, "delayMs": 300})
    assert ask(bed).status == 200
    assert bed.record("it").failures == ()
