"""How long one step of an engine takes on measured hardware, and what anything that paces tokens looks like."""

import json
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

KV_TOKENS_IF_UNKNOWN = 262_144
"""Where the constants do not say how many tokens fit into the KV cache."""

# Not pathlib: it is a thirtieth of the memory of a simulated engine.
_CONSTANTS = os.path.join(os.path.dirname(__file__), "engine_constants.json")  # noqa: PTH118, PTH120


class Hardware(NamedTuple):
    """Constants of a model on an accelerator under an engine, in milliseconds; see engine_constants.json."""

    c0: float
    """Of every step."""
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
        """A step that computes `tokens`, of which `decoding` extend answers with `context` tokens before them.

        `attended` is the sum over prompts of n * (p + n / 2): n tokens computed now, p there already.
        """
        matrices: float = (self.cw**4 + (self.cc * tokens) ** 4) ** 0.25
        return self.c0 + matrices + self.ca * attended + self.ck * context + self.cb * decoding


def hardware(name: str) -> Hardware:
    """The constants of this name, such as 8B|h100_sxm|vllm|tp1. Raises ValueError if there are none."""
    known = constants()
    if name not in known:
        raise ValueError(f'there is no hardware "{name}"; known: {", ".join(known)}')
    return known[name]


def constants() -> dict[str, Hardware]:
    """All that are known."""
    with open(_CONSTANTS, encoding="utf-8") as file:  # noqa: PTH123
        text = json.load(file)
    return {
        name: Hardware(**{key: value for key, value in told.items() if value is not None})
        for name, told in text.items()
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
        """Of each full block of the prompt, and of the answer as far as known; equal ones have equal beginnings."""
        self.owner = owner
        """Whose it is; nothing here looks at it."""
        self.arrived = 0.0
        self.cached_tokens = 0
        """Of the prompt, those that did not have to be computed."""
        self.generated = 0
        """Tokens written when it was last begun or ended; while it runs, `EngineStep.produced` tells of each."""


class EngineStep(NamedTuple):
    """Something that an engine has done."""

    at: float
    """When it was done."""
    produced: Sequence[Job]
    """One token each."""
    finished: Sequence[Job]
    """Those of them that have all their tokens now."""


class Counts:
    """What an engine counts from its start."""

    __slots__ = ("preemptions", "prefix_hits", "prefix_queries")

    def __init__(self) -> None:
        self.prefix_queries = 0
        """Prompt tokens that were looked up."""
        self.prefix_hits = 0
        """Those that were in the cache."""
        self.preemptions = 0


class Pace(Protocol):
    """Says when jobs get their tokens."""

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
        """When `advance` has something to tell next; None: not before the next job comes."""
        ...

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether such a job could run at all, alone."""
        ...

    def submit(self, job: Job, now: float) -> None:
        """Take a job that fits. Times never go backwards."""
        ...

    def cancel(self, job: Job, now: float) -> None:
        """Forget a job; it gets no more tokens."""
        ...

    def advance(self, now: float) -> list[EngineStep]:
        """What has been done until now, and was not told yet."""
        ...
