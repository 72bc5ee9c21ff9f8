"""What an answer says it took, read from its bytes."""

from typing import Annotated

import msgspec
from msgspec import Meta

from pointsman.http.events import EventStream

READ_UP_TO_BYTES = 1024 * 1024
"""Answers longer than this are not read."""

Tokens = Annotated[int, Meta(ge=0, le=1 << 40)]
"""What an engine says beyond that is nonsense, and is passed over."""


class _Details(msgspec.Struct):
    cached_tokens: Tokens | None = None


class Usage(msgspec.Struct):
    """Tokens, as the engine counted them; None: it did not say."""

    input: int | None
    """Of the prompt."""
    output: int | None
    """Of the answer."""
    cached: int | None
    """Of the prompt, that were in the prefix cache."""


class _Said(msgspec.Struct):
    """Prompt and completion; in the responses API input and output."""

    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Response(msgspec.Struct):
    usage: _Said | None = None


class _Body(msgspec.Struct):
    usage: _Said | None = None
    response: _Response | None = None


_decode = msgspec.json.Decoder(_Body).decode


def usage_of(body: bytes) -> Usage | None:
    """The usage in a JSON answer; None if it has none. Raises `msgspec.DecodeError` if it is not JSON."""
    try:
        read = _decode(body)
    except (msgspec.ValidationError, RecursionError):  # JSON of another shape
        return None
    said = read.usage
    if said is None and read.response is not None:
        said = read.response.usage
    if said is None:
        return None
    details = said.prompt_tokens_details or said.input_tokens_details
    return Usage(
        said.input_tokens if said.prompt_tokens is None else said.prompt_tokens,
        said.output_tokens if said.completion_tokens is None else said.completion_tokens,
        None if details is None else details.cached_tokens,
    )


def usage_of_stream(stream: EventStream) -> Usage | None:
    """The usage in the last events of a stream; None if they have none."""
    for piece in (stream.last, stream.before_last):
        if b'"usage"' not in piece:
            continue
        for line in reversed(piece.splitlines()):
            if line.startswith(b"data:") and b'"usage"' in line:
                try:
                    usage = usage_of(line[5:])
                except msgspec.DecodeError:
                    continue
                if usage is not None:
                    return usage
    return None
