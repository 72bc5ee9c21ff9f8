"""The duration of an engine's step on measured hardware, and the interface of paces."""

import json
import os
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple, Protocol

KV_TOKENS_IF_UNKNOWN = 262_144
"""The size of the KV cache in tokens, if the constants do not have it."""

# No pathlib here: it would take a thirtieth of the memory of a simulated engine.
_CONSTANTS = os.path.join(os.path.dirname(__file__), "engine_constants.json")  # noqa: PTH118, PTH120


class Hardware(NamedTuple):
    """Constants of a model, an accelerator and an engine, in milliseconds; see engine_constants.json."""

    c0: float
    """Time of every step."""
    cw: float
    """Time to read the weights once."""
    cc: float
    """Time to compute one token."""
    ca: float
    """Time for the attention of a prompt's token to one earlier token."""
    ck: float
    """Time to read one token of a decoding request's context."""
    cb: float
    """Time for one decoding request."""
    kv_tokens: int = KV_TOKENS_IF_UNKNOWN

    def step_ms(self, tokens: float, attended: float, context: float, decoding: int) -> float:
        """The duration of a step that computes `tokens`. `decoding` of these tokens extend answers, whose contexts have
        `context` tokens together.

        `attended` is the sum over prompts of n * (p + n / 2), for n tokens computed now and p tokens computed before.
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
    with open(_CONSTANTS, encoding="utf-8") as file:  # noqa: PTH123
        text = json.load(file)
    return {
        name: Hardware(**{key: value for key, value in fields.items() if value is not None})
        for name, fields in text.items()
        if not name.startswith("_")
    }


class Job:
    """One request: a prompt to read and an answer to write, in tokens."""

    __slots__ = (
        "arrived", "cached_tokens", "generated", "hashes", "output_tokens", "owner", "prompt_tokens",
        "transferred",
    )  # fmt: skip

    def __init__(
        self, prompt_tokens: int, output_tokens: int, hashes: Sequence[int] = (), owner: object = None
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        """The number of output tokens, at least 1."""
        self.hashes = hashes if type(hashes) is tuple else tuple(hashes)
        """Hashes of the full blocks of prompt and answer. Two texts are equal as far as their hashes are equal."""
        self.owner = owner
        """A value that only the caller uses."""
        self.arrived = 0.0
        self.cached_tokens = 0
        """Tokens of the prompt that did not have to be computed."""
        self.generated = 0
        """Number of tokens written when the job was last admitted, or when it ended. While the job runs,
        `EngineStep.produced` reports each token."""
        self.transferred = 0
        """Tokens of the prompt that another engine has computed and whose KV has arrived."""


class EngineStep(NamedTuple):
    at: float
    """When the step ended."""
    produced: Sequence[Job]
    """Jobs with one more token."""
    finished: Sequence[Job]
    """The jobs among these that now have all their tokens."""


class EngineLoad(NamedTuple):
    """What the metrics of an engine report: its state when its last step ended."""

    running: int
    waiting: int
    kv_usage: float
    """0..1"""
    block_size: int = 0
    """Tokens per KV block; 0 if the engine has no blocks."""
    num_blocks: int = 0
    until: float = inf
    """When the metrics change next, unless a job comes or goes earlier."""


class Counts:
    __slots__ = ("preemptions", "prefix_hits", "prefix_queries")

    def __init__(self) -> None:
        self.prefix_queries = 0
        """Prompt tokens looked up in the cache."""
        self.prefix_hits = 0
        """Prompt tokens found there."""
        self.preemptions = 0


class Pace(Protocol):
    """Determines when jobs get their tokens."""

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
        """When `advance` next has something to report; None if it has nothing to report before the next job."""
        ...

    def load(self, now: float) -> EngineLoad:
        """The load that the engine's metrics report."""
        ...

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether a job of this size could run if it were alone."""
        ...

    def submit(self, job: Job, now: float) -> None:
        """Add a job that fits. Times never go backwards."""
        ...

    def cancel(self, job: Job, now: float) -> None:
        """Remove a job, which then gets no more tokens."""
        ...

    def advance(self, now: float) -> list[EngineStep]:
        """The steps that have ended since the last call."""
        ...


# A fixed pace, whatever the load: for tests with known times


class FixedPace:
    """A `Pace` that serves every job as if it were alone; only the number of seats is limited."""

    def __init__(
        self, first_token_s: float, token_s: float, max_num_seqs: int = 256, kv_tokens: int = KV_TOKENS_IF_UNKNOWN
    ) -> None:
        self.counts = Counts()
        self._first_token_s = first_token_s
        self._token_s = token_s
        self._seats = max_num_seqs
        self._kv_tokens = kv_tokens
        self._kv_used = 0
        self._waiting: deque[Job] = deque()
        self._running: dict[Job, None] = {}
        self._due: list[tuple[float, int, Job]] = []
        """A heap of jobs by time; the number keeps the order of jobs that are due at the same time."""
        self._numbers = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        return min(self._kv_used / self._kv_tokens, 1.0)

    @property
    def next_at(self) -> float | None:
        while self._due and self._due[0][2] not in self._running:  # cancelled
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def load(self, now: float) -> EngineLoad:
        due = self.next_at
        return EngineLoad(self.running, self.waiting, self.kv_usage, until=inf if due is None else due)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        return prompt_tokens + output_tokens <= self._kv_tokens

    def submit(self, job: Job, now: float) -> None:
        job.arrived = now
        self.counts.prefix_queries += job.prompt_tokens
        self._waiting.append(job)
        self._seat(now)

    def cancel(self, job: Job, now: float) -> None:
        if job in self._running:
            self._seat(now, leaves=job)
        elif job in self._waiting:
            self._waiting.remove(job)

    def advance(self, now: float) -> list[EngineStep]:
        steps: list[EngineStep] = []
        while (at := self.next_at) is not None and at <= now:
            _, _, job = heappop(self._due)
            job.generated += 1
            self._kv_used += 1
            done = job.generated == job.output_tokens
            steps.append(EngineStep(at, (job,), (job,) if done else ()))
            if done:
                self._seat(at, leaves=job)
            else:
                self._numbers += 1
                heappush(self._due, (at + self._token_s, self._numbers, job))
        return steps

    def _seat(self, now: float, leaves: Job | None = None) -> None:
        """Give free seats to waiting jobs, including the seat of a job that leaves."""
        if leaves is not None:
            del self._running[leaves]
            self._kv_used -= leaves.prompt_tokens + leaves.generated
        while self._waiting and len(self._running) < self._seats:
            job = self._waiting.popleft()
            self._running[job] = None
            self._kv_used += job.prompt_tokens
            self._numbers += 1
            heappush(self._due, (now + self._first_token_s, self._numbers, job))
