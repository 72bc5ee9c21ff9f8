"""The clients of `bench.chaos` detect every kind of bad response, sent here by a server of the test."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from bench.chaos.clients import Client, LoadRequest, Sample, Verdict, check_text, check_token_count
from pointsman.simulator.answers import answer_text, chat_prompt

PLAIN = LoadRequest("r-1", "m", "hello", 3, chat=False, stream=False)
STREAM = LoadRequest("r-1", "m", "hello", 3, chat=True, stream=True)
RIGHT = answer_text("hello", 3)
WORDS = answer_text(chat_prompt(STREAM.body()), 3).split()
USAGE = {"completion_tokens": 3}
ERROR = {"error": {"message": "it broke", "type": "server_error", "param": None, "code": "stream_interrupted"}}


def plain(text: str = RIGHT, tokens: int = 3, reason: str = "length", headers: Mapping[str, str] = {}) -> bytes:
    """A response without streaming."""
    usage = {"completion_tokens": tokens}
    body = json.dumps({"choices": [{"text": text, "finish_reason": reason}], "usage": usage}).encode()
    return head(200, **{"content-type": "application/json", "content-length": str(len(body)), **headers}) + body


def head(status: int, **headers: str) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in {"x-request-id": "r-1", **headers}.items())
    return f"HTTP/1.1 {status} x\r\n{lines}\r\n".encode()


def events(*payloads: Any) -> list[bytes]:
    return [b"data: %b\n\n" % (one if isinstance(one, bytes) else json.dumps(one).encode()) for one in payloads]


def word(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": reason}]}


def stream(*payloads: Any, end: bytes = b"0\r\n\r\n") -> bytes:
    """A streamed response, one event per chunk."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in events(*payloads))
    kind = {"content-type": "text/event-stream", "transfer-encoding": "chunked"}
    return head(200, **kind) + chunks + end


FIRST, SECOND, THIRD = word(WORDS[0]), word(f" {WORDS[1]}"), word(f" {WORDS[2]}", "length")
LAST = {"choices": [], "usage": USAGE}
DONE = b"[DONE]"


PLAIN_RESPONSES = {
    "complete": (plain(), Verdict.SERVED),
    "an extra token": (plain(RIGHT + " 3"), Verdict.WRONG),
    "a missing token": (plain(RIGHT[:-2]), Verdict.WRONG),
    "another text": (plain("ffffffff 1 2"), Verdict.WRONG),
    "wrong usage": (plain(tokens=2), Verdict.WRONG),
    "wrong finish reason": (plain(reason="stop"), Verdict.WRONG),
    "wrong request id": (plain(headers={"x-request-id": "r-2"}), Verdict.WRONG),
    "wrong content type": (plain(headers={"content-type": "text/event-stream"}), Verdict.WRONG),
    "cut off in the body": (plain()[:-5], Verdict.LOST),
    "no bytes": (b"", Verdict.LOST),
    "cut off in the status line": (b"HTTP/1.1 200", Verdict.LOST),
    "not HTTP": (b"\x00\xff nonsense\r\n\r\n", Verdict.WRONG),
    "JSON without choices": (
        head(200, **{"content-type": "application/json", "content-length": "2"}) + b"{}",
        Verdict.WRONG,
    ),
    "no content length": (head(200, **{"content-type": "application/json"}) + b"{}", Verdict.WRONG),
    "an error": (
        head(502, **{"content-length": str(len(json.dumps(ERROR)))}) + json.dumps(ERROR).encode(),
        Verdict.REFUSED,
    ),
    "an error without JSON": (head(502, **{"content-length": "4"}) + b"oops", Verdict.WRONG),
}


@pytest.mark.parametrize(("response", "verdict"), PLAIN_RESPONSES.values(), ids=PLAIN_RESPONSES)
def test_plain_responses_are_judged(response: bytes, verdict: Verdict) -> None:
    assert sample_of(PLAIN, response).verdict is verdict


STREAMED_RESPONSES = {
    "complete": (stream(FIRST, SECOND, THIRD, LAST, DONE), Verdict.SERVED),
    "a repeated chunk": (stream(FIRST, SECOND, SECOND, THIRD, LAST, DONE), Verdict.WRONG),
    "a missing chunk": (stream(FIRST, THIRD, LAST, DONE), Verdict.WRONG),
    "no finish reason": (stream(FIRST, SECOND, LAST, DONE), Verdict.WRONG),
    "no usage": (stream(FIRST, SECOND, THIRD, DONE), Verdict.WRONG),
    "no [DONE]": (stream(FIRST, SECOND, THIRD, LAST), Verdict.WRONG),
    "an error after two chunks": (stream(FIRST, SECOND, ERROR), Verdict.INTERRUPTED),
    "an error after a missing chunk": (stream(FIRST, THIRD, ERROR), Verdict.WRONG),
    "an error and no chunks": (stream(ERROR), Verdict.WRONG),
    "[DONE] after an error": (stream(FIRST, ERROR, DONE), Verdict.WRONG),
    "a malformed error": (stream(FIRST, {"error": "it broke"}), Verdict.WRONG),
    "an error and no last chunk": (stream(FIRST, SECOND, ERROR, end=b""), Verdict.LOST),
    "cut off between chunks": (stream(FIRST, SECOND, end=b""), Verdict.LOST),
    "a malformed chunk size": (stream(FIRST, SECOND, end=b"nonsense\r\n"), Verdict.WRONG),
    "cut off in the trailer": (stream(FIRST, SECOND, THIRD, LAST, DONE, end=b"0\r\nmore"), Verdict.LOST),
    "a malformed trailer": (stream(FIRST, SECOND, THIRD, LAST, DONE, end=b"0\r\nmore\r\n"), Verdict.WRONG),
    "not a stream": (plain(), Verdict.WRONG),
}


@pytest.mark.parametrize(("response", "verdict"), STREAMED_RESPONSES.values(), ids=STREAMED_RESPONSES)
def test_streams_are_judged(response: bytes, verdict: Verdict) -> None:
    assert sample_of(STREAM, response).verdict is verdict


def test_a_duplicate_response_is_detected_at_the_next_request() -> None:
    again = PLAIN._replace(request_id="r-2", text="another")
    first, second = samples_of([PLAIN, again], [plain() + plain(), b""])
    assert (first.verdict, second.verdict) == (Verdict.SERVED, Verdict.WRONG)


def test_only_the_token_count_of_real_models_is_checked() -> None:
    assert sample_of(PLAIN, plain("whatever it says"), check_token_count).verdict is Verdict.SERVED
    assert sample_of(PLAIN, plain("whatever", tokens=4), check_token_count).verdict is Verdict.WRONG


def test_a_client_that_disconnects_is_no_failure() -> None:
    assert sample_of(STREAM._replace(disconnects=True), stream(FIRST, end=b"")).verdict is Verdict.DISCONNECTED


def sample_of(request: LoadRequest, response: bytes, check: Any = check_text) -> Sample:
    [sample] = samples_of([request], [response], check)
    return sample


def samples_of(requests: list[LoadRequest], responses: list[bytes], check: Any = check_text) -> list[Sample]:
    """Send requests to a server that returns these bytes in order on one connection, then closes it."""

    async def run() -> list[Sample]:
        closed = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(asyncio.IncompleteReadError, OSError):  # the client may close first
                for response in responses:
                    await reader.readuntil(b"\r\n\r\n")
                    writer.write(response)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            closed.set()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            client = Client("127.0.0.1", server.sockets[0].getsockname()[1], check)
            samples = [await client.send(request) for request in requests]
            client.close()
            await closed.wait()
            return samples

    return asyncio.run(run())
