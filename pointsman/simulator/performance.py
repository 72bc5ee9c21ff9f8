"""The duration of an engine's step on measured hardware, and the interface of paces."""

import json
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

KV_TOKENS_IF_UNKNOWN = 262_144
"""Tokens in the KV cache, if the constants do not say."""

# Not pathlib: that would be a thirtieth of the memory of a simulated engine.
_CONSTANTS = os.path.join(os.path.dirname(__file__), "engine_constants.json")  # noqa: PTH118, PTH120


class Hardware(NamedTuple):
    """Constants of a model, an accelerator and an engine, in milliseconds; see engine_constants.json."""

    c0: float
    """Every step."""
    cw: float
    """Reading the weights once."""
    cc: float
    """Computing one token."""
    ca: float
    """Attention of a prompt's token to one token before it."""
    ck: float
    """Reading one token of a decoding request's context."""
    cb: float
    """One decoding request."""
    kv_tokens: int = KV_TOKENS_IF_UNKNOWN

    def step_ms(self, tokens: int, attended: float, context: int, decoding: int) -> float:
        """The duration of a step that computes `tokens`, of which `decoding` extend answers with `context` tokens.

        `attended` is the sum over prompts of n * (p + n / 2): n tokens computed now, p computed before.
        """
        matrices: float = (self.cw**4 + (self.cc * tokens) ** 4) ** 0.25
        return self.c0 + matrices + self.ca * attended + self.ck * context + self.cb * decoding


def hardware(name: str) -> Hardware:
    """The constants with this name, such as 8B|h100_sxm|vllm|tp1. Raises ValueError if there are none."""
    known = constants()
    if name not in known:
        raise ValueError(f'there is no hardware "{name}"; known: {", ".join(known)}')
    return known[name]


def constants() -> dict[str, Hardware]:
    """All constants, by name."""
    with open(_CONSTANTS, encoding="utf-8") as file:  # noqa: PTH123
        text = json.load(file)
    return {
        name: Hardware(**{key: value for key, value in fields.items() if value is not None})
        for name, fields in text.items()
        if not name.startswith("_")
    }


class Job:
    """One request: a prompt to read and an answer to write, in tokens."""

    __slots__ = ("arrived", "cached_tokens", "generated", "hashes", "output_tokens", "owner", "prompt_tokens")

    def __init__(
        self, prompt_tokens: int, output_tokens: int, hashes: Sequence[int] = (), owner: object = None
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        """At least 1."""
        self.hashes = hashes
        """Of each full block of prompt and answer; equal hashes mean equal texts up to there."""
        self.owner = owner
        """For the caller; not used here."""
        self.arrived = 0.0
        self.cached_tokens = 0
        """Tokens of the prompt that did not have to be computed."""
        self.generated = 0
        """Tokens written, as of its last admission or end; while it runs, `EngineStep.produced` reports each."""


class EngineStep(NamedTuple):
    """A step that an engine has done."""

    at: float
    """When it ended."""
    produced: Sequence[Job]
    """Jobs with one more token."""
    finished: Sequence[Job]
    """Those of them that have all their tokens."""


class Counts:
    """Counters since the start of an engine."""

    __slots__ = ("preemptions", "prefix_hits", "prefix_queries")

    def __init__(self) -> None:
        self.prefix_queries = 0
        """Prompt tokens looked up in the cache."""
        self.prefix_hits = 0
        """Prompt tokens found there."""
        self.preemptions = 0


class Pace(Protocol):
    """Decides when jobs get their tokens."""

    counts: Counts

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def kv_usage(self) -> float:
        """0..1"""
        ...

    @property
    def next_at(self) -> float | None:
        """When `advance` has something to report; None: not before the next job."""
        ...

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether such a job could run alone."""
        ...

    def submit(self, job: Job, now: float) -> None:
        """Add a job that fits. Times never go backwards."""
        ...

    def cancel(self, job: Job, now: float) -> None:
        """Remove a job; it gets no more tokens."""
        ...

    def advance(self, now: float) -> list[EngineStep]:
        """The steps that have ended since the last call."""
        ...
