"""The clients of `bench.chaos` notice every kind of bad answer. The answers come from a server of our own."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from bench.chaos.clients import Ask, Client, Sample, Verdict, counted, word_for_word
from pointsman.simulator.answers import answer_text, chat_prompt

PLAIN = Ask("r-1", "m", "hello", 3, chat=False, stream=False)
STREAM = Ask("r-1", "m", "hello", 3, chat=True, stream=True)
RIGHT = answer_text("hello", 3)
WORDS = answer_text(chat_prompt(STREAM.body()), 3).split()
USAGE = {"completion_tokens": 3}
ERROR = {"error": {"message": "it broke", "type": "server_error", "param": None, "code": "stream_interrupted"}}


def whole(text: str = RIGHT, tokens: int = 3, reason: str = "length", headers: Mapping[str, str] = {}) -> bytes:
    """A plain answer."""
    usage = {"completion_tokens": tokens}
    body = json.dumps({"choices": [{"text": text, "finish_reason": reason}], "usage": usage}).encode()
    return head(200, **{"content-type": "application/json", "content-length": str(len(body)), **headers}) + body


def head(status: int, **headers: str) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in {"x-request-id": "r-1", **headers}.items())
    return f"HTTP/1.1 {status} x\r\n{lines}\r\n".encode()


def events(*told: Any) -> list[bytes]:
    return [b"data: %b\n\n" % (one if isinstance(one, bytes) else json.dumps(one).encode()) for one in told]


def word(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": reason}]}


def stream(*told: Any, end: bytes = b"0\r\n\r\n") -> bytes:
    """A streamed answer, an event per chunk."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in events(*told))
    kind = {"content-type": "text/event-stream", "transfer-encoding": "chunked"}
    return head(200, **kind) + chunks + end


FIRST, SECOND, THIRD = word(WORDS[0]), word(f" {WORDS[1]}"), word(f" {WORDS[2]}", "length")
LAST = {"choices": [], "usage": USAGE}
DONE = b"[DONE]"


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (whole(), Verdict.SERVED),
        (whole(RIGHT + " 3"), Verdict.WRONG),
        (whole(RIGHT[:-2]), Verdict.WRONG),
        (whole("ffffffff 1 2"), Verdict.WRONG),
        (whole(tokens=2), Verdict.WRONG),
        (whole(reason="stop"), Verdict.WRONG),
        (whole(headers={"x-request-id": "r-2"}), Verdict.WRONG),
        (whole(headers={"content-type": "text/event-stream"}), Verdict.WRONG),
        (whole()[:-5], Verdict.LOST),
        (b"", Verdict.LOST),
        (b"HTTP/1.1 200", Verdict.LOST),
        (b"\x00\xff nonsense\r\n\r\n", Verdict.WRONG),
        (head(200, **{"content-type": "application/json", "content-length": "2"}) + b"{}", Verdict.WRONG),
        (head(200, **{"content-type": "application/json"}) + b"{}", Verdict.WRONG),
        (head(502, **{"content-length": str(len(json.dumps(ERROR)))}) + json.dumps(ERROR).encode(), Verdict.REFUSED),
        (head(502, **{"content-length": "4"}) + b"oops", Verdict.WRONG),
    ],
)
def test_plain_answers(answer: bytes, verdict: Verdict) -> None:
    assert asked(PLAIN, answer).verdict is verdict


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (stream(FIRST, SECOND, THIRD, LAST, DONE), Verdict.SERVED),
        (stream(FIRST, SECOND, SECOND, THIRD, LAST, DONE), Verdict.WRONG),
        (stream(FIRST, THIRD, LAST, DONE), Verdict.WRONG),
        (stream(FIRST, SECOND, LAST, DONE), Verdict.WRONG),
        (stream(FIRST, SECOND, THIRD, DONE), Verdict.WRONG),
        (stream(FIRST, SECOND, THIRD, LAST), Verdict.WRONG),
        (stream(FIRST, SECOND, ERROR), Verdict.BROKEN_OFF),
        (stream(FIRST, THIRD, ERROR), Verdict.WRONG),
        (stream(ERROR), Verdict.WRONG),
        (stream(FIRST, ERROR, DONE), Verdict.WRONG),
        (stream(FIRST, {"error": "it broke"}), Verdict.WRONG),
        (stream(FIRST, SECOND, ERROR, end=b""), Verdict.LOST),
        (stream(FIRST, SECOND, end=b""), Verdict.LOST),
        (stream(FIRST, SECOND, end=b"nonsense\r\n"), Verdict.WRONG),
        (stream(FIRST, SECOND, THIRD, LAST, DONE, end=b"0\r\nmore"), Verdict.LOST),
        (stream(FIRST, SECOND, THIRD, LAST, DONE, end=b"0\r\nmore\r\n"), Verdict.WRONG),
        (whole(), Verdict.WRONG),
    ],
)
def test_streams(answer: bytes, verdict: Verdict) -> None:
    assert asked(STREAM, answer).verdict is verdict


def test_a_second_answer_is_noticed_with_the_next_request() -> None:
    again = PLAIN._replace(request_id="r-2", text="another")
    first, second = asked_all([PLAIN, again], [whole() + whole(), b""])
    assert (first.verdict, second.verdict) == (Verdict.SERVED, Verdict.WRONG)


def test_answers_of_real_models_are_counted() -> None:
    assert asked(PLAIN, whole("whatever it says"), counted).verdict is Verdict.SERVED
    assert asked(PLAIN, whole("whatever", tokens=4), counted).verdict is Verdict.WRONG


def test_a_client_that_leaves() -> None:
    assert asked(STREAM._replace(leaves=True), stream(FIRST, end=b"")).verdict is Verdict.LEFT


def asked(ask: Ask, answer: bytes, check: Any = word_for_word) -> Sample:
    [sample] = asked_all([ask], [answer], check)
    return sample


def asked_all(asks: list[Ask], answers: list[bytes], check: Any = word_for_word) -> list[Sample]:
    """Ask a server that answers with these bytes, one by one on one connection, and hangs up after the last."""

    async def run() -> list[Sample]:
        hung_up = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(asyncio.IncompleteReadError, OSError):  # the client may go first
                for answer in answers:
                    await reader.readuntil(b"\r\n\r\n")
                    writer.write(answer)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            hung_up.set()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            client = Client("127.0.0.1", server.sockets[0].getsockname()[1], check)
            samples = [await client.ask(ask) for ask in asks]
            client.close()
            await hung_up.wait()
            return samples

    return asyncio.run(run())
