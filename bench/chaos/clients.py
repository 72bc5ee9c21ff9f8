"""Clients that check everything: one connection each, one request at a time, every answer word for word.

Enters: what to ask. Leaves: a `Sample` per request that says how it ended. The one rule: an answer counts only if it
is whole, framed as HTTP asks for, of this request, and nothing of it is missing, doubled or foreign.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from pointsman.simulator.answers import answer_text, chat_prompt

LONGEST_HEAD = 64 * 1024


class Verdict(StrEnum):
    """How a request ended."""

    SERVED = "served"
    """With the whole answer, and nothing else."""
    BROKEN_OFF = "broken off"
    """A stream that had begun, right up to there, ended with an error event and a proper end of the body."""
    LEFT = "left"
    """The client went away in the middle of a stream, as it had meant to."""
    REFUSED = "refused"
    """With an error status, before any of the answer."""
    LOST = "lost"
    """Without an answer, or cut in silence."""
    WRONG = "wrong"
    """With something that is not the answer."""
    UNREACHABLE = "unreachable"
    """It was not even sent: nobody took the connection."""


class Ask(NamedTuple):
    """One request."""

    request_id: str
    model: str
    text: str
    tokens: int
    chat: bool
    stream: bool
    leaves: bool = False
    """The client of a stream goes away when it has seen the beginning."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        """As it is sent; an answer has exactly `tokens` tokens."""
        said: dict[str, Any] = (
            {"messages": [{"role": "user", "content": self.text}]} if self.chat else {"prompt": self.text}
        )
        said |= {"model": self.model, "max_tokens": self.tokens, "ignore_eos": True, "temperature": 0}
        if self.stream:
            said |= {"stream": True, "stream_options": {"include_usage": True}}
        return said

    def request(self) -> bytes:
        body = json.dumps(self.body()).encode()
        head = f"POST {self.path} HTTP/1.1\r\nhost: chaos\r\ncontent-type: application/json\r\n"
        return f"{head}x-request-id: {self.request_id}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class Said(NamedTuple):
    """What an answer says."""

    text: str
    reason: str
    usage: Mapping[str, Any]


class Sample(NamedTuple):
    """What became of one request."""

    ask: Ask
    verdict: Verdict
    why: str
    """Of whatever is not `SERVED`."""
    instance: str
    status: int
    began: float
    first_at: float | None
    """When the first part of the answer came."""
    ended: float


class Bad(Exception):
    """An answer that is not as it must be."""


class Cut(Exception):
    """The connection ended in the middle."""


Check = Callable[[Ask, Said, bool], None]
"""(what was asked, what was said, whether that should be all of it); raises `Bad`."""


def word_for_word(ask: Ask, said: Said, whole: bool) -> None:
    """What simulated engines answer is known beforehand."""
    prompt = chat_prompt(ask.body()) if ask.chat else ask.text
    right = answer_text(prompt, ask.tokens)
    if said.text != right if whole else not right.startswith(said.text):
        raise Bad(f"it says {said.text!r} instead of {right!r}")
    if whole:
        counted(ask, said, whole)


def counted(ask: Ask, said: Said, whole: bool) -> None:
    """What a real model says is not known, but how much."""
    if whole and said.usage.get("completion_tokens") != ask.tokens:
        raise Bad(f"{ask.tokens} tokens were asked for, usage is {said.usage}")
    if whole and said.reason != "length":
        raise Bad(f"it ends for the reason {said.reason!r}")


class Client:
    """A connection that is opened when needed, and kept."""

    def __init__(self, host: str, port: int, check: Check, patience_s: float = 60.0) -> None:
        self._address = host, port
        self._check = check
        self._patience_s = patience_s
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, ask: Ask) -> Sample:
        """Send a request and read its answer to the end. Never raises."""
        began = time.monotonic()
        reading = Reading(ask, self._check)
        try:
            async with asyncio.timeout(self._patience_s):
                reader, writer = await self._connected()
                writer.write(ask.request())
                await writer.drain()
                verdict, why = await reading.answer(reader)
        except Enough:
            verdict, why = Verdict.LEFT, ""
        except Unreachable as error:
            verdict, why = Verdict.UNREACHABLE, str(error)
        except Bad as error:
            verdict, why = Verdict.WRONG, str(error)
        except (Cut, OSError) as error:
            verdict, why = Verdict.LOST, f"{error}; until then: {reading.body[-200:]!r}"
        except TimeoutError:
            verdict, why = Verdict.LOST, f"no end after {self._patience_s:g} s; until then: {reading.body[-200:]!r}"
        if verdict in (Verdict.WRONG, Verdict.LOST, Verdict.LEFT) or reading.headers.get("connection") == "close":
            self.close()
        instance = reading.headers.get("x-pointsman-instance", "")
        return Sample(ask, verdict, why, instance, reading.status, began, reading.first_at, time.monotonic())

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            try:
                self._reader, self._writer = await asyncio.open_connection(*self._address, limit=LONGEST_HEAD)
            except OSError as error:
                raise Unreachable(str(error)) from error
        return self._reader, self._writer

    def close(self) -> None:
        """The next request opens another."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None


class Unreachable(Exception):
    """Nobody listens."""


class Enough(Exception):
    """The client wants no more."""


class Reading:
    """One answer, as far as it has come."""

    def __init__(self, ask: Ask, check: Check) -> None:
        self._ask = ask
        self._check = check
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.first_at: float | None = None

    async def answer(self, reader: asyncio.StreamReader) -> tuple[Verdict, str]:
        """Read it all, and judge."""
        try:
            await self._read(reader)
        except asyncio.IncompleteReadError as error:
            raise Cut(f"the connection ended after {error.partial[-60:]!r}") from error
        except (asyncio.LimitOverrunError, ValueError) as error:
            raise Bad(f"not HTTP: {error}") from error
        named = self.headers.get("x-request-id", "" if self.status == 200 else self._ask.request_id)
        if named != self._ask.request_id:  # some refusals come before a request has a name
            raise Bad(f"it is the answer to {named!r}")
        if self.status != 200:
            return Verdict.REFUSED, f"{self.status}: {_error(_json(self.body))}"
        kind = self.headers.get("content-type", "")
        if self._ask.stream != kind.startswith("text/event-stream"):
            raise Bad(f"its content type is {kind!r}")
        return self._judge_stream() if self._ask.stream else self._judge_whole()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        start, *lines = head[:-4].split("\r\n")
        if not start.startswith("HTTP/1.1 ") or not start[9:12].isdecimal():
            raise Bad(f"it begins with {start!r}")
        self.status = int(start[9:12])
        for line in lines:
            name, _, value = line.partition(":")
            if name.lower() in self.headers:
                raise Bad(f"the header {name} came twice")
            self.headers[name.lower()] = value.strip()
        if "content-length" in self.headers:
            self.body = await reader.readexactly(int(self.headers["content-length"]))
            self.first_at = time.monotonic()
        elif self.headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
                chunk = await reader.readexactly(size + 2)
                if chunk[-2:] != b"\r\n":
                    raise Bad("a chunk does not end where it said")
                self.first_at = self.first_at or time.monotonic()
                self.body += chunk[:-2]
                if self._ask.leaves:
                    raise Enough
            if await reader.readuntil(b"\r\n") != b"\r\n":
                raise Bad("something follows the last chunk")
        else:
            raise Bad(f"nothing says where it ends: {self.headers}")

    def _judge_whole(self) -> tuple[Verdict, str]:
        answer = _json(self.body)
        try:
            [choice] = answer["choices"]
            text = choice["message"]["content"] if self._ask.chat else choice["text"]
            said = Said(text, choice["finish_reason"], answer["usage"])
        except (KeyError, TypeError, ValueError) as error:
            raise Bad(f"{error!r} in {self.body[:300]!r}") from error
        self._check(self._ask, said, True)
        return Verdict.SERVED, ""

    def _judge_stream(self) -> tuple[Verdict, str]:
        if not self.body.endswith(b"\n\n"):
            raise Bad(f"the last event has no end: {self.body[-200:]!r}")
        events = [event.removeprefix(b"data: ") for event in self.body[:-2].split(b"\n\n")]
        done = events[-1] == b"[DONE]"
        *chunks, last = [_json(event) for event in (events[:-1] if done else events)]
        try:
            said = self._said([*chunks, last] if done else chunks)
        except (KeyError, TypeError, ValueError) as error:
            raise Bad(f"{error!r} in {self.body[-300:]!r}") from error
        self._check(self._ask, said, done)
        if done:
            return Verdict.SERVED, ""
        if not chunks:
            raise Bad(f"an error, although nothing of the answer was out: {last}")
        return Verdict.BROKEN_OFF, _error(last)

    def _said(self, chunks: list[Any]) -> Said:
        text, reason = "", ""
        usage: Mapping[str, Any] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                text += (choice["delta"].get("content") or "") if self._ask.chat else choice["text"]
                reason = choice.get("finish_reason") or reason
            usage = chunk.get("usage") or usage
        return Said(text, reason, usage)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise Bad(f"{error} in {data[:300]!r}") from error


def _error(said: Any) -> str:
    """The message of an error in OpenAI's shape."""
    error = said.get("error") if isinstance(said, dict) else None
    if not isinstance(error, dict) or not {"message", "type", "param", "code"} <= error.keys() or not error["message"]:
        raise Bad(f"not an error as it should be: {said}")
    return str(error["message"])
