"""Official clients against llama.cpp instances with a key, and against an engine with a key and another name for its
model, which is the plane of the first ones."""

import asyncio
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx2 as httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from bench.chaos.planes import LivePlane
from tests.live.manifests import LIFECYCLE, hashed, llama, manifest

KEY, FAR_KEY, ENGINE_KEY = "sk-near", "sk-far-away", "sk-of-the-engine"
IGNORE_EOS = {"ignore_eos": True}
SERVED = "org/tiny-pydoc"
CALL = "Return"
"""How a call of a tool begins: one token, which a request can make as likely as it wants."""
TEMPLATE = f"""\
{{% for message in messages %}}{{{{ message.role }}}}: {{% if message.content %}}{{{{ message.content }}}}{{% endif %}}
{{%- for call in message.tool_calls or [] -%}}
{CALL}{{"name": "{{{{ call.function.name }}}}", "arguments": {{{{ call.function.arguments | tojson }}}}}}
{{%- endfor %}}
{{% endfor %}}{{% for tool in tools or [] %}}{{{{ tool | tojson }}}}
{{% endfor %}}{{% if add_generation_prompt %}}assistant: {{% endif %}}"""
"""From this llama.cpp learns the form of calls, and keeps to it, whatever the model would say."""


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlane]:
    """Another gateway, which knows neither the names nor the keys of the first one."""
    plane = LivePlane(tmp_path_factory.mktemp("far"))
    plane.environment["FAR_ENGINE_KEY"] = ENGINE_KEY
    parameters = {"contextTokens": 1024, "slots": 4, "extra": {"use_jinja": True, "chat_template": TEMPLATE}}
    text = llama("far", 1, parameters=parameters) | {"model": SERVED, "aliases": ["unused"]}
    vectors = llama("vectors", 1, parameters={"embeddings": True}) | {"model": "org/vectors"}
    for deployment in (text, vectors):
        deployment["engine"] |= {"servedModel": "name-of-the-engine", "apiKeyEnv": "FAR_ENGINE_KEY"}
    keys = [{"tenant": "near", "sha256": hashed(FAR_KEY)}]
    plane.up(manifest(text, vectors, tenants=[{"name": "near"}], keys=keys))
    yield plane
    plane.close()


@pytest.fixture(scope="module")
def near(far: LivePlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlane]:
    folder = tmp_path_factory.mktemp("near")
    (folder / "far.key").write_text(f"{FAR_KEY}\n")
    plane = LivePlane(folder)
    endpoint = {"url": far.url, "name": "far", "servedModel": SERVED, "apiKeyFile": "far.key"}
    text = {"name": "near", "model": "tiny", "aliases": ["gpt-4o-mini"], "endpoints": [endpoint]}
    endpoint = endpoint | {"name": "far-vectors", "servedModel": "org/vectors"}
    vectors = {"name": "vectors", "model": "text-embedding-3-small", "endpoints": [endpoint]}
    keys = [{"tenant": "mine", "sha256": hashed(KEY)}]
    deployments = [one | {"lifecycle": LIFECYCLE} for one in (text, vectors)]
    plane.up(manifest(*deployments, tenants=[{"name": "mine"}], keys=keys))
    yield plane
    plane.close()


class Target(NamedTuple):
    """A gateway as clients know it."""

    url: str
    key: str
    model: str
    alias: str
    vectors: str

    @property
    def openai(self) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": self.key, "max_retries": 0}

    @property
    def anthropic(self) -> dict[str, Any]:
        return {"base_url": self.url, "api_key": self.key, "max_retries": 0}


@pytest.fixture(scope="module", params=["near", "far"])
def target(request: pytest.FixtureRequest, near: LivePlane, far: LivePlane) -> Target:
    """near: before an engine with a key and another name for its model, far: before llama.cpp."""
    if request.param == "near":
        return Target(near.url, KEY, "tiny", "gpt-4o-mini", "text-embedding-3-small")
    return Target(far.url, FAR_KEY, SERVED, "unused", "org/vectors")


@pytest.fixture(scope="module")
def client(target: Target) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(**target.openai) as client:
        yield client


def calling(target: Target) -> dict[str, int]:
    """A bias towards calls of tools. The token is asked for on a path of the engine that the gateway passes on."""
    asked = {"model": target.model, "content": CALL}
    headers = {"authorization": f"Bearer {target.key}"}
    [token] = httpx.post(f"{target.url}/tokenize", json=asked, headers=headers, timeout=30).json()["tokens"]
    return {str(token): 100}


def assert_asks_for_weather(name: str | None, arguments: Any) -> None:
    assert name == "weather"
    assert arguments in [{"place": place} for place in PLACES]


HELLO: Any = [{"role": "user", "content": "def f():"}]
PLACES = ["Oslo", "Bergen"]
SCHEMA: Any = {
    "type": "object",
    "properties": {"place": {"type": "string", "enum": PLACES}},
    "required": ["place"],
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "its", "parameters": SCHEMA}}


class TestOpenAI:
    def test_chat_and_completions_by_name_and_alias(self, client: openai.OpenAI, target: Target) -> None:
        for model in (target.model, target.alias):
            done = client.chat.completions.create(model=model, messages=HELLO, max_tokens=4, extra_body=IGNORE_EOS)
            assert done.usage is not None
            assert done.usage.completion_tokens == 4
            stream = client.completions.create(
                model=model, prompt="import", max_tokens=4, stream=True, extra_body=IGNORE_EOS
            )
            assert "".join(piece.choices[0].text for piece in stream if piece.choices)

    def test_responses(self, client: openai.OpenAI, target: Target) -> None:
        done = client.responses.create(model=target.alias, input="import", max_output_tokens=4)
        assert done.output_text
        stream = client.responses.create(model=target.alias, input="import", max_output_tokens=4, stream=True)
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta")

    def test_async(self, target: Target) -> None:
        async def ask() -> tuple[str, str]:
            async with openai.AsyncOpenAI(**target.openai) as client:
                made = client.responses.create(model=target.model, input="import", max_output_tokens=4)
                stream = await client.chat.completions.create(
                    model=target.alias, messages=HELLO, max_tokens=4, stream=True, extra_body=IGNORE_EOS
                )
                text = "".join([piece.choices[0].delta.content or "" async for piece in stream if piece.choices])
                return (await made).output_text, text

        assert all(asyncio.run(ask()))

    def test_embeddings(self, client: openai.OpenAI, target: Target) -> None:
        made = client.embeddings.create(model=target.vectors, input=["a signal box", "a signal box", "else"])
        first, again, other = (one.embedding for one in made.data)
        assert first == pytest.approx(again, abs=1e-3) != pytest.approx(other, abs=1e-3)

    def test_tools(self, client: openai.OpenAI, target: Target) -> None:
        asked: Any = {"model": target.alias, "messages": HELLO, "tools": [WEATHER], "tool_choice": "required"}
        asked |= {"max_tokens": 200, "logit_bias": calling(target)}
        calls = client.chat.completions.create(**asked).choices[0].message.tool_calls
        assert calls is not None
        assert isinstance(calls[0], ChatCompletionMessageFunctionToolCall)
        assert_asks_for_weather(calls[0].function.name, json.loads(calls[0].function.arguments))
        stream = client.chat.completions.create(**asked, stream=True)
        pieces = [one for piece in stream if piece.choices for one in piece.choices[0].delta.tool_calls or []]
        first = [one.function for one in pieces if one.index == 0 and one.function is not None]
        assert_asks_for_weather(first[0].name, json.loads("".join(one.arguments or "" for one in first)))
        answered: Any = [
            *HELLO,
            {"role": "assistant", "tool_calls": [calls[0].model_dump()]},
            {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"},
        ]
        assert client.chat.completions.create(**asked | {"messages": answered, "tool_choice": "none"}).usage


class TestAnthropic:
    """Translated by the first gateway, and passed on by the second one to llama.cpp. That ignores what this API has
    not: only the temperature keeps its answers from ending early."""

    def test_messages_streams_and_counts(self, target: Target) -> None:
        model = target.alias
        with anthropic.Anthropic(**target.anthropic) as client:
            done = client.messages.create(
                model=model, messages=HELLO, system="Be short", max_tokens=4, extra_body=IGNORE_EOS | {"temperature": 0}
            )
            assert (done.stop_reason, done.usage.output_tokens) == ("max_tokens", 4)
            assert done.content[0].type == "text"
            with client.messages.stream(
                model=model, messages=HELLO, max_tokens=4, extra_body=IGNORE_EOS | {"temperature": 0}
            ) as stream:
                text = "".join(stream.text_stream)
                final = stream.get_final_message()
            assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 4)
            assert text
            usage = final.usage
            counted = client.messages.count_tokens(model=model, messages=HELLO).input_tokens
            assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
            with pytest.raises(anthropic.NotFoundError):
                client.messages.create(model="unknown", messages=HELLO, max_tokens=4)

    def test_tools(self, target: Target) -> None:
        asked: Any = {"model": target.model, "messages": HELLO, "max_tokens": 200, "tool_choice": {"type": "any"}}
        asked["tools"] = [{"name": "weather", "description": "its", "input_schema": SCHEMA}]
        asked["extra_body"] = {"logit_bias": calling(target)}
        with anthropic.Anthropic(**target.anthropic) as client:
            whole = client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                streamed = stream.get_final_message()
            without = client.messages.count_tokens(model=target.model, messages=HELLO).input_tokens
        for done in (whole, streamed):
            assert done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0) > without + 20
            calls: list[Any] = [part for part in done.content if part.type == "tool_use"]
            if target.alias != "unused":  # llama.cpp itself reads no bias here, so nothing makes its model call
                assert_asks_for_weather(calls[0].name, calls[0].input)

    def test_async(self, target: Target) -> None:
        async def ask() -> int:
            async with anthropic.AsyncAnthropic(**target.anthropic) as client:
                asked = [
                    client.messages.create(
                        model=target.model, messages=HELLO, max_tokens=3, extra_body=IGNORE_EOS | {"temperature": 0}
                    )
                    for _ in range(4)
                ]
                return sum(done.usage.output_tokens for done in await asyncio.gather(*asked))

        assert asyncio.run(ask()) == 12


class TestLibraries:
    """Clients that others build on, each with a stream and without."""

    def test_litellm(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched from the network
        litellm = importlib.import_module("litellm")
        base = {"api_base": f"{target.url}/v1", "api_key": target.key}
        asked = base | {"messages": HELLO, "max_tokens": 4, "num_retries": 0, "extra_body": IGNORE_EOS}
        done = litellm.completion(model=f"openai/{target.alias}", **asked)
        assert done.usage.completion_tokens == 4
        pieces = list(litellm.completion(model=f"openai/{target.model}", stream=True, **asked))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
        tools = {"tools": [WEATHER], "tool_choice": "required", "logit_bias": calling(target), "max_tokens": 200}
        [call, *_] = litellm.completion(model=f"openai/{target.alias}", **asked | tools).choices[0].message.tool_calls
        assert_asks_for_weather(call.function.name, json.loads(call.function.arguments))
        done = litellm.completion(
            model=f"anthropic/{target.model}", api_base=target.url, api_key=target.key, messages=HELLO, max_tokens=4
        )
        assert done.choices[0].message.content
        made = litellm.embedding(
            model=f"openai/{target.vectors}", input=["a signal box"], encoding_format="float", **base
        )
        assert made.data[0]["embedding"]

    def test_langchain(self, target: Target) -> None:
        module = importlib.import_module("langchain_openai")
        model = module.ChatOpenAI(model=target.alias, max_tokens=4, extra_body=IGNORE_EOS, **target.openai)
        done = model.invoke("def f():")
        assert done.usage_metadata["output_tokens"] == 4
        assert "".join(piece.content for piece in model.stream("def f():"))
        tools = module.ChatOpenAI(model=target.alias, max_tokens=200, logit_bias=calling(target), **target.openai)
        [call, *_] = tools.bind_tools([WEATHER], tool_choice="required").invoke("def f():").tool_calls
        assert_asks_for_weather(call["name"], call["args"])
        vectors = module.OpenAIEmbeddings(model=target.vectors, check_embedding_ctx_length=False, **target.openai)
        assert vectors.embed_query("a signal box")


def test_no_key_is_shown_anywhere(near: LivePlane, far: LivePlane) -> None:
    """After all that was asked, failed and written."""
    with (
        openai.OpenAI(base_url=f"{near.url}/v1", api_key=KEY, max_retries=0) as client,
        pytest.raises(openai.NotFoundError),
    ):
        client.chat.completions.create(model="unknown", messages=[])
    shown = ""
    for plane in (near, far):
        shown += str(plane.status()) + str(plane.admin.get("requests")) + plane.log()
        for command in (("status",), ("status", "--json"), ("plan", plane.folder / "manifest.yaml")):
            shown += plane.pointsman(*command).stdout
        shown += "".join(file.read_text(errors="replace") for file in files_of(plane.state))
    for key in (KEY, FAR_KEY, ENGINE_KEY):
        assert key not in shown


def files_of(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]
