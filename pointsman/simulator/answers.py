"""Requests of clients, and the answers to them as bytes.

An answer is a word that identifies its prompt, followed by numbers: `5f2c91aa 1 2 3`. The word and each number count as
one token. Four characters of a prompt also count as one token.
"""

import json
import struct
from base64 import b64encode
from typing import Any, NamedTuple
from zlib import crc32

from pointsman.http.responses import DONE, event
from pointsman.http.server import JSON_HEAD

CHARACTERS_PER_TOKEN = 4
DIMENSIONS = 8
"""Dimensions of an embedding."""


class BadCompletionRequest(Exception):
    """A request that is refused, with status and reason."""

    def __init__(self, status: int, why: str, param: str | None = None) -> None:
        super().__init__(why)
        self.status, self.param = status, param


class CompletionRequest(NamedTuple):
    model: str
    prompt: str
    max_tokens: int | None
    """Maximum tokens of the answer; None if the request sets no limit."""
    stream: bool
    with_usage: bool
    """Whether the last chunk of a stream reports usage."""
    ignore_eos: bool
    """Whether to write exactly `max_tokens` tokens, even if the answer would otherwise be shorter."""


def read_body(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except ValueError as error:
        raise BadCompletionRequest(400, f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadCompletionRequest(400, "the body is not a JSON object")
    return data


def read_request(data: dict[str, Any], prompt: str) -> CompletionRequest:
    """A request, from the fields that chat and completions share."""
    limit = data.get("max_completion_tokens", data.get("max_tokens"))
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise BadCompletionRequest(400, f"max_tokens must be at least 1, found {limit}", "max_tokens")
    if data.get("n") not in (None, 1):
        raise BadCompletionRequest(400, "a simulated server returns one choice only", "n")
    options = data.get("stream_options") or {}
    return CompletionRequest(
        model=str(data.get("model") or ""),
        prompt=prompt,
        max_tokens=limit,
        stream=bool(data.get("stream")),
        with_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        ignore_eos=bool(data.get("ignore_eos")),
    )


def chat_prompt(data: dict[str, Any]) -> str:
    """The messages as one text. The text of the next turn begins with the text of this turn and its answer."""
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadCompletionRequest(400, "messages must be a list with at least one message", "messages")
    lines = []
    for message in messages:
        if not isinstance(message, dict):
            raise BadCompletionRequest(400, "a message must be an object with role and content", "messages")
        lines.append(f"{message.get('role', '')}: {_text(message.get('content'))}\n")
    return "".join(lines) + "assistant: "


def completion_prompt(data: dict[str, Any]) -> str:
    """The prompt as text. The request has one prompt: a text, or a list of token numbers."""
    prompt = data.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return _token_text(prompt)
    if not isinstance(prompt, str):
        raise BadCompletionRequest(
            400, "a simulated server takes one prompt: text, or a list of token numbers", "prompt"
        )
    return prompt


def embedding_inputs(data: dict[str, Any]) -> list[str]:
    given: Any = data.get("input")
    if isinstance(given, list) and given and all(isinstance(token, int) for token in given):
        given = [given]
    texts = [
        _token_text(one) if isinstance(one, list) else one for one in (given if isinstance(given, list) else [given])
    ]
    if not texts or not all(isinstance(one, str) for one in texts):
        raise BadCompletionRequest(400, "input must be text, a list of texts, or lists of token numbers", "input")
    return texts


def _text(content: object) -> str:
    """The text in a message's content. The content is a text, or a list of parts, some of which are text."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _token_text(tokens: list[int]) -> str:
    """A text with four characters for each token, so that the number of tokens stays the same."""
    return "".join(f"{token % 10_000:04}" for token in tokens)


def tokens_of(text: str) -> int:
    """The number of tokens of a text, at least 1."""
    return -(-len(text) // CHARACTERS_PER_TOKEN) or 1


def block_hashes(text: str, block_size: int) -> list[int]:
    """One hash for each full block of tokens. Each hash also depends on all earlier blocks."""
    characters = block_size * CHARACTERS_PER_TOKEN
    hashes: list[int] = []
    before = 0
    for start in range(0, len(text) - characters + 1, characters):
        before = hash((before, text[start : start + characters]))
        hashes.append(before)
    return hashes


def answer_name(prompt: str) -> str:
    """The first word of the answer to a prompt."""
    return f"{crc32(prompt.encode('utf-8', 'surrogatepass')):08x}"


def answer_text(prompt: str, tokens: int) -> str:
    return answer_name(prompt) + "".join(f" {number}" for number in range(1, tokens))


def embedding(text: str, as_base64: bool) -> object:
    """A unit vector that depends only on the text."""
    raw = [crc32(f"{index}{text}".encode("utf-8", "surrogatepass")) / 2**31 - 1 for index in range(DIMENSIONS)]
    length = sum(value * value for value in raw) ** 0.5 or 1.0
    vector = [value / length for value in raw]
    return b64encode(struct.pack(f"<{DIMENSIONS}f", *vector)).decode() if as_base64 else vector


def usage(prompt_tokens: int, cached_tokens: int, written: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def head_for(length: int) -> bytes:
    """The head of a JSON answer of this length, for faults that then send a body of another length."""
    return JSON_HEAD % length


def error_body(status: int, why: str, param: str | None = None) -> bytes:
    """An error in the form of the OpenAI API."""
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    return json.dumps({"error": {"message": why, "type": kind, "param": param, "code": status}}).encode()


class Wording:
    """The bytes of one answer to a chat or a completion, as a stream or as a whole."""

    def __init__(self, request: CompletionRequest, chat: bool, number: int, created: int) -> None:
        self._chat = chat
        self._name = answer_name(request.prompt)
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
            "object": "chat.completion" if chat else "text_completion",
            "created": created,
            "model": request.model,
        }
        if chat and request.stream:
            self._head["object"] = "chat.completion.chunk"
        opening = json.dumps(self._head)[:-1] + ', "choices": [{"index": 0, '
        self._before = b"data: " + opening.encode() + (b'"delta": {"content": "' if chat else b'"text": "')
        self._after = (b'"}' if chat else b'"') + b', "logprobs": null, "finish_reason": null}]}\n\n'

    def first(self) -> bytes:
        """The event before the first token of a stream."""
        return self._event({"role": "assistant", "content": ""}, None) if self._chat else b""

    def token(self, number: int) -> bytes:
        """The event for one token; the first token has number 0."""
        word = b" %d" % number if number else self._name.encode()
        return self._before + word + self._after

    def last(self, reason: str, used: dict[str, Any] | None) -> bytes:
        """The events after the last token of a stream."""
        tail = self._event({} if self._chat else "", reason)
        if used is not None:
            tail += event(json.dumps({**self._head, "choices": [], "usage": used}).encode())
        return tail + DONE

    def whole(self, tokens: int, reason: str, used: dict[str, Any]) -> bytes:
        text = self._name + "".join(f" {number}" for number in range(1, tokens))
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        return json.dumps({**self._head, "choices": [choice], "usage": used}).encode()

    def _event(self, content: object, reason: str | None) -> bytes:
        key = "delta" if self._chat else "text"
        choice = {"index": 0, key: content, "logprobs": None, "finish_reason": reason}
        return event(json.dumps({**self._head, "choices": [choice]}).encode())
