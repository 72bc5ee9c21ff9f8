"""How much of a prompt each endpoint probably has in its cache, from what was sent to it before."""

from collections.abc import Mapping, Sequence

import msgspec

from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import PREFIX_MATCH, Endpoints, PrefixMatch, RequestCycle
from pointsman.routing.prefix_index import Chain, PrefixIndex, block_hashes, first_link, token_bytes
from pointsman.selection import Column, Key, PerMembers, SchedulingResult
from pointsman.selection.arrays import np
from pointsman.selection.columns import column_of
from pointsman.types import RequestMetadata


class Hashed(msgspec.Struct, frozen=True, eq=False):
    """What was worked out of a request, for when it is sent."""

    chains: Mapping[int, Sequence[Chain]]
    """By block size: the chain of each prompt."""
    layout: "Layout"
    match: Column


_HASHED: Key[Hashed] = Key("prefix-hashed")

_BYTES = (bytes, memoryview)
_MOST_MODELS = 1_000
_MANY = 64
"""From this many servers on, a set of bits is spread over a column in one go."""


class Layout(msgspec.Struct):
    """What depends on the members of the fleet alone."""

    rows: list[int]
    """slot -> row"""
    pools: dict[int, int]
    """block size -> the servers that have it"""
    block_sizes: Column
    servers: list[tuple[int, int]]
    """row -> its block size, and how many of our blocks fit into its cache"""
    only: tuple[int, int | None] | None
    """(block size, most blocks) if they are the same for all of few servers."""


class ApproxPrefixCacheProducer:
    """Hashes prompts block by block and remembers where each went.

    An endpoint's block size and cache size are what its engine reported (`autoTune`), else the parameters; endpoints
    with different block sizes are matched each in its own. Never measured: the parameters hold. A match counts only the
    unbroken run of blocks, from the first, that this very endpoint was sent and has not evicted since.
    """

    least_block_size = 64
    """Smaller blocks are hashed as blocks of this size: a finer match is not worth the hashing."""

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
        if max_prefix_tokens_to_match < 0:
            raise ValueError(f"maxPrefixTokensToMatch must not be negative, found {max_prefix_tokens_to_match}")
        if max_prefix_blocks_to_match < 0:
            raise ValueError(f"maxPrefixBlocksToMatch must not be negative, found {max_prefix_blocks_to_match}")
        if lru_capacity_per_server < 1:
            raise ValueError(f"lruCapacityPerServer must be at least 1, found {lru_capacity_per_server}")
        self.index = PrefixIndex()
        self.prompt_tokens = 0
        """Of all prompts sent, in whole blocks; and how many of them were expected in the cache of the instance."""
        self.expected_cached_tokens = 0
        self._auto_tune = auto_tune
        self._block_size = block_size_tokens
        self._most_tokens = max_prefix_tokens_to_match
        self._most_blocks = max_prefix_blocks_to_match
        self._capacity = lru_capacity_per_server
        self._layout = PerMembers(self._laid_out)
        self._first_links: dict[str, int] = {}
        """By model."""

    def produce(self, cycle: RequestCycle, candidates: Endpoints) -> None:
        layout, request = self._layout.of(candidates), cycle.request
        chains: Mapping[int, Sequence[Chain]]
        match: Column
        total: Column
        if layout.only is not None and type(request.prompt) in _BYTES and request.token_ids is None:
            size, most = layout.only
            chain = block_hashes(request.prompt, self._first_link(request), size, most)  # type: ignore[arg-type]
            chains, width = {size: (chain,)}, len(layout.servers)
            match, total = [0.0] * width, [float(chain.blocks)] * width
            self._match(chain, layout.pools[size], match, layout.rows)
        else:
            chains = self._chains(request, layout.pools)
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
        self.expected_cached_tokens += int(hashed.match[endpoint.row]) * size

    def departed(self, endpoint: Endpoint) -> None:
        self.index.forget(endpoint.id)

    def block_size_of(self, endpoint: Endpoint) -> int:
        """Tokens per block, as this endpoint is matched."""
        told = endpoint.metrics.block_size if self._auto_tune and endpoint.metrics is not None else 0
        return max(told or self._block_size, self.least_block_size)

    def capacity_of(self, endpoint: Endpoint) -> int:
        """How many of our blocks fit into this endpoint's cache."""
        metrics = endpoint.metrics
        if not self._auto_tune or metrics is None or metrics.num_blocks <= 0:
            return self._capacity
        if metrics.block_size <= 0:
            return metrics.num_blocks
        return max(1, metrics.num_blocks * metrics.block_size // self.block_size_of(endpoint))

    def _laid_out(self, everybody: Endpoints) -> Layout:
        for gone in self.index.servers - {endpoint.id for endpoint in everybody}:
            self.index.forget(gone)
        slots = [self.index.slot(endpoint.id) for endpoint in everybody]
        sizes = [self.block_size_of(endpoint) for endpoint in everybody]
        rows = [0] * (max(slots, default=-1) + 1)
        pools: dict[int, int] = {}
        for row, (slot, size) in enumerate(zip(slots, sizes, strict=True)):
            rows[slot] = row
            pools[size] = pools.get(size, 0) | 1 << slot
        block_sizes = column_of([float(size) for size in sizes], everybody.arrays)
        capacities = [self.capacity_of(endpoint) for endpoint in everybody]
        only = (sizes[0], self._most_of(sizes[0])) if len(pools) == 1 and not everybody.arrays else None
        return Layout(rows, pools, block_sizes, list(zip(sizes, capacities, strict=True)), only)

    def _chains(self, request: RequestMetadata, pools: Mapping[int, int]) -> dict[int, list[Chain]]:
        first = self._first_link(request)
        if request.token_ids is not None:
            prompts = [token_bytes(request.token_ids)]
        elif isinstance(request.prompt, tuple):
            prompts = [token_bytes(prompt) for prompt in request.prompt]
        else:
            prompts = [token_bytes(request.prompt)]
        return {size: [block_hashes(tokens, first, size, self._most_of(size)) for tokens in prompts] for size in pools}

    def _first_link(self, request: RequestMetadata) -> int:
        """Models are few; who salts pays for it."""
        if request.cache_salt:
            return first_link(request.model_name, request.cache_salt)
        link = self._first_links.get(request.model_name)
        if link is None:
            if len(self._first_links) >= _MOST_MODELS:  # names come from clients, without end
                self._first_links.clear()
            link = self._first_links[request.model_name] = first_link(request.model_name)
        return link

    def _most_of(self, block_size: int) -> int | None:
        if self._most_tokens > 0:
            return self._most_tokens // block_size
        return self._most_blocks or None

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
        """Add what the servers of a pool hold of a chain."""
        for servers, depth in self.index.runs(chain.links, pool):
            _add(match, servers, chain.blocks_in(depth), rows)


def _add(match: Column, servers: int, blocks: int, rows: list[int]) -> None:
    if isinstance(match, list) or servers.bit_count() < _MANY:
        while servers:
            lowest = servers & -servers
            match[rows[lowest.bit_length() - 1]] += blocks
            servers ^= lowest
    else:
        raw = np.frombuffer(servers.to_bytes(-(-len(rows) // 8), "little"), dtype=np.uint8)
        match[np.asarray(rows)[np.flatnonzero(np.unpackbits(raw, bitorder="little"))]] += blocks
