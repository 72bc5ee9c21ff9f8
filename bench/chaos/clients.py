"""Clients that check everything: one connection each, one request at a time, the full text of every response.

Enters: requests. Leaves: a `Sample` per request with its verdict. The one rule: a response counts as served only if it
is complete, valid HTTP, and belongs to this request, without missing, repeated or foreign text.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from pointsman.simulator.answers import answer_text, chat_prompt

MAX_HEAD_BYTES = 64 * 1024


class Verdict(StrEnum):
    """How a request ended."""

    SERVED = "served"
    """The complete response arrived, and nothing else."""
    INTERRUPTED = "interrupted"
    """A stream, correct so far, ended with an error event and the last chunk."""
    DISCONNECTED = "disconnected"
    """The client closed the connection during the stream, on purpose."""
    REFUSED = "refused"
    """An error status arrived instead of a response."""
    LOST = "lost"
    """No response arrived, or it ended without an error event."""
    WRONG = "wrong"
    """Something else than the expected response arrived."""
    UNREACHABLE = "unreachable"
    """The connection was refused, so that nothing was sent."""


class LoadRequest(NamedTuple):
    request_id: str
    model: str
    text: str
    tokens: int
    chat: bool
    stream: bool
    disconnects: bool = False
    """The client closes the connection after the first chunk of a stream."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        """The JSON body. It makes the engine generate exactly `tokens` tokens."""
        body: dict[str, Any] = (
            {"messages": [{"role": "user", "content": self.text}]} if self.chat else {"prompt": self.text}
        )
        body |= {"model": self.model, "max_tokens": self.tokens, "ignore_eos": True, "temperature": 0}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def encode(self, host: str, key: str = "") -> bytes:
        """The request as bytes; with an API key unless that is empty."""
        body = json.dumps(self.body()).encode()
        head = f"POST {self.path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        if key:
            head += f"authorization: Bearer {key}\r\n"
        return f"{head}x-request-id: {self.request_id}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class Completion(NamedTuple):
    """The content of a response."""

    text: str
    finish_reason: str
    usage: Mapping[str, Any]


class Sample(NamedTuple):
    """How one request ended."""

    request: LoadRequest
    verdict: Verdict
    why: str
    """Empty if it was served."""
    instance: str
    status: int
    code: str
    """Code of the error; empty if there is none."""
    began: float
    first_at: float | None
    """When the first part of the response arrived; None if none did."""
    ended: float


class InvalidResponse(Exception):
    """A response is malformed or has the wrong content."""


class Truncated(Exception):
    """The connection ended before the response did."""


Check = Callable[[LoadRequest, Completion, bool], None]
"""(request, completion, whether the completion should be complete); raises `InvalidResponse`."""


def check_text(request: LoadRequest, completion: Completion, complete: bool) -> None:
    """For simulated engines, whose text is known in advance."""
    prompt = chat_prompt(request.body()) if request.chat else request.text
    expected = answer_text(prompt, request.tokens)
    if completion.text != expected if complete else not expected.startswith(completion.text):
        raise InvalidResponse(f"expected the text {expected!r}, got {completion.text!r}")
    if complete:
        check_token_count(request, completion, complete)


def check_token_count(request: LoadRequest, completion: Completion, complete: bool) -> None:
    """For real engines, whose text is not known in advance."""
    if complete and completion.usage.get("completion_tokens") != request.tokens:
        raise InvalidResponse(f"expected {request.tokens} tokens, got usage {completion.usage}")
    if complete and completion.finish_reason != "length":
        raise InvalidResponse(f"expected the finish reason 'length', got {completion.finish_reason!r}")


class Client:
    """A keep-alive connection, opened by the first request."""

    def __init__(self, host: str, port: int, check: Check, timeout_s: float = 60.0, key: str = "") -> None:
        self._address = host, port
        self._check = check
        self._timeout_s = timeout_s
        self._key = key
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, request: LoadRequest) -> Sample:
        """Send a request and read its response to the end. Never raises."""
        began = time.monotonic()
        response = ResponseReader(request, self._check)
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await self._connect()
                writer.write(request.encode("{}:{}".format(*self._address), self._key))
                await writer.drain()
                verdict, why = await response.read(reader)
        except Disconnected:
            verdict, why = Verdict.DISCONNECTED, ""
        except Unreachable as error:
            verdict, why = Verdict.UNREACHABLE, str(error)
        except InvalidResponse as error:
            verdict, why = Verdict.WRONG, str(error)
        except (Truncated, OSError) as error:
            verdict, why = Verdict.LOST, f"{error}; received: {response.body[-200:]!r}"
        except TimeoutError:
            verdict, why = Verdict.LOST, f"not complete after {self._timeout_s:g} s; received: {response.body[-200:]!r}"
        if verdict in (Verdict.WRONG, Verdict.LOST, Verdict.DISCONNECTED) or response.closes_connection:
            self.close()
        instance = response.headers.get("x-pointsman-instance", "")
        ended = time.monotonic()
        return Sample(request, verdict, why, instance, response.status, response.code, began, response.first_at, ended)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            try:
                self._reader, self._writer = await asyncio.open_connection(*self._address, limit=MAX_HEAD_BYTES)
            except OSError as error:
                raise Unreachable(str(error)) from error
        return self._reader, self._writer

    def close(self) -> None:
        """Close the connection. The next request opens another."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None


class Unreachable(Exception):
    """The connection was refused."""


class Disconnected(Exception):
    """The client closes the connection on purpose."""


class ResponseReader:
    """Reads and checks one response."""

    def __init__(self, request: LoadRequest, check: Check) -> None:
        self._request = request
        self._check = check
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.code = ""
        """Code of the error in the response."""
        self.first_at: float | None = None

    @property
    def closes_connection(self) -> bool:
        return self.headers.get("connection") == "close"

    async def read(self, reader: asyncio.StreamReader) -> tuple[Verdict, str]:
        """Read to the end of the response and return the verdict with its reason."""
        try:
            await self._read(reader)
        except asyncio.IncompleteReadError as error:
            raise Truncated(f"the connection ended after {error.partial[-60:]!r}") from error
        except (asyncio.LimitOverrunError, ValueError) as error:
            raise InvalidResponse(f"not HTTP: {error}") from error
        # Some errors are sent before the request has an id.
        request_id = self.headers.get("x-request-id", "" if self.status == 200 else self._request.request_id)
        if request_id != self._request.request_id:
            raise InvalidResponse(f"the response has the request id {request_id!r}")
        if self.status != 200:
            return Verdict.REFUSED, f"{self.status}: {self._error(_json(self.body))}"
        kind = self.headers.get("content-type", "")
        if self._request.stream != kind.startswith("text/event-stream"):
            raise InvalidResponse(f"the content type is {kind!r}")
        return self._check_stream() if self._request.stream else self._check_plain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        start, *lines = head[:-4].split("\r\n")
        if not start.startswith("HTTP/1.1 ") or not start[9:12].isdecimal():
            raise InvalidResponse(f"the status line is {start!r}")
        self.status = int(start[9:12])
        for line in lines:
            name, _, value = line.partition(":")
            if name.lower() in self.headers:
                raise InvalidResponse(f"the header {name} is repeated")
            self.headers[name.lower()] = value.strip()
        if "content-length" in self.headers:
            self.body = await reader.readexactly(int(self.headers["content-length"]))
            self.first_at = time.monotonic()
        elif self.headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
                chunk = await reader.readexactly(size + 2)
                if chunk[-2:] != b"\r\n":
                    raise InvalidResponse("a chunk does not end at its declared size")
                self.first_at = self.first_at or time.monotonic()
                self.body += chunk[:-2]
                if self._request.disconnects:
                    raise Disconnected
            if await reader.readuntil(b"\r\n") != b"\r\n":
                raise InvalidResponse("data follows the last chunk")
        else:
            raise InvalidResponse(f"neither content-length nor chunked: {self.headers}")

    def _check_plain(self) -> tuple[Verdict, str]:
        answer = _json(self.body)
        try:
            [choice] = answer["choices"]
            text = choice["message"]["content"] if self._request.chat else choice["text"]
            completion = Completion(text, choice["finish_reason"], answer["usage"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidResponse(f"{error!r} in {self.body[:300]!r}") from error
        self._check(self._request, completion, True)
        return Verdict.SERVED, ""

    def _check_stream(self) -> tuple[Verdict, str]:
        if not self.body.endswith(b"\n\n"):
            raise InvalidResponse(f"the last event is not terminated: {self.body[-200:]!r}")
        events = [event.removeprefix(b"data: ") for event in self.body[:-2].split(b"\n\n")]
        done = events[-1] == b"[DONE]"
        *chunks, last = [_json(event) for event in (events[:-1] if done else events)]
        try:
            completion = self._completion([*chunks, last] if done else chunks)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidResponse(f"{error!r} in {self.body[-300:]!r}") from error
        self._check(self._request, completion, done)
        if done:
            return Verdict.SERVED, ""
        if not chunks:
            raise InvalidResponse(f"an error event before the first chunk: {last}")
        return Verdict.INTERRUPTED, self._error(last)

    def _completion(self, chunks: list[Any]) -> Completion:
        text, finish_reason = "", ""
        usage: Mapping[str, Any] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                text += (choice["delta"].get("content") or "") if self._request.chat else choice["text"]
                finish_reason = choice.get("finish_reason") or finish_reason
            usage = chunk.get("usage") or usage
        return Completion(text, finish_reason, usage)

    def _error(self, body: Any) -> str:
        """The message of an OpenAI error."""
        error = body.get("error") if isinstance(body, dict) else None
        if not isinstance(error, dict) or not {"message", "type", "param", "code"} <= error.keys():
            raise InvalidResponse(f"not an OpenAI error: {body}")
        if not error["message"]:
            raise InvalidResponse(f"an error without a message: {body}")
        self.code = str(error["code"] or error["type"])
        return str(error["message"])


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise InvalidResponse(f"{error} in {data[:300]!r}") from error
