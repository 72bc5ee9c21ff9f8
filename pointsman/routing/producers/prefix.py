"""Estimates how much of a prompt each endpoint has in its cache, from what was sent to it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import PREFIX_MATCH, Endpoints, PrefixMatch, RequestCycle
from pointsman.routing.producers.prefix_index import (
    Chain,
    KnownRows,
    PrefixIndex,
    block_hashes,
    first_link,
    token_bytes,
)
from pointsman.selection import Column, Key, PerMembers, SchedulingResult
from pointsman.selection.arrays import np
from pointsman.selection.columns import column_of
from pointsman.types import RequestMetadata


class Hashed(msgspec.Struct, frozen=True, eq=False):
    """The hashes of a request, kept in its cycle until the request is sent."""

    chains: Mapping[int, Sequence[Chain]]
    """The hash chain of each prompt, by block size."""
    layout: "Layout"
    match: Column


_HASHED: Key[Hashed] = Key("prefix-hashed")

_BYTES = (bytes, memoryview)
_MAX_MODELS = 1_000
MAX_BLOCK_SIZES = 4
"""Maximum number of distinct block sizes, because a prompt is hashed once for each. Servers with other block sizes are
matched by the most common size."""
_MANY_SERVERS = 64
"""Minimum number of servers for which a set of bits is added to a column in one step."""


class Layout(msgspec.Struct):
    """Values that depend only on the members of the fleet."""

    rows: list[int]
    """slot -> row"""
    pools: dict[int, int]
    """block size -> the servers that have it"""
    block_sizes: Column
    servers: list[tuple[int, int]]
    """row -> (block size, how many blocks of that size fit into the cache)"""
    held: dict[int, int]
    """block size -> the largest number of blocks that a server holds"""
    only: tuple[int, int | None] | None
    """(block size, maximum number of blocks) if these are the same for all servers, and there are few servers."""


class CacheGeometry(msgspec.Struct, frozen=True):
    """Block and cache sizes of endpoints, as their engines report them (with `auto_tune`), or else as configured."""

    auto_tune: bool
    block_size: int
    capacity: int
    """Blocks that a server can cache, for servers that do not report a number."""
    max_tokens: int
    """Maximum tokens of a prompt that are matched; 0 if `max_blocks` is the limit."""
    max_blocks: int
    """Maximum blocks of a prompt that are matched; 0 if there is no limit."""
    min_block_size: int = 64
    """Smaller blocks are hashed as blocks of this size: a finer match is not worth the hashing."""

    def block_size_of(self, endpoint: Endpoint) -> int:
        """Tokens per block, by which this endpoint is matched."""
        metrics = endpoint.metrics
        reported = metrics.block_size if self.auto_tune and metrics is not None else 0
        return max(reported if reported > 0 else self.block_size, self.min_block_size)

    def capacity_of(self, endpoint: Endpoint, block_size: int) -> int:
        """How many blocks of this size fit into the endpoint's cache, according to its report."""
        metrics = endpoint.metrics
        if not self.auto_tune or metrics is None or metrics.num_blocks <= 0:
            return self.capacity
        if metrics.block_size <= 0:
            return metrics.num_blocks
        return max(1, metrics.num_blocks * metrics.block_size // block_size)

    def most_blocks(self, block_size: int) -> int | None:
        """Maximum number of blocks of a prompt that are matched; None if all are."""
        if self.max_tokens > 0:
            return self.max_tokens // block_size
        return self.max_blocks or None


class ApproxPrefixCacheProducer:
    """Hashes prompts block by block and remembers where each went.

    With `autoTune`, the block size and cache size of an endpoint are those that its engine reported. Without it, and
    until the endpoint is first measured, they are the parameters. Each endpoint is matched in its own block size. A
    match is the unbroken run of blocks, from the first on, that the endpoint was sent and has not evicted since.
    """

    def __init__(
        self,
        auto_tune: bool = True,
        block_size_tokens: int = 16,
        block_size: int | None = None,
        max_prefix_tokens_to_match: int = 131072,
        max_prefix_blocks_to_match: int = 2048,
        lru_capacity_per_server: int = 31250,
    ) -> None:
        if block_size is not None and block_size_tokens == 16:
            block_size_tokens = block_size
        if not auto_tune and block_size_tokens <= 0:
            raise ValueError(f"blockSizeTokens must be positive when autoTune is off, found {block_size_tokens}")
        for kind, most in (("Tokens", max_prefix_tokens_to_match), ("Blocks", max_prefix_blocks_to_match)):
            if most < 0:
                raise ValueError(f"maxPrefix{kind}ToMatch must not be negative, found {most}")
        if lru_capacity_per_server < 1:
            raise ValueError(f"lruCapacityPerServer must be at least 1, found {lru_capacity_per_server}")
        self.index = PrefixIndex()
        self._known = KnownRows(self.index.memory)
        self.geometry = CacheGeometry(
            auto_tune,
            block_size_tokens,
            lru_capacity_per_server,
            max_prefix_tokens_to_match,
            max_prefix_blocks_to_match,
        )
        self.prompt_tokens = 0
        """Tokens of all prompts that were sent, in whole blocks."""
        self.expected_cached_tokens = 0
        """How many of these tokens were expected to be in the cache of the instance."""
        self.sizes_merged = False
        """Whether servers report more block sizes than are distinguished."""
        self.listener: Callable[[str, Sequence[int]], None] | None = None
        self._layout = PerMembers(self._laid_out)
        self._first_links: dict[str, int] = {}
        """First links of the chain, by model."""

    def produce(self, cycle: RequestCycle, candidates: Endpoints) -> None:
        layout, request = self._layout.of(candidates), cycle.request
        chains: Mapping[int, Sequence[Chain]]
        match: Column
        total: Column
        if layout.only is not None and type(request.prompt) in _BYTES and request.token_ids is None:
            size, most_blocks = layout.only
            first, held = self._first_link(request), layout.held[size]
            chain = block_hashes(request.prompt, first, size, most_blocks, held=held, known=self._known)  # type: ignore[arg-type]
            chains, width = {size: (chain,)}, len(layout.servers)
            match, total = [0.0] * width, [float(chain.blocks)] * width
            self._match(chain, layout.pools[size], match, layout.rows)
        else:
            chains = self._chains(request, layout.held)
            match, total = self._matched(layout, chains, candidates.arrays)
        state = cycle.state
        state[_HASHED] = Hashed(chains, layout, match)
        state[PREFIX_MATCH] = PrefixMatch(match, total, layout.block_sizes, match)

    def dispatched(self, cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> None:
        hashed = cycle.state.get(_HASHED)
        if hashed is None:
            return
        self._remember(hashed, result.target)
        if len(result.results) > 1 and result.primary != "prefill" and "prefill" in result.results:
            self._remember(hashed, result.results["prefill"].targets[0])

    def _remember(self, hashed: Hashed, endpoint: Endpoint) -> None:
        size, capacity = hashed.layout.servers[endpoint.row]
        for chain in hashed.chains[size]:
            self.index.record(endpoint.id, chain.links, capacity)
            self.prompt_tokens += chain.blocks * size
            if self.listener is not None and chain.links:
                self.listener(endpoint.id, chain.links)
        self.expected_cached_tokens += int(hashed.match[endpoint.row]) * size

    def learn(self, endpoint: Endpoint, what: Sequence[int], now: float) -> None:
        self.index.record(endpoint.id, what, self.geometry.capacity_of(endpoint, self.geometry.block_size_of(endpoint)))

    def departed(self, endpoint: Endpoint) -> None:
        self.index.forget(endpoint.id)

    def _laid_out(self, fleet: Endpoints) -> Layout:
        for gone in self.index.servers - {endpoint.id for endpoint in fleet}:
            self.index.forget(gone)
        slots = [self.index.slot(endpoint.id) for endpoint in fleet]
        sizes = self._few([self.geometry.block_size_of(endpoint) for endpoint in fleet])
        rows = [0] * (max(slots, default=-1) + 1)
        pools: dict[int, int] = {}
        for row, (slot, size) in enumerate(zip(slots, sizes, strict=True)):
            rows[slot] = row
            pools[size] = pools.get(size, 0) | 1 << slot
        block_sizes = column_of([float(size) for size in sizes], fleet.arrays)
        capacities = list(map(self.geometry.capacity_of, fleet, sizes))
        only = (sizes[0], self.geometry.most_blocks(sizes[0])) if len(pools) == 1 and not fleet.arrays else None
        servers = list(zip(sizes, capacities, strict=True))
        held = {size: max(most for other, most in servers if other == size) for size in pools}
        return Layout(rows, pools, block_sizes, servers, held, only)

    def _few(self, sizes: list[int]) -> list[int]:
        """The block sizes of servers, without the rarest ones, because a prompt is hashed once for each size."""
        common = [size for size, _ in Counter(sizes).most_common(MAX_BLOCK_SIZES + 1)]
        self.sizes_merged = len(common) > MAX_BLOCK_SIZES
        if not self.sizes_merged:
            return sizes
        kept = set(common[:MAX_BLOCK_SIZES])
        return [size if size in kept else common[0] for size in sizes]

    def _chains(self, request: RequestMetadata, held: Mapping[int, int]) -> dict[int, list[Chain]]:
        first = self._first_link(request)
        if request.token_ids is not None:
            prompts = [token_bytes(request.token_ids)]
        elif isinstance(request.prompt, tuple):
            prompts = [token_bytes(prompt) for prompt in request.prompt]
        else:
            prompts = [token_bytes(request.prompt)]
        chains: dict[int, list[Chain]] = {}
        for size, most in held.items():
            limit = self.geometry.most_blocks(size)
            chains[size] = [block_hashes(one, first, size, limit, held=most, known=self._known) for one in prompts]
        return chains

    def _first_link(self, request: RequestMetadata) -> int:
        """The hash that the chain of this request starts from. It is cached per model, because models are few; hashes
        with salts are not cached."""
        if request.cache_salt:
            return first_link(request.model_name, request.cache_salt)
        link = self._first_links.get(request.model_name)
        if link is None:
            if len(self._first_links) >= _MAX_MODELS:  # clients choose the names
                self._first_links.clear()
            link = self._first_links[request.model_name] = first_link(request.model_name)
        return link

    def _matched(self, layout: Layout, chains: Mapping[int, Sequence[Chain]], arrays: bool) -> tuple[Column, Column]:
        width = len(layout.block_sizes)
        match: Column = np.zeros(width) if arrays else [0.0] * width
        totals = {size: float(sum(chain.blocks for chain in prompts)) for size, prompts in chains.items()}
        for size, prompts in chains.items():
            for chain in prompts:
                self._match(chain, layout.pools[size], match, layout.rows)
        if len(totals) == 1:
            [total] = totals.values()
            return match, np.full(width, total) if arrays else [total] * width
        return match, column_of([totals[int(size)] for size in layout.block_sizes], arrays)

    def _match(self, chain: Chain, pool: int, match: Column, rows: list[int]) -> None:
        """Add the blocks of a chain that the servers of a pool hold."""
        for servers, depth in self.index.runs(chain.links, pool):
            _add(match, servers, chain.blocks_in(depth), rows)


def _add(match: Column, servers: int, blocks: int, rows: list[int]) -> None:
    if isinstance(match, list) or servers.bit_count() < _MANY_SERVERS:
        while servers:
            lowest = servers & -servers
            match[rows[lowest.bit_length() - 1]] += blocks
            servers ^= lowest
    else:
        raw = np.frombuffer(servers.to_bytes(-(-len(rows) // 8), "little"), dtype=np.uint8)
        match[np.asarray(rows)[np.flatnonzero(np.unpackbits(raw, bitorder="little"))]] += blocks
