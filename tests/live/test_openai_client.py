"""The official client library in front, real llama.cpp behind: whatever it does must work as it does anywhere."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from bench.chaos.planes import LivePlane
from tests.live.manifests import hashed, llama, manifest

KEY, POOR_KEY, FRUGAL_KEY = "sk-live", "sk-poor", "sk-frugal"
SAY: list[ChatCompletionMessageParam] = [{"role": "user", "content": "def open(file):"}]
WRITE_ON = {"ignore_eos": True}
"""A field of llama.cpp's own: as many tokens as were asked for."""


@pytest.fixture(scope="module")
def live(module_plane: LivePlane) -> LivePlane:
    module_plane.up(
        manifest(
            llama("tiny", aliases=["gpt-4o-mini"], parameters={"contextTokens": 1024}),
            llama("vectors", 1, parameters={"embeddings": True}),
            tenants=[
                {"name": "rich"},
                {"name": "poor", "requestsPerMinute": 1},
                {"name": "frugal", "tokensPerMinute": 40},
            ],
            keys=[
                {"tenant": "rich", "sha256": hashed(KEY)},
                {"tenant": "poor", "sha256": hashed(POOR_KEY)},
                {"tenant": "frugal", "sha256": hashed(FRUGAL_KEY)},
            ],
        )
    )
    return module_plane


@pytest.fixture
def client(live: LivePlane) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture
def url(live: LivePlane) -> str:
    return f"{live.url}/v1"


class TestAnswers:
    def test_a_chat(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model="tiny", messages=SAY, max_tokens=8, extra_body=WRITE_ON)
        assert answer.choices[0].message.content
        assert answer.choices[0].message.role == "assistant"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8

    def test_a_streamed_chat_says_the_same_and_its_usage_last(self, client: openai.OpenAI) -> None:
        whole = client.chat.completions.create(
            model="tiny", messages=SAY, max_tokens=8, temperature=0, extra_body=WRITE_ON
        )
        pieces = list(
            client.chat.completions.create(
                model="tiny", messages=SAY, max_tokens=8, temperature=0, extra_body=WRITE_ON,
                stream=True, stream_options={"include_usage": True},
            )
        )  # fmt: skip
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == whole.choices[0].message.content
        assert len(pieces) > 8
        assert pieces[-1].usage is not None
        assert whole.usage is not None
        assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert [piece.choices[0].finish_reason for piece in pieces if piece.choices][-1] == "length"

    def test_a_completion_whole_and_streamed(self, client: openai.OpenAI) -> None:
        whole = client.completions.create(model="tiny", prompt="import os\n", max_tokens=6, temperature=0)
        stream = client.completions.create(model="tiny", prompt="import os\n", max_tokens=6, temperature=0, stream=True)
        assert "".join(piece.choices[0].text for piece in stream if piece.choices) == whole.choices[0].text != ""

    @pytest.mark.parametrize("encoding", ["float", "base64"])
    def test_embeddings(self, client: openai.OpenAI, encoding: Any) -> None:
        texts = ["a signal box", "a signal box", "something else entirely"]
        answer = client.embeddings.create(model="vectors", input=texts, encoding_format=encoding)
        assert [one.index for one in answer.data] == [0, 1, 2]
        assert answer.usage.prompt_tokens > 0
        if encoding == "float":
            first, again, other = (one.embedding for one in answer.data)
            assert math.isclose(sum(x * x for x in first), 1.0, rel_tol=1e-3)
            assert first == pytest.approx(again, abs=1e-3)
            assert first != pytest.approx(other, abs=1e-3)

    def test_models(self, client: openai.OpenAI) -> None:
        assert {model.id for model in client.models.list()} == {"tiny", "gpt-4o-mini", "vectors"}
        assert client.models.retrieve("gpt-4o-mini").owned_by == "tiny"

    def test_an_alias(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model="gpt-4o-mini", messages=SAY, max_tokens=2, extra_body=WRITE_ON)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2


class TestAsync:
    def test_many_at_once_streamed_and_whole(self, url: str) -> None:
        async def one(client: openai.AsyncOpenAI, number: int) -> int:
            text = f"def function_{number}("
            if number % 2:
                done = await client.completions.create(model="tiny", prompt=text, max_tokens=5, extra_body=WRITE_ON)
                assert done.usage is not None
                return done.usage.completion_tokens
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": text}], max_tokens=5, stream=True,
                stream_options={"include_usage": True}, extra_body=WRITE_ON,
            )  # fmt: skip
            usages = [piece.usage.completion_tokens async for piece in stream if piece.usage]
            return usages[-1]

        async def all_of_them() -> list[int]:
            async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
                return await asyncio.gather(*(one(client, number) for number in range(16)))

        assert asyncio.run(all_of_them()) == [5] * 16

    def test_one_that_leaves_a_stream_frees_its_place(self, url: str, live: LivePlane) -> None:
        async def leave() -> None:
            async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
                stream = await client.completions.create(
                    model="tiny", prompt="x = 1", max_tokens=900, stream=True, extra_body=WRITE_ON
                )
                async for _ in stream:
                    break
                await stream.close()

        asyncio.run(leave())
        live.until(lambda: sum(one["in_flight"] for one in live.instances().values()) == 0, "nothing in flight")


class TestSettings:
    @pytest.mark.parametrize("by", ["body", "headers"])
    def test_what_a_request_asks_for_is_in_its_record(self, client: openai.OpenAI, live: LivePlane, by: str) -> None:
        extension = {"priority": "high", "deadline_ms": 60_000, "session": "s-1", "timeout_s": 30}
        headers = {f"x-pointsman-{name.replace('_', '-')}": str(value) for name, value in extension.items()}
        raw = client.chat.completions.with_raw_response.create(
            model="tiny", messages=SAY, max_tokens=2,
            extra_body=WRITE_ON | ({"pointsman": extension} if by == "body" else {}),
            extra_headers={**(headers if by == "headers" else {}), "x-request-id": f"settings-by-{by}"},
        )  # fmt: skip
        assert raw.headers["x-request-id"] == f"settings-by-{by}"
        assert raw.headers["x-pointsman-instance"] in live.pids("tiny")
        record = live.admin.get("requests", f"settings-by-{by}")
        assert record["state"] == "served"
        assert record["priority"] > 0
        assert record["deadline_ms"] == 60_000
        assert record["met_deadline"] is True
        assert record["tenant"] == "rich"
        assert record["output_tokens"] == 2

    def test_turns_of_one_conversation_meet_their_cache_again(self, client: openai.OpenAI) -> None:
        text = "class Signal:\n    def __init__(self):\n        self.state = 'stop'\n" * 16
        first = client.completions.with_raw_response.create(model="tiny", prompt=text, max_tokens=1)
        second = client.completions.with_raw_response.create(model="tiny", prompt=text + "\n", max_tokens=1)
        assert first.headers["x-pointsman-instance"] == second.headers["x-pointsman-instance"]


class TestErrors:
    def test_an_unknown_model(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match='did you mean "tiny"') as raised:
            client.chat.completions.create(model="tinny", messages=SAY)
        assert raised.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nobody")

    def test_a_bad_body(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="priority") as raised:
            client.chat.completions.create(model="tiny", messages=SAY, extra_body={"pointsman": {"priority": "very"}})
        assert raised.value.type == "invalid_request_error"
        messages: Any = "no list"
        with pytest.raises(openai.BadRequestError):  # this one is the engine's own
            client.chat.completions.create(model="tiny", messages=messages)

    def test_a_prompt_that_does_not_fit_is_the_clients_fault_and_not_tried_again(
        self, client: openai.OpenAI, live: LivePlane
    ) -> None:
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(
                model="tiny", prompt="far too long " * 1600, extra_headers={"x-request-id": "too-long"}
            )
        assert raised.value.response.headers["x-request-id"] == "too-long"
        assert live.admin.get("requests", "too-long")["tries"] == 1

    def test_a_wrong_key(self, url: str) -> None:
        with openai.OpenAI(base_url=url, api_key="sk-somebody-else", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError, match="API key"):
                stranger.chat.completions.create(model="tiny", messages=SAY)
            with pytest.raises(openai.AuthenticationError):
                stranger.models.list()

    def test_more_requests_than_allowed(self, url: str) -> None:
        with openai.OpenAI(base_url=url, api_key=POOR_KEY, max_retries=0) as poor:
            poor.chat.completions.create(model="tiny", messages=SAY, max_tokens=1)
            with pytest.raises(openai.RateLimitError, match="1 requests per minute") as raised:
                poor.chat.completions.create(model="tiny", messages=SAY, max_tokens=1)
        assert 1 <= int(raised.value.response.headers["retry-after"]) <= 60
        assert raised.value.code == "rate_limit_exceeded"

    def test_more_tokens_than_allowed(self, url: str) -> None:
        with openai.OpenAI(base_url=url, api_key=FRUGAL_KEY, max_retries=0) as frugal:
            frugal.completions.create(model="tiny", prompt="x = 1", max_tokens=60, extra_body=WRITE_ON)
            with pytest.raises(openai.RateLimitError, match="tokens per minute") as raised:
                frugal.completions.create(model="tiny", prompt="x = 1", max_tokens=1)
        assert int(raised.value.response.headers["retry-after"]) >= 1
