"""Sources of requests: a file, or a generator for traffic of which there is no recording.

`generate:NAME?parameter=value&...` makes requests from a seed. The same text always gives the same requests.
"""

import math
import random
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from urllib.parse import parse_qsl

import msgspec

from pointsman.errors import PointsmanError, UnknownName
from pointsman.lab.traffic.recording import BLOCK_TOKENS, RecordedRequest, Recording, recording_of_file

GENERATE = "generate:"


class Made(msgspec.Struct, frozen=True):
    """Parameters for generators. Lengths are means."""

    rate: float = 5.0
    """Requests per second. For conversations and agents: sessions per second."""
    seconds: float = 600.0
    input: float = 2000.0
    """Number of tokens in a prompt. For conversations: number of tokens that each turn adds."""
    output: float = 200.0
    seed: int = 0
    burst: float = 8.0
    """Factor on the rate in bursts."""
    period: float = 0.0
    """Seconds of a burst together with the pause after it (default 60). For `diurnal`: seconds of a day (default: the
    whole time)."""
    prefixes: int = 20
    """Number of system prompts that requests share."""
    prefix: float = 4096.0
    """Number of tokens in a system prompt."""
    turns: float = 6.0
    """Number of turns in a session, or of tool calls in one run of an agent."""
    think: float = 20.0
    """Seconds between an answer and the next turn. For agents: the duration of a tool call."""
    tenants: int = 1


def _length(rng: random.Random, mean: float) -> int:
    """A random length of at least 1. It is log-normal, as the lengths of prompts and answers are."""
    return max(1, round(mean * math.exp(rng.gauss(-0.32, 0.8))))


def _times(rng: random.Random, made: Made, share: Callable[[float], float], most: float) -> Iterator[float]:
    """Arrivals of a Poisson process, in seconds. Its rate is the mean rate times `share(t)`; `most` limits `share`."""
    at = 0.0
    while True:
        at += rng.expovariate(made.rate * most)
        if at >= made.seconds:
            return
        if rng.random() * most < share(at):
            yield at


class _Blocks:
    """Makes names for blocks that no other request has."""

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, tokens: float) -> tuple[int, ...]:
        first, count = self._next, -(-int(tokens) // BLOCK_TOKENS)
        self._next += count
        return tuple(range(first, self._next))


def _single(made: Made, share: Callable[[float], float], most: float) -> Iterator[RecordedRequest]:
    rng, blocks = random.Random(made.seed), _Blocks()
    for at in _times(rng, made, share, most):
        length = _length(rng, made.input)
        yield _request(made, rng, at, length, blocks.fresh(length))


def _request(made: Made, rng: random.Random, at: float, length: int, blocks: tuple[int, ...]) -> RecordedRequest:
    tenant = f"tenant-{rng.randrange(made.tenants) + 1}" if made.tenants > 1 else ""
    output = _length(rng, made.output)
    return RecordedRequest(
        timestamp=at * 1000, input_length=length, output_length=output, hash_ids=blocks, tenant=tenant
    )


def poisson(made: Made) -> Iterator[RecordedRequest]:
    return _single(made, lambda _: 1.0, 1.0)


def bursty(made: Made) -> Iterator[RecordedRequest]:
    """Bursts at `burst` times the rate. Pauses between the bursts keep the mean rate."""
    period = made.period or 60.0
    return _single(made, lambda at: made.burst if at % period < period / made.burst else 0.0, max(made.burst, 1.0))


def diurnal(made: Made) -> Iterator[RecordedRequest]:
    """A sine wave between 0.2 and 1.8 times the rate."""
    period = made.period or made.seconds
    return _single(made, lambda at: 1.0 - 0.8 * math.cos(2 * math.pi * at / period), 1.8)


def shared_prefixes(made: Made) -> Iterator[RecordedRequest]:
    """Prompts that begin with one of a few system prompts and end with unique text.

    The first system prompt is used most often (Zipf).
    """
    rng, blocks = random.Random(made.seed), _Blocks()
    whole = max(1, round(made.prefix / BLOCK_TOKENS))
    prefixes = [blocks.fresh(whole * BLOCK_TOKENS) for _ in range(made.prefixes)]
    weights = [1 / (rank + 1) for rank in range(made.prefixes)]
    for at in _times(rng, made, lambda _: 1.0, 1.0):
        own = _length(rng, made.input)
        [prefix] = rng.choices(prefixes, weights)
        yield _request(made, rng, at, whole * BLOCK_TOKENS + own, prefix + blocks.fresh(own))


def multi_turn(made: Made) -> Iterator[RecordedRequest]:
    """Conversations. Each prompt consists of the previous prompt, the answer to it, and a new message."""
    return _sessions(made, opening=made.input, adds=made.input / 2)


def agents(made: Made) -> Iterator[RecordedRequest]:
    """Runs of agents. Each begins with a long shared system prompt. Then tool calls append their results."""
    return _sessions(made, opening=made.input, adds=made.input, shared=made.prefix)


def _sessions(made: Made, opening: float, adds: float, shared: float = 0.0) -> Iterator[RecordedRequest]:
    rng, blocks = random.Random(made.seed), _Blocks()
    common = blocks.fresh(round(shared / BLOCK_TOKENS) * BLOCK_TOKENS)
    each: list[RecordedRequest] = []
    for number, began in enumerate(_times(rng, made, lambda _: 1.0, 1.0)):
        at, tokens, held = began, len(common) * BLOCK_TOKENS, common
        turns = 1 + int(rng.expovariate(1 / max(made.turns - 0.5, 0.1)))
        tenant = f"tenant-{number % made.tenants + 1}" if made.tenants > 1 else ""
        for turn in range(turns):
            tokens += _length(rng, opening if turn == 0 else adds)
            # The last block of a turn is partial. The next turn completes this block, and so gives it another name.
            held = held[: tokens // BLOCK_TOKENS]
            held += blocks.fresh(tokens - len(held) * BLOCK_TOKENS)
            output, think = _length(rng, made.output), rng.expovariate(1 / made.think)
            one = RecordedRequest(
                timestamp=round(at * 1000, 3), input_length=tokens, output_length=output, hash_ids=held,
                session_id=f"session-{number}", tenant=tenant, think_ms=round(1000 * think, 3) if turn else 0.0,
            )  # fmt: skip
            each.append(one)
            tokens += output
            held = held[: one.input_length // BLOCK_TOKENS]
            at += 0.02 * output + think
    return iter(sorted(each, key=lambda one: one.timestamp))


GENERATORS: dict[str, Callable[[Made], Iterator[RecordedRequest]]] = {
    "poisson": poisson,
    "bursty": bursty,
    "diurnal": diurnal,
    "shared-prefixes": shared_prefixes,
    "multi-turn": multi_turn,
    "agents": agents,
}


@lru_cache(maxsize=4)
def recording_of(source: str, first: int | None = None) -> Recording:
    """Read a file, or generate requests for `generate:NAME?parameters`. With `first`, only that many requests."""
    if not source.startswith(GENERATE):
        return recording_of_file(Path(source), first)
    name, _, query = source.removeprefix(GENERATE).partition("?")
    if name not in GENERATORS:
        raise UnknownName("generator", name, GENERATORS)
    return Recording(source, partial(GENERATORS[name], _parameters(query)), first, source)


def _parameters(query: str) -> Made:
    given = dict(parse_qsl(query, keep_blank_values=True))
    known = Made.__struct_fields__
    for name in given:
        if name not in known:
            raise UnknownName("parameter", name, known)
    try:
        made = msgspec.convert(given, Made, strict=False)
    except msgspec.ValidationError as error:
        raise PointsmanError(f"generate: {error}") from None
    for name in known:
        if not 0 <= getattr(made, name) < math.inf or (name not in ("seed", "period") and getattr(made, name) == 0):
            raise PointsmanError(f"generate: {name} is {getattr(made, name):g}; it must be above 0")
    return made
