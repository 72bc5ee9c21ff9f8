"""Estimates how much of a prompt each endpoint has in its cache, from what was sent to it before.

The index keeps, per server, the blocks that it was sent in order of use (bounded, least recently used out first), and
per block the set of its holders as the bits of one integer. Looking up a prompt takes a few dictionary accesses each
time that its set of holders shrinks, however many blocks and servers there are. Servers report how much they can hold;
the memory of the index and the time of each call are bounded whatever they report.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from struct import Struct

import msgspec
from xxhash import xxh3_64_intdigest

from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import PREFIX_MATCH, Endpoints, PrefixMatch, RequestCycle
from pointsman.selection import Column, Key, PerMembers, SchedulingResult
from pointsman.selection.arrays import np
from pointsman.selection.columns import column_of
from pointsman.types import RequestMetadata

BYTES_PER_TOKEN = 4
"""A token id is four bytes, and without a tokenizer four bytes of text stand in for a token."""

ROW = 16
"""The first 16 hashes of a prompt are of one block each, the next 16 of two blocks each, the next of four, and so on:
the end of a match is found to within a sixteenth of its length, and a prompt of any length takes few hashes."""


def first_link(model: str, cache_salt: str = "") -> int:
    """The hash that a chain for this model starts from."""
    return xxh3_64_intdigest((model + cache_salt).encode())


def token_bytes(prompt: str | bytes | memoryview | Sequence[int]) -> bytes | memoryview:
    if isinstance(prompt, bytes | memoryview):
        return prompt
    if isinstance(prompt, str):
        return prompt.encode()
    return Struct(f"<{len(prompt)}I").pack(*prompt)


class Chain(msgspec.Struct, frozen=True, gc=False):
    """A prompt as hashes, each of which names its part of the prompt and everything before it."""

    links: list[int]
    """One for each block of the first row; in each further row, one for twice as many blocks."""
    blocks: int
    """In all; the last may be partial."""

    def blocks_in(self, links: int) -> int:
        """How many blocks the first `links` links stand for."""
        if links <= ROW:
            return links
        rows, rest = divmod(links, ROW)
        return min((ROW << rows) - ROW + (rest << rows), self.blocks)


def block_hashes(tokens: bytes | memoryview, first: int, block_size: int, max_blocks: int | None = None) -> Chain:
    """The chain of a prompt, of at most `max_blocks` blocks. None: all."""
    step = block_size * BYTES_PER_TOKEN
    end = len(tokens) if max_blocks is None else min(len(tokens), max_blocks * step)
    link = first  # the seed of each hash chains it to what came before
    blocks = -(-end // step)
    if end < len(tokens) or blocks > ROW:
        tokens = memoryview(tokens)[:end]  # slices of bytes would be copies
    links: list[int] = []
    start = 0
    while start < end:
        row_ends = min(start + ROW * step, end)
        for at in range(start, row_ends, step):
            link = xxh3_64_intdigest(tokens[at : at + step], link)
            links.append(link)
        start, step = row_ends, step * 2
    return Chain(links, blocks)


MAX_INDEX_BYTES = 512 * 1024 * 1024
AT_ONCE = 1024
"""Entries that one call drops; more are left to the calls after it."""


class IndexMemory:
    """How many entries an index has, and how many it may have."""

    __slots__ = ("_max_bytes", "_slots", "dropped", "entries", "max_entries")

    def __init__(self, max_bytes: int) -> None:
        self.entries = 0
        """Pairs of a server and a block."""
        self.dropped = 0
        """Entries that were dropped for want of memory."""
        self._slots = 0
        self.limit(max_bytes)

    @property
    def used_bytes(self) -> int:
        """About."""
        return self.entries * self._entry_bytes

    @property
    def is_short(self) -> bool:
        """Whether memory is what limits the index, not the caches of servers."""
        return self.dropped > 0 and self.entries >= self.max_entries * 0.9

    @property
    def _entry_bytes(self) -> int:
        """Measured: one in each of two dictionaries, and an integer with a bit for each slot."""
        return 240 + self._slots // 7

    def limit(self, max_bytes: int) -> None:
        """Use at most this much; what is too much is dropped by the next calls."""
        self._max_bytes = max_bytes
        self.max_entries = max_bytes // self._entry_bytes

    def new_slot(self) -> int:
        self._slots += 1
        self.limit(self._max_bytes)
        return self._slots - 1


class PrefixIndex:
    """Which server holds which blocks, inferred from what it was sent.

    Bounded by the caches of servers, and by memory: beyond that, the server with the most entries loses those that it
    used least recently.
    """

    def __init__(self, max_bytes: int = MAX_INDEX_BYTES) -> None:
        self.memory = IndexMemory(max_bytes)
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._recency: dict[int, OrderedDict[int, int]] = {}
        """By slot: the links that it holds, least recently used first, each with the blocks that it stands for."""
        self._left: dict[int, OrderedDict[int, int]] = {}
        """The same of servers that have left, until their entries are dropped."""
        self._held: dict[int, int] = {}
        """By slot: blocks in all."""
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        """Entries: pairs of a server and a block."""
        return self.memory.entries

    @property
    def servers(self) -> Set[str]:
        return self._slots.keys()

    def held(self, server: str) -> int:
        """Blocks that a server holds; 0 if the server is unknown."""
        return self._held.get(self._slots.get(server, -1), 0)

    def slot(self, server: str) -> int:
        """The bit of a server in sets of holders; kept until the server is forgotten."""
        slot = self._slots.get(server)
        if slot is None:
            slot = self._slots[server] = self._free.pop() if self._free else self.memory.new_slot()
        return slot

    def record(self, server: str, links: Sequence[int], capacity: int) -> None:
        """A server was sent a prompt with these links, and holds at most `capacity` blocks."""
        slot = self._slots.get(server)
        if slot is None:
            slot = self.slot(server)
        bit, memory = 1 << slot, self.memory
        recency = self._recency.get(slot)
        if recency is None:
            recency = self._recency[slot] = OrderedDict()
        held, entries = self._held.get(slot, 0), len(recency)
        # Deepest first, so that a prefix is forgotten from its tail, as engines evict: a run stays unbroken.
        for row in range((len(links) - 1) // ROW, 0, -1):
            held += self._use(links[row * ROW : (row + 1) * ROW], 1 << row, recency, bit)
        held += self._use(links[:ROW], 1, recency, bit)
        most = AT_ONCE + len(links)
        while held > capacity and most:
            link, blocks = recency.popitem(last=False)
            held -= blocks
            most -= 1
            self._drop(link, bit)
        self._held[slot] = held
        memory.entries += len(recency) - entries
        if memory.entries > memory.max_entries or self._left:
            self._shrink()

    def _shrink(self) -> None:
        """Drop entries of servers that have left, and if there are still too many, of the server with the most."""
        memory = self.memory
        for slot, left in list(self._left.items()):
            self._pop(slot, left, AT_ONCE)
            if left:
                return
            del self._left[slot]
            self._free.append(slot)
        too_many = memory.entries - memory.max_entries
        if too_many > 0:
            slot, largest = max(self._recency.items(), key=lambda one: len(one[1]))
            batch = min(max(too_many, len(largest) // 16), len(largest), AT_ONCE)
            self._held[slot] -= self._pop(slot, largest, batch)
            memory.dropped += batch

    def _pop(self, slot: int, recency: OrderedDict[int, int], most: int) -> int:
        """Drop the entries of a server that were used least recently; how many blocks these are."""
        blocks, count, bit = 0, min(most, len(recency)), 1 << slot
        for _ in range(count):
            link, stands_for = recency.popitem(last=False)
            blocks += stands_for
            self._drop(link, bit)
        self.memory.entries -= count
        return blocks

    def _use(self, links: Sequence[int], blocks: int, recency: OrderedDict[int, int], bit: int) -> int:
        """A server uses links of `blocks` blocks each; returns how many blocks are new to it."""
        holders, known, refresh = self._holders, self._holders.get, recency.move_to_end
        new = 0
        for link in reversed(links):
            if link in recency:
                refresh(link)
            else:
                recency[link] = blocks
                holders[link] = known(link, 0) | bit
                new += blocks
        return new

    def forget(self, server: str) -> None:
        """A server has left, or lost its cache."""
        slot = self._slots.pop(server, None)
        if slot is None:
            return
        self._held.pop(slot, None)
        self._left[slot] = self._recency.pop(slot, OrderedDict())
        self._shrink()

    def _drop(self, link: int, bit: int) -> None:
        left = self._holders[link] & ~bit
        if left:
            self._holders[link] = left
        else:
            del self._holders[link]

    def runs(self, links: Sequence[int], among: int) -> list[tuple[int, int]]:
        """(servers, depth): the servers of the set `among` that hold exactly the first `depth` links.

        Servers that do not hold the first link are not listed. A link names everything before it and is forgotten
        before it, so the holders of each link hold the one before too: bisection finds where the set shrinks.
        """
        found: list[tuple[int, int]] = []
        known, last = self._holders.get, len(links) - 1
        index = 0
        holding = known(links[0], 0) & among if links else 0
        while holding:
            if known(links[last], 0) & holding == holding:
                found.append((holding, last + 1))
                break
            beyond = last
            while beyond - index > 1:
                middle = (index + beyond) // 2
                if known(links[middle], 0) & holding == holding:
                    index = middle
                else:
                    beyond = middle
            still = known(links[beyond], 0) & holding
            found.append((holding ^ still, beyond))
            index, holding = beyond, still
        return found


class Hashed(msgspec.Struct, frozen=True, eq=False):
    """The hashes of a request, kept in its cycle until the request is sent."""

    chains: Mapping[int, Sequence[Chain]]
    """By block size: the chain of each prompt."""
    layout: "Layout"
    match: Column


_HASHED: Key[Hashed] = Key("prefix-hashed")

_BYTES = (bytes, memoryview)
_MAX_MODELS = 1_000
MAX_BLOCK_SIZES = 4
"""Block sizes that are told apart: a prompt is hashed once for each. Servers of other sizes are matched by the most
common one."""
_MANY_SERVERS = 64
"""From this many servers on, a set of bits is added to a column in one step."""


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
    """(block size, maximum of blocks) if they are the same for all servers, and these are few."""


class CacheGeometry(msgspec.Struct, frozen=True):
    """Block and cache sizes of endpoints: as their engines report them (`auto_tune`), else as configured."""

    auto_tune: bool
    block_size: int
    capacity: int
    """Blocks per server, for servers that do not report it."""
    max_tokens: int
    """Of a prompt, to be matched; 0: `max_blocks` is the limit."""
    max_blocks: int
    """0: no limit."""
    min_block_size: int = 64
    """Smaller blocks are hashed as blocks of this size: a finer match is not worth the hashing."""

    def block_size_of(self, endpoint: Endpoint) -> int:
        """Tokens per block, as this endpoint is matched."""
        metrics = endpoint.metrics
        reported = metrics.block_size if self.auto_tune and metrics is not None else 0
        return max(reported if reported > 0 else self.block_size, self.min_block_size)

    def capacity_of(self, endpoint: Endpoint, block_size: int) -> int:
        """How many blocks of this size fit into the endpoint's cache, by what it reports."""
        metrics = endpoint.metrics
        if not self.auto_tune or metrics is None or metrics.num_blocks <= 0:
            return self.capacity
        if metrics.block_size <= 0:
            return metrics.num_blocks
        return max(1, metrics.num_blocks * metrics.block_size // block_size)

    def most_blocks(self, block_size: int) -> int | None:
        """Blocks of a prompt that are matched; None: all."""
        if self.max_tokens > 0:
            return self.max_tokens // block_size
        return self.max_blocks or None


class ApproxPrefixCacheProducer:
    """Hashes prompts block by block and remembers where each went.

    An endpoint's block size and cache size are what its engine reported (`autoTune`), else the parameters, which also
    hold until it is first measured. Endpoints with different block sizes are matched each in its own. A match counts
    only the unbroken run of blocks, from the first, that this endpoint was sent and has not evicted since.
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
        self.geometry = CacheGeometry(
            auto_tune,
            block_size_tokens,
            lru_capacity_per_server,
            max_prefix_tokens_to_match,
            max_prefix_blocks_to_match,
        )
        self.prompt_tokens = 0
        """Of all prompts sent, in whole blocks."""
        self.expected_cached_tokens = 0
        """How many of them were expected in the cache of the instance."""
        self.sizes_merged = False
        """Servers report more block sizes than are told apart."""
        self.listener: Callable[[str, Sequence[int]], None] | None = None
        self._layout = PerMembers(self._laid_out)
        self._first_links: dict[str, int] = {}
        """By model."""

    def produce(self, cycle: RequestCycle, candidates: Endpoints) -> None:
        layout, request = self._layout.of(candidates), cycle.request
        chains: Mapping[int, Sequence[Chain]]
        match: Column
        total: Column
        if layout.only is not None and type(request.prompt) in _BYTES and request.token_ids is None:
            size, most_blocks = layout.only
            chain = block_hashes(request.prompt, self._first_link(request), size, most_blocks)  # type: ignore[arg-type]
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
        return Layout(rows, pools, block_sizes, list(zip(sizes, capacities, strict=True)), only)

    def _few(self, sizes: list[int]) -> list[int]:
        """The block sizes of servers, without the rarest: a prompt is hashed once for each."""
        common = [size for size, _ in Counter(sizes).most_common(MAX_BLOCK_SIZES + 1)]
        self.sizes_merged = len(common) > MAX_BLOCK_SIZES
        if not self.sizes_merged:
            return sizes
        kept = set(common[:MAX_BLOCK_SIZES])
        return [size if size in kept else common[0] for size in sizes]

    def _chains(self, request: RequestMetadata, pools: Mapping[int, int]) -> dict[int, list[Chain]]:
        first = self._first_link(request)
        if request.token_ids is not None:
            prompts = [token_bytes(request.token_ids)]
        elif isinstance(request.prompt, tuple):
            prompts = [token_bytes(prompt) for prompt in request.prompt]
        else:
            prompts = [token_bytes(request.prompt)]
        return {
            size: [block_hashes(tokens, first, size, self.geometry.most_blocks(size)) for tokens in prompts]
            for size in pools
        }

    def _first_link(self, request: RequestMetadata) -> int:
        """The hash that the chain of this request starts from. Cached per model, as models are few; salts are not."""
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
