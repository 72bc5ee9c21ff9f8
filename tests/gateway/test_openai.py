"""What the gateway reads in forwarded responses: events, [DONE] and usage."""

import json
from typing import Any

import msgspec
import pytest

from pointsman.gateway.openai import MAX_APART, BadRequest, ClientHeaders, read_body, usage_of, usage_of_stream
from pointsman.http.buffers import LARGE_BYTES
from pointsman.http.responses import MAX_HELD_BYTES, EventStream, ends_with_done


@pytest.mark.parametrize(
    ("fed", "passed", "held"),
    [
        ([b"data: a\n\n"], [b"data: a\n\n"], b""),
        ([b"data: a\n\ndata: b"], [b"data: a\n\n"], b"data: b"),
        ([b"data: ", b"a\n", b"\ndata: b\n\n"], [b"", b"", b"data: a\n\ndata: b\n\n"], b""),
        ([b"data: a\r\n\r\ndata: b\r\n\r"], [b"data: a\r\n\r\n"], b"data: b\r\n\r"),
        ([b"data: a\r\n\r\ndata: b\r\n\r", b"\n"], [b"data: a\r\n\r\n", b"data: b\r\n\r\n"], b""),
        ([b"data: a\n\n: ping\r\n\r\nx"], [b"data: a\n\n: ping\r\n\r\n"], b"x"),
        ([b"\n\n"], [b"\n\n"], b""),
        ([b""], [b""], b""),
        ([b"x" * MAX_HELD_BYTES], [b"x" * MAX_HELD_BYTES], b""),
        ([b"x" * (MAX_HELD_BYTES - 1), b"y"], [b"", b"x" * (MAX_HELD_BYTES - 1) + b"y"], b""),
    ],
)
def test_only_whole_events_are_passed_on(fed: list[bytes], passed: list[bytes], held: bytes) -> None:
    events = EventStream()
    assert [events.feed(part) for part in fed] == passed
    assert events.held == held


@pytest.mark.parametrize(
    ("text", "number"), [(b"data: a\n\n" * 3, 3), (b"data: a\r\n\r\n" * 2, 2), (b"data: a\ndata: b\n\n", 1)]
)
def test_events_are_counted(text: bytes, number: int) -> None:
    events = EventStream()
    events.feed(text)
    assert events.events == number


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        (b"data: [DONE]\n\n", True),
        (b"data:[DONE]\r\n\r\n", True),
        (b"data: {}\n\ndata: [DONE]", True),
        (b"data: [DONE]\n", True),
        (b"", False),
        (b"data: {}\n\n", False),
        (b'data: {"text": "[DONE]"}\n\n', False),
        (b'data: {"text": "data: [DONE]"}\n\n', False),
        (b"event: [DONE]\n\n", False),
        (b": [DONE]\n\n", False),
        (b"data: [DONE]\n\ndata: {}\n\n", False),
        (b"data: [DONE]\n\n: ping\n\n:\n", True),
        (b"data: {}\n\n: data: [DONE]\n\n", False),
    ],
)
def test_the_end_mark(text: bytes, ended: bool) -> None:
    assert ends_with_done(text) == ended


CHAT = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"usage": CHAT}, (5, 7, None)),
        ({"usage": {**CHAT, "prompt_tokens_details": {"cached_tokens": 3}}}, (5, 7, 3)),
        ({"usage": {**CHAT, "prompt_tokens_details": None}}, (5, 7, None)),
        ({"usage": {"input_tokens": 5, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 2}}}, (5, 7, 2)),
        ({"usage": {"prompt_tokens": 5, "total_tokens": 5}}, (5, None, None)),
        ({"type": "response.completed", "response": {"usage": {"input_tokens": 1, "output_tokens": 2}}}, (1, 2, None)),
        ({"usage": {}}, (None, None, None)),
        ({"usage": None}, None),
        ({}, None),
        ([], None),
        ("text", None),
        ({"usage": "much"}, None),
        ({"usage": {"prompt_tokens": "five"}}, None),
        ({"usage": {"prompt_tokens": -5}}, None),
        ({"usage": {"prompt_tokens": 10**30}}, None),
        ({"response": 5}, None),
    ],
)
def test_tokens_as_the_engine_counted_them(
    body: Any, expected: tuple[int | None, int | None, int | None] | None
) -> None:
    found = usage_of(json.dumps(body).encode())
    assert (None if found is None else (found.input, found.output, found.cached)) == expected


@pytest.mark.parametrize("body", [b"", b"{", b"hello", b"\x00", b'{"usage": {"prompt_tokens": 5}'])
def test_values_without_json_say_so(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        usage_of(body)


def test_a_deeply_nested_response_has_no_usage() -> None:
    assert usage_of(b'{"x": ' + b"[" * 100_000) is None


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}\n\n'
NULL = b'data: {"choices": [{}], "usage": null}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        ([NULL, NULL, USAGE, DONE], True),
        ([NULL, NULL, USAGE + DONE], True),
        ([NULL + NULL + USAGE + DONE], True),
        ([NULL, b'data: {"choices": [{}], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}\n\n', DONE], True),
        ([USAGE.replace(b"\n", b"\r\n"), DONE.replace(b"\n", b"\r\n")], True),
        ([NULL, DONE], False),
        ([b'data: {"text": "\\"usage\\""}\n\n', DONE], False),
        ([b'data: "usage" {\n\n', DONE], False),
        ([], False),
    ],
)
def test_tokens_in_a_stream(pieces: list[bytes], found: bool) -> None:
    events = EventStream()
    for piece in pieces:
        events.feed(piece)
    usage = usage_of_stream(events)
    assert (usage is not None and (usage.input, usage.output) == (5, 7)) == found


def test_headers_are_text_by_lower_cased_name() -> None:
    headers = ClientHeaders({b"x-a": b"1", b"x-b": b"caf\xe9"})
    assert (headers["x-a"], headers.get("x-b"), headers.get("x-c"), headers.get("x-c", "d")) == ("1", "café", None, "d")
    assert headers.get("日本") is None
    assert dict(headers) == {"x-a": "1", "x-b": "café"}
    assert len(headers) == 2
    assert "x-a" in headers
    assert "x-c" not in headers
    with pytest.raises(KeyError):
        headers["x-c"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ('"one"', b'"one"'),
        ('["one", "two"]', (b'"one"', b'"two"')),
        ("[[1, 2], [3]]", (b"[1, 2]", b"[3]")),
        ("[1, 2, 3]", b"[1, 2, 3]"),
        ("[]", b"[]"),
    ],
)
def test_several_prompts_of_a_completion_are_apart(prompt: str, expected: bytes | tuple[bytes, ...]) -> None:
    assert read_body(f'{{"model": "m", "prompt": {prompt}}}'.encode()).as_prompt() == expected


def test_prompts_beyond_a_number_are_hashed_as_one() -> None:
    many = "[" + ", ".join(['"x"'] * (MAX_APART + 1)) + "]"
    assert read_body(f'{{"prompt": {many}}}'.encode()).as_prompt() == many.encode()


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "m", "max_tokens": 3, "stream": True, "unknown": [1]},
        {"model": "m", "cache_salt": None, "tools": [{}], "pointsman": {"priority": "high"}, "n": 2},
        {"model": 1},
        {"model": "m" * 300},
        {"pointsman": {"unknown": 1}},
        [1],
    ],
)
def test_a_large_body_is_read_as_a_small_one(fields: Any) -> None:
    def read(padding: int) -> Any:
        sent = json.dumps(fields).encode()
        try:
            return msgspec.to_builtins(read_body(sent + b" " * padding), enc_hook=bytes)
        except BadRequest as error:
            return str(error)

    assert read(LARGE_BYTES) == read(0)


def test_a_small_field_of_a_large_body_is_bounded() -> None:
    with pytest.raises(BadRequest, match="the field model is too long"):
        read_body(b'{"model": "%b"}' % (b"m" * LARGE_BYTES))
