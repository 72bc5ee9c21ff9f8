"""Keeps bursts of equal prompts together, so that only one endpoint computes their prefix."""

from collections import Counter
from math import ceil, inf
from typing import Annotated

import msgspec

from pointsman.parameters import NoEffect
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import PREFIX_MATCH, Endpoints, PrefixMatch, RequestCycle
from pointsman.routing.producers.prefix_index import block_hashes, first_link, token_bytes
from pointsman.selection import Key, SchedulingResult
from pointsman.selection.columns import column_of, filled, placed
from pointsman.types import RequestMetadata

MAX_BLOCKS = 2048
"""Maximum number of hashed blocks of a prompt, if no limit is given."""
UNLIMITED = -1


class Prompts(msgspec.Struct, frozen=True):
    """The prompts of a request: their hash, the hash of their beginning, and their length."""

    whole: tuple[int, ...]
    beginning: int | None
    """The hash of the first `minColocateBlocks` blocks; None if the prompt is shorter, or beginnings do not count."""
    blocks: int


class Batch(msgspec.Struct):
    """The requests in one window: where each prompt and each beginning was sent."""

    until: float = -inf
    sent: dict[tuple[int, ...], Counter[str]] = {}
    begun: dict[int, Counter[str]] = {}
    load: Counter[str] = msgspec.field(default_factory=Counter)
    """Number of requests by endpoint."""


_PROMPTS: Key[Prompts] = Key("burst-prompts")


class BurstPrefixCacheProducer:
    """Requests with the same prompt that come within `window_duration_ms` go where the first of them went.

    At most `max_per_replica` of them go to one endpoint. Then the scorers choose another, and the next requests follow.
    Prompts that share at least `min_colocate_blocks` blocks follow each other too, while their endpoint has at most its
    share of the window's requests. No request waits for others. Earlier cached prefixes still count.
    """

    def __init__(
        self,
        window_duration_ms: int = 100,
        max_per_replica: int = UNLIMITED,
        block_size_tokens: int = 64,
        max_prefix_tokens_to_match: int = 0,
        min_colocate_blocks: int = 0,
        max_batch_size: Annotated[int, NoEffect("no request waits for a batch")] = UNLIMITED,
    ) -> None:
        for parameter, value in {"windowDurationMs": window_duration_ms, "blockSizeTokens": block_size_tokens}.items():
            if value < 1:
                raise ValueError(f"{parameter} is {value}; it must be at least 1")
        for parameter, value in {
            "maxPrefixTokensToMatch": max_prefix_tokens_to_match,
            "minColocateBlocks": min_colocate_blocks,
        }.items():
            if value < 0:
                raise ValueError(f"{parameter} is {value}; it must be 0 or more")
        if max_per_replica != UNLIMITED and max_per_replica < 1:
            raise ValueError(f"maxPerReplica is {max_per_replica}; it must be -1, for no limit, or at least 1")
        self._window_s = window_duration_ms / 1000
        self._most = inf if max_per_replica == UNLIMITED else max_per_replica
        self._block_size = block_size_tokens
        self._max_blocks = max_prefix_tokens_to_match // block_size_tokens if max_prefix_tokens_to_match else MAX_BLOCKS
        self._alike = min_colocate_blocks
        self._batch = Batch()

    def produce(self, cycle: RequestCycle, candidates: Endpoints) -> None:
        prompts = cycle[_PROMPTS] = self._prompts(cycle.request)
        if cycle.now >= self._batch.until or not prompts.blocks:
            return
        by_id = {endpoint.id: endpoint for endpoint in candidates}
        sent = self._batch.sent.get(prompts.whole, Counter())
        had_enough = [by_id[name].row for name, count in sent.items() if name in by_id and count >= self._most]
        target = self._target(prompts, sent, by_id)
        if target is not None or had_enough:
            known = cycle.get(PREFIX_MATCH) or self._nothing_known(prompts.blocks, candidates)
            match = placed(known.match, had_enough, 0.0)
            if target is not None:
                match = placed(match, [target.row], float(known.total[target.row]))
            cycle[PREFIX_MATCH] = PrefixMatch(match, known.total, known.block_size, match)

    def dispatched(self, cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> None:
        prompts = cycle.get(_PROMPTS)
        if prompts is None or not prompts.blocks:
            return
        if cycle.now >= self._batch.until:
            self._batch = Batch(cycle.now + self._window_s)
        batch, target = self._batch, result.target.id
        batch.sent.setdefault(prompts.whole, Counter())[target] += 1
        batch.load[target] += 1
        if prompts.beginning is not None:
            batch.begun.setdefault(prompts.beginning, Counter())[target] += 1

    def _target(self, prompts: Prompts, sent: Counter[str], by_id: dict[str, Endpoint]) -> Endpoint | None:
        """The endpoint that a request should follow others to; None if there is none."""
        batch = self._batch
        follow = [name for name, count in sent.items() if name in by_id and count < self._most]
        if not follow and prompts.beginning is not None and not sent:
            share = ceil((batch.load.total() + 1) / max(len(by_id), 1))
            begun = batch.begun.get(prompts.beginning, Counter())
            follow = [name for name in begun if name in by_id and batch.load[name] < share]
        if not follow:
            return None
        return by_id[min(follow, key=lambda name: (batch.load[name], name))]

    def _prompts(self, request: RequestMetadata) -> Prompts:
        first = first_link(request.model_name, request.cache_salt)
        if request.token_ids is not None:
            texts = [token_bytes(request.token_ids)]
        else:
            texts = [token_bytes(one) for one in _each(request)]
        chains = [block_hashes(text, first, self._block_size, self._max_blocks) for text in texts]
        beginning = None
        if self._alike and chains:
            links = next((n for n in range(len(chains[0].links) + 1) if chains[0].blocks_in(n) >= self._alike), 0)
            beginning = chains[0].links[links - 1] if links else None
        whole = tuple(chain.links[-1] for chain in chains if chain.links)
        return Prompts(whole, beginning, sum(chain.blocks for chain in chains))

    def _nothing_known(self, blocks: int, candidates: Endpoints) -> PrefixMatch:
        """The facts to start from if no other producer provides matches."""
        nothing = column_of([0.0] * len(candidates.whole), candidates.uncut().arrays)
        return PrefixMatch(nothing, filled(float(blocks), nothing), filled(float(self._block_size), nothing), nothing)


def _each(request: RequestMetadata) -> tuple[str | bytes | memoryview, ...]:
    return request.prompt if isinstance(request.prompt, tuple) else (request.prompt,)
