"""Anthropic's API with its official client: translated for engines with chat completions, passed on to others."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from pointsman.gateway.messages import chat_request
from pointsman.gateway.openai import BadRequest
from tests.gateway.backends import (
    DONE,
    LAST_CHUNK,
    STREAM,
    BackendConnection,
    answer,
    answers,
    chunk,
    completion,
    stream,
)
from tests.gateway.bed import Bed, MakeBed
from tests.gateway.wire import post, wait_for
from tests.live.manifests import hashed

HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOL: Any = {
    "name": "weather",
    "description": "of a place",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}


def data(**chunk: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(chunk).encode()


def delta(finish: str | None = None, **said: Any) -> bytes:
    return data(choices=[{"index": 0, "delta": said, "finish_reason": finish}])


USAGE = data(
    choices=[],
    usage={"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}},
)
TEXT = [delta(role="assistant", content=""), delta(content="Hel"), delta(content="lo"), delta("stop"), USAGE, DONE]
CALLS = [
    delta(reasoning_content="I must look."),
    delta(content="Let me see."),
    delta(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "weather", "arguments": ""}}]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": '{"place":'}}]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": '"Rome"}'}}]),
    delta(tool_calls=[{"index": 1, "id": "c2", "function": {"name": "weather", "arguments": '{"place":"Oslo"}'}}]),
    delta("tool_calls"),
    USAGE,
    DONE,
]


@pytest.fixture
def client(bed: Bed) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=bed.listeners.url, api_key="sk", max_retries=0) as client:
        yield client


class TestTranslated:
    def test_a_message(self, bed: Bed, client: anthropic.Anthropic) -> None:
        backend = bed.backend(answers(answer(completion("Hi"))))
        got = client.messages.create(
            model="other-name",
            messages=HELLO,
            max_tokens=5,
            system="Be short",
            stop_sequences=["X"],
            extra_body={"temperature": 0.5},
        )
        assert (got.model, got.role, got.stop_reason, got.stop_sequence) == (
            "other-name",
            "assistant",
            "end_turn",
            None,
        )
        assert [(block.type, getattr(block, "text", "")) for block in got.content] == [("text", "Hi")]
        assert (got.usage.input_tokens, got.usage.output_tokens) == (5, 2)
        assert backend.received[0].start.startswith(b"POST /v1/chat/completions ")
        assert json.loads(backend.received[0].body) == {
            "model": "m",
            "max_tokens": 5,
            "temperature": 0.5,
            "stop": ["X"],
            "messages": [{"role": "system", "content": "Be short"}, *HELLO],
        }
        assert bed.newest().model == "other-name"
        wait_for(lambda: bed.gateway.metrics.of("chat").output_tokens == 2)

    @pytest.mark.parametrize("together", [False, True])
    def test_a_stream(self, bed: Bed, client: anthropic.Anthropic, together: bool) -> None:
        bed.backend(answers(stream(b"".join(TEXT)) if together else stream(*TEXT)))
        with client.messages.stream(model="m", messages=HELLO, max_tokens=5) as events:
            assert "".join(events.text_stream) == "Hello"
            got = events.get_final_message()
        assert (got.stop_reason, got.usage.input_tokens, got.usage.cache_read_input_tokens) == ("end_turn", 4, 5)
        assert got.usage.output_tokens == 4
        wait_for(lambda: bed.gateway.metrics.of("chat").tokens() == {"input": 9, "output": 4, "cached": 5})

    def test_tools(self, bed: Bed, client: anthropic.Anthropic) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
        said = {"choices": [{"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}]}
        backend = bed.backend(answers(answer(said)))
        got = client.messages.create(
            model="m", messages=HELLO, max_tokens=50, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}
        )
        assert got.stop_reason == "tool_use"
        use: Any = got.content[0]
        assert (use.type, use.name, use.input, use.id) == ("tool_use", "weather", {"place": "Rome"}, "c1")
        sent = json.loads(backend.received[0].body)
        parameters = TOOL["input_schema"]
        function = {"name": "weather", "description": "of a place", "parameters": parameters}
        assert sent["tools"] == [{"type": "function", "function": function}]
        assert sent["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
        result: Any = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Sunny"}]}
        turns: Any = [*HELLO, {"role": "assistant", "content": got.content}, {"role": "user", "content": [result]}]
        client.messages.create(model="m", messages=turns, max_tokens=50, tools=[TOOL])
        sent = json.loads(backend.received[1].body)
        call["function"]["arguments"] = '{"place":"Rome"}'  # type: ignore[index]
        assert sent["messages"][1:] == [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
        ]

    def test_streamed_tools_and_thoughts(self, bed: Bed) -> None:
        bed.backend(answers(stream(*CALLS)))
        url = bed.listeners.url

        async def ask() -> Any:
            async with (
                anthropic.AsyncAnthropic(base_url=url, api_key="sk", max_retries=0) as client,
                client.messages.stream(model="m", messages=HELLO, max_tokens=5, tools=[TOOL]) as events,
            ):
                return await events.get_final_message()

        got = asyncio.run(ask())
        assert got.stop_reason == "tool_use"
        assert [block.type for block in got.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [block.input for block in got.content[2:]] == [{"place": "Rome"}, {"place": "Oslo"}]
        assert (got.content[0].thinking, got.content[1].text) == ("I must look.", "Let me see.")

    def test_tokens_are_counted_by_the_engine(self, bed: Bed, client: anthropic.Anthropic) -> None:
        backend = bed.backend(answers(answer(completion())))
        assert client.messages.count_tokens(model="m", messages=HELLO).input_tokens == 5
        assert json.loads(backend.received[0].body)["max_tokens"] == 1

    def test_a_stream_that_breaks_off_ends_with_an_error(self, bed: Bed, client: anthropic.Anthropic) -> None:
        def cut(connection: BackendConnection) -> None:
            connection.request()
            connection.send(STREAM + chunk(TEXT[1]) + LAST_CHUNK)

        bed.backend(cut)
        with (
            pytest.raises(anthropic.APIStatusError, match="without the end mark"),
            client.messages.stream(model="m", messages=HELLO, max_tokens=5) as events,
        ):
            events.until_done()

    def test_an_engine_that_answers_nonsense_is_replaced(self, bed: Bed, client: anthropic.Anthropic) -> None:
        bed.backend(answers(answer({"choices": []})))
        bed.backend(answers(answer(completion("Hi"))))
        for _ in range(4):
            assert client.messages.create(model="m", messages=HELLO, max_tokens=5).stop_reason == "end_turn"


NATIVE = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": "Hi"}],
    "stop_reason": "end_turn", "stop_sequence": None,
    "usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 2},
}  # fmt: skip


class TestPassedOn:
    def test_an_engine_with_the_api_gets_the_request_unchanged(self, bed: Bed, client: anthropic.Anthropic) -> None:
        backend = bed.backend(answers(answer(NATIVE)), serves_messages=True)
        got = client.messages.create(model="other-name", messages=HELLO, max_tokens=5)
        assert got.id == "msg_1"
        assert backend.received[0].start.startswith(b"POST /v1/messages ")
        assert json.loads(backend.received[0].body) == {"model": "m", "messages": HELLO, "max_tokens": 5}
        assert backend.received[0].header("x-api-key") is None
        wait_for(lambda: bed.gateway.metrics.of("chat").tokens() == {"input": 7, "output": 2, "cached": 4})

    def test_an_engine_that_lacks_it_gets_translations_from_then_on(
        self, bed: Bed, client: anthropic.Anthropic
    ) -> None:
        def old(connection: BackendConnection) -> None:
            while (request := connection.request()) is not None:
                has_it = b"/chat/completions" in request.start
                connection.send(answer(completion("Hi")) if has_it else answer({"detail": "Not Found"}, 404))

        backend = bed.backend(old, serves_messages=True)
        for _ in range(3):
            assert client.messages.create(model="m", messages=HELLO, max_tokens=5).stop_reason == "end_turn"
        assert [b"/chat/" in one.start for one in backend.received] == [False, True, True, True]


class TestErrors:
    def test_unknown_model(self, bed: Bed, client: anthropic.Anthropic) -> None:
        with pytest.raises(anthropic.NotFoundError, match="there is no model") as raised:
            client.messages.create(model="mm", messages=HELLO, max_tokens=5)
        assert raised.value.body["type"] == "error"  # type: ignore[index]

    def test_an_error_of_the_engine_has_the_form_of_the_api(self, bed: Bed, client: anthropic.Anthropic) -> None:
        bed.backend(answers(answer({"error": {"message": "too long", "code": 400}}, 400)))
        with pytest.raises(anthropic.BadRequestError, match="too long") as raised:
            client.messages.create(model="m", messages=HELLO, max_tokens=5)
        assert raised.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]

    def test_what_cannot_be_translated_is_refused(self, bed: Bed, client: anthropic.Anthropic) -> None:
        backend = bed.backend()
        search: Any = {"type": "web_search_20250305", "name": "web_search"}
        with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
            client.messages.create(model="m", messages=HELLO, max_tokens=5, tools=[search])
        assert backend.received == []

    def test_keys_of_tenants(self, make_bed: MakeBed) -> None:
        keys = {"tenants": [{"name": "t"}], "keys": [{"tenant": "t", "sha256": hashed("sk-right")}]}
        bed = make_bed(keys)
        bed.backend(answers(answer(completion())))
        for key, good in (("sk-right", True), ("sk-wrong", False)):
            with anthropic.Anthropic(base_url=bed.listeners.url, api_key=key, max_retries=0) as client:
                if good:
                    client.messages.create(model="m", messages=HELLO, max_tokens=5)
                    assert bed.newest().user_id == "t"
                else:
                    with pytest.raises(anthropic.AuthenticationError) as raised:
                        client.messages.create(model="m", messages=HELLO, max_tokens=5)
                    assert raised.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (
            [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}],
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
        ),
        (
            [{"type": "text", "text": "a"}, {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}],
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "http://x/y.png"}}],
        ),
        ([{"type": "document", "source": {"type": "text", "data": "a"}}], "a"),
    ],
)
def test_what_users_say(content: Any, expected: Any) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    assert json.loads(chat_request(body))["messages"] == [{"role": "user", "content": expected}]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "x"},
        {"messages": ["x"]},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
        {"messages": [], "tools": [5]},
        {"messages": [], "tools": [TOOL], "tool_choice": {"type": "maybe"}},
        {"messages": [], "metadata": 5},
        {"messages": [], "output_config": {"format": {"type": "xml"}}},
        {},
    ],
)
def test_malformed_requests_are_refused(fields: Any) -> None:
    with pytest.raises(BadRequest):
        chat_request(json.dumps(fields).encode())


class TestPaths:
    @pytest.mark.parametrize("path", [b"/v1/rerank", b"/v1/score", b"/tokenize", b"/v1/images/generations"])
    def test_paths_of_engines_are_passed_on(self, bed: Bed, path: bytes) -> None:
        backend = bed.backend(answers(answer({"results": []})))
        body = {"model": "other-name", "query": "q", "documents": ["a", "b"]}
        assert bed.fetch(post(body, path)).json() == {"results": []}
        assert backend.received[0].start.startswith(b"POST %b " % path)
        assert json.loads(backend.received[0].body) == body | {"model": "m"}

    def test_a_form_and_an_answer_that_is_no_json(self, bed: Bed) -> None:
        backend = bed.backend(answers(answer(b"1\n00:00 --> 00:02\nHello", headers=["content-type: text/plain"])))
        form = (
            b'--XX\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\nRIFF\r\n\r\n--X\x00\r\n'
            b'--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\nother-name\r\n--XX--\r\n'
        )
        head = (
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=XX\r\n"
        )
        got = bed.fetch(head + b"content-length: %d\r\n\r\n" % len(form) + form)
        assert (got.status, got.body) == (200, b"1\n00:00 --> 00:02\nHello")
        assert backend.received[0].body == form.replace(b"\r\n\r\nother-name\r\n", b"\r\n\r\nm\r\n")
        assert bed.newest().model == "other-name"
        cut = bed.fetch(head + b"content-length: 10\r\n\r\n" + form[:10])
        assert (cut.status, cut.error["code"]) == (400, "invalid_body")

    def test_an_unknown_path_names_the_setting_and_a_listed_one_is_passed_on(self, make_bed: MakeBed) -> None:
        bed = make_bed({"paths": ["/infill"]})
        backend = bed.backend(answers(answer({})))
        for path in (b"/v1/rerank", b"/nowhere"):
            got = bed.fetch(post({"model": "m"}, path))
            assert got.status == 404
            assert "gateway.paths" in got.error["message"]
        assert bed.fetch(post({"model": "m"}, b"/infill")).status == 200
        assert len(backend.received) == 1


def test_translated_tools_are_bounded() -> None:
    """A tool of 3 bytes takes 2 µs to translate: 32 KiB of them, which are not counted, took 0.02 s."""
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    assert len(json.loads(chat_request(json.dumps(body | {"tools": [{}] * 1000}).encode()))["tools"]) == 1000
    with pytest.raises(BadRequest, match="tools: expected at most 1,000, found 1,001"):
        chat_request(json.dumps(body | {"tools": [{}] * 1001}).encode())
