"""The official OpenAI client against real llama.cpp instances behind the gateway."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from bench.chaos.planes import LivePlane
from tests.live.manifests import hashed, llama, manifest

KEY, FEW_REQUESTS_KEY, FEW_TOKENS_KEY = "sk-live", "sk-few-requests", "sk-few-tokens"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "def open(file):"}]
IGNORE_EOS = {"ignore_eos": True}
"""A llama.cpp extension: generate exactly max_tokens tokens."""


@pytest.fixture(scope="module")
def live(module_plane: LivePlane) -> LivePlane:
    module_plane.up(
        manifest(
            llama("tiny", aliases=["gpt-4o-mini"], parameters={"contextTokens": 1024}),
            llama("vectors", 1, parameters={"embeddings": True}),
            tenants=[
                {"name": "unlimited"},
                {"name": "few-requests", "requestsPerMinute": 1},
                {"name": "few-tokens", "tokensPerMinute": 40},
            ],
            keys=[
                {"tenant": "unlimited", "sha256": hashed(KEY)},
                {"tenant": "few-requests", "sha256": hashed(FEW_REQUESTS_KEY)},
                {"tenant": "few-tokens", "sha256": hashed(FEW_TOKENS_KEY)},
            ],
        )
    )
    return module_plane


@pytest.fixture
def client(live: LivePlane) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def url(live: LivePlane) -> str:
    return f"{live.url}/v1"


class TestResponses:
    def test_chat(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, extra_body=IGNORE_EOS)
        assert answer.choices[0].message.content
        assert answer.choices[0].message.role == "assistant"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8

    def test_a_streamed_chat_has_the_same_text_and_ends_with_its_usage(self, client: openai.OpenAI) -> None:
        whole = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=8, temperature=0, extra_body=IGNORE_EOS
        )
        pieces = list(
            client.chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=8, temperature=0, extra_body=IGNORE_EOS,
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

    def test_a_streamed_completion_has_the_same_text(self, client: openai.OpenAI) -> None:
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

    def test_other_paths_of_the_engine_are_passed_on(self, live: LivePlane) -> None:
        asked = {"model": "tiny", "content": "import os"}
        answer = httpx.post(f"{live.url}/tokenize", json=asked, headers={"authorization": f"Bearer {KEY}"}, timeout=30)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["tokens"]) > 1

    def test_streams_without_usage_are_counted(self, client: openai.OpenAI, live: LivePlane) -> None:
        stream = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=6, stream=True, extra_body=IGNORE_EOS,
            extra_headers={"x-request-id": "usage-not-asked-for"},
        )  # fmt: skip
        assert [piece for piece in stream if piece.usage] == []
        assert live.admin.get("requests", "usage-not-asked-for")["output_tokens"] == 6

    def test_models_are_listed_with_their_aliases(self, client: openai.OpenAI) -> None:
        assert {model.id for model in client.models.list()} == {"tiny", "gpt-4o-mini", "vectors"}
        assert client.models.retrieve("gpt-4o-mini").owned_by == "tiny"

    def test_an_alias_serves_its_model(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="gpt-4o-mini", messages=MESSAGES, max_tokens=2, extra_body=IGNORE_EOS
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2


class TestAsync:
    def test_concurrent_requests_with_and_without_streaming(self, url: str) -> None:
        async def one(client: openai.AsyncOpenAI, number: int) -> int:
            text = f"def function_{number}("
            if number % 2:
                done = await client.completions.create(model="tiny", prompt=text, max_tokens=5, extra_body=IGNORE_EOS)
                assert done.usage is not None
                return done.usage.completion_tokens
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": text}], max_tokens=5, stream=True,
                stream_options={"include_usage": True}, extra_body=IGNORE_EOS,
            )  # fmt: skip
            usages = [piece.usage.completion_tokens async for piece in stream if piece.usage]
            return usages[-1]

        async def send_all() -> list[int]:
            async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
                return await asyncio.gather(*(one(client, number) for number in range(16)))

        assert asyncio.run(send_all()) == [5] * 16

    def test_closing_a_stream_releases_its_slot(self, url: str, live: LivePlane) -> None:
        async def close_early() -> None:
            async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
                stream = await client.completions.create(
                    model="tiny", prompt="x = 1", max_tokens=900, stream=True, extra_body=IGNORE_EOS
                )
                async for _ in stream:
                    break
                await stream.close()

        asyncio.run(close_early())
        live.until(lambda: sum(one["in_flight"] for one in live.instances().values()) == 0, "nothing in flight")


class TestSettings:
    @pytest.mark.parametrize("by", ["body", "headers"])
    def test_request_settings_are_recorded(self, client: openai.OpenAI, live: LivePlane, by: str) -> None:
        extension = {"priority": "high", "deadline_ms": 60_000, "session": "s-1", "timeout_s": 30}
        headers = {f"x-pointsman-{name.replace('_', '-')}": str(value) for name, value in extension.items()}
        raw = client.chat.completions.with_raw_response.create(
            model="tiny", messages=MESSAGES, max_tokens=2,
            extra_body=IGNORE_EOS | ({"pointsman": extension} if by == "body" else {}),
            extra_headers={**(headers if by == "headers" else {}), "x-request-id": f"settings-by-{by}"},
        )  # fmt: skip
        assert raw.headers["x-request-id"] == f"settings-by-{by}"
        assert raw.headers["x-pointsman-instance"] in live.pids("tiny")
        record = live.admin.get("requests", f"settings-by-{by}")
        assert record["state"] == "served"
        assert record["priority"] > 0
        assert record["deadline_ms"] == 60_000
        assert record["met_deadline"] is True
        assert record["tenant"] == "unlimited"
        assert record["output_tokens"] == 2

    def test_turns_of_one_conversation_reuse_the_prefix_cache(self, client: openai.OpenAI) -> None:
        text = "class Signal:\n    def __init__(self):\n        self.state = 'stop'\n" * 16
        first = client.completions.with_raw_response.create(model="tiny", prompt=text, max_tokens=1)
        second = client.completions.with_raw_response.create(model="tiny", prompt=text + "\n", max_tokens=1)
        assert first.headers["x-pointsman-instance"] == second.headers["x-pointsman-instance"]


class TestErrors:
    def test_an_unknown_model_is_not_found(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match='did you mean "tiny"') as raised:
            client.chat.completions.create(model="tinny", messages=MESSAGES)
        assert raised.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("missing")

    def test_an_invalid_body_is_a_bad_request(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="priority") as raised:
            client.chat.completions.create(
                model="tiny", messages=MESSAGES, extra_body={"pointsman": {"priority": "very"}}
            )
        assert raised.value.type == "invalid_request_error"
        messages: Any = "not a list"
        with pytest.raises(openai.BadRequestError):  # raised by the engine
            client.chat.completions.create(model="tiny", messages=messages)

    def test_a_prompt_beyond_the_context_is_a_bad_request_and_not_retried(
        self, client: openai.OpenAI, live: LivePlane
    ) -> None:
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(
                model="tiny", prompt="far too long " * 1600, extra_headers={"x-request-id": "too-long"}
            )
        assert raised.value.response.headers["x-request-id"] == "too-long"
        assert live.admin.get("requests", "too-long")["tries"] == 1

    def test_an_unknown_key_is_rejected(self, url: str) -> None:
        with openai.OpenAI(base_url=url, api_key="sk-unknown", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="API key"):
                client.chat.completions.create(model="tiny", messages=MESSAGES)
            with pytest.raises(openai.AuthenticationError):
                client.models.list()

    def test_the_request_limit_of_a_tenant(self, url: str) -> None:
        with openai.OpenAI(base_url=url, api_key=FEW_REQUESTS_KEY, max_retries=0) as client:
            client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
            with pytest.raises(openai.RateLimitError, match="1 requests per minute") as raised:
                client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
        assert 1 <= int(raised.value.response.headers["retry-after"]) <= 60
        assert raised.value.code == "rate_limit_exceeded"

    def test_the_token_limit_of_a_tenant(self, url: str) -> None:
        with openai.OpenAI(base_url=url, api_key=FEW_TOKENS_KEY, max_retries=0) as client:
            client.completions.create(model="tiny", prompt="x = 1", max_tokens=60, extra_body=IGNORE_EOS)
            with pytest.raises(openai.RateLimitError, match="tokens per minute") as raised:
                client.completions.create(model="tiny", prompt="x = 1", max_tokens=1)
        assert int(raised.value.response.headers["retry-after"]) >= 1
