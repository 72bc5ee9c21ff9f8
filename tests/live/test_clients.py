"""Official clients against an engine with a key and another name for its model: a second plane with real llama.cpp
instances, which ask for a key of their own."""

import asyncio
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from bench.chaos.planes import LivePlane
from tests.live.manifests import LIFECYCLE, hashed, llama, manifest

KEY, FAR_KEY, ENGINE_KEY = "sk-near", "sk-far-away", "sk-of-the-engine"
IGNORE_EOS = {"ignore_eos": True}
SERVED = "org/tiny-pydoc"
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}\n{% endfor %}{% if tools %}{{ tools | tojson }}\n{% endif %}"
)
"""A prompt with all that the engine was told of tools."""


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


@pytest.fixture(scope="module")
def client(near: LivePlane) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{near.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("model", ["tiny", "gpt-4o-mini"])
class TestOpenAI:
    def test_chat(self, client: openai.OpenAI, model: str) -> None:
        done = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "def f():"}], max_tokens=4, extra_body=IGNORE_EOS
        )
        assert done.usage is not None
        assert done.usage.completion_tokens == 4

    def test_streams(self, client: openai.OpenAI, model: str) -> None:
        stream = client.completions.create(
            model=model, prompt="import", max_tokens=4, stream=True, extra_body=IGNORE_EOS
        )
        assert "".join(piece.choices[0].text for piece in stream if piece.choices)

    def test_async(self, near: LivePlane, model: str) -> None:
        url = f"{near.url}/v1"

        async def ask() -> str:
            async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
                return (await client.responses.create(model=model, input="import", max_output_tokens=4)).output_text

        assert asyncio.run(ask())


def test_embeddings(client: openai.OpenAI) -> None:
    made = client.embeddings.create(model="text-embedding-3-small", input=["a signal box", "a signal box", "else"])
    first, again, other = (one.embedding for one in made.data)
    assert first == pytest.approx(again, abs=1e-3) != pytest.approx(other, abs=1e-3)


def test_tools_reach_the_engine(client: openai.OpenAI) -> None:
    """Its build makes no calls of them, which tests/gateway/test_messages.py has an engine of its own for."""
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
    with_tools, without = client.chat.completions.create(**asked, tools=[tool]), client.chat.completions.create(**asked)
    assert with_tools.usage is not None
    assert without.usage is not None
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens + 20


HELLO: Any = [{"role": "user", "content": "def f():"}]


@pytest.mark.parametrize("where", ["near", "far"])
class TestAnthropic:
    """Translated by the first gateway, and passed on to llama.cpp by the second one."""

    def test_messages_streams_and_counts(self, near: LivePlane, far: LivePlane, where: str) -> None:
        url, key, model = (near.url, KEY, "gpt-4o-mini") if where == "near" else (far.url, FAR_KEY, SERVED)
        with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
            done = client.messages.create(
                model=model, messages=HELLO, system="Be short", max_tokens=4, extra_body=IGNORE_EOS
            )
            assert (done.stop_reason, done.usage.output_tokens) == ("max_tokens", 4)
            assert done.content[0].type == "text"
            with client.messages.stream(model=model, messages=HELLO, max_tokens=4, extra_body=IGNORE_EOS) as stream:
                text = "".join(stream.text_stream)
                final = stream.get_final_message()
            assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 4)
            assert text
            usage = final.usage
            counted = client.messages.count_tokens(model=model, messages=HELLO).input_tokens
            assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
            with pytest.raises(anthropic.NotFoundError):
                client.messages.create(model="unknown", messages=HELLO, max_tokens=4)

    def test_async(self, near: LivePlane, far: LivePlane, where: str) -> None:
        url, key, model = (near.url, KEY, "tiny") if where == "near" else (far.url, FAR_KEY, "unused")

        async def ask() -> int:
            async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
                asked = [
                    client.messages.create(model=model, messages=HELLO, max_tokens=3, extra_body=IGNORE_EOS)
                    for _ in range(4)
                ]
                return sum(done.usage.output_tokens for done in await asyncio.gather(*asked))

        assert asyncio.run(ask()) == 12


class TestLibraries:
    """Clients that others build on, each with a stream and without."""

    def test_litellm(self, near: LivePlane, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched from the network
        litellm = importlib.import_module("litellm")
        asked = {"messages": HELLO, "max_tokens": 4, "api_key": KEY, "num_retries": 0, "extra_body": IGNORE_EOS}
        done = litellm.completion(model="openai/gpt-4o-mini", api_base=f"{near.url}/v1", **asked)
        assert done.usage.completion_tokens == 4
        pieces = list(litellm.completion(model="openai/tiny", api_base=f"{near.url}/v1", stream=True, **asked))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
        done = litellm.completion(model="anthropic/tiny", api_base=near.url, messages=HELLO, max_tokens=4, api_key=KEY)
        assert done.choices[0].message.content

    def test_langchain(self, near: LivePlane) -> None:
        module = importlib.import_module("langchain_openai")
        model = module.ChatOpenAI(
            model="gpt-4o-mini", base_url=f"{near.url}/v1", api_key=KEY, max_tokens=4, max_retries=0,
            extra_body=IGNORE_EOS,
        )  # fmt: skip
        assert model.invoke("def f():").usage_metadata["output_tokens"] == 4
        assert "".join(piece.content for piece in model.stream("def f():"))


def test_no_key_is_shown_anywhere(client: openai.OpenAI, near: LivePlane, far: LivePlane) -> None:
    """After all that was asked, failed and written."""
    with pytest.raises(openai.NotFoundError):
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
