"""Which server probably has which prefix in its cache: chained block hashes, and an index of what each server was sent.

The index keeps, per server, the blocks that it was sent in order of use (bounded, least recently used out first), and
per block the set of its holders as the bits of one integer. Looking up a prompt takes a few dictionary accesses each
time that its set of holders shrinks, however many blocks and servers there are.
"""

from collections import OrderedDict
from collections.abc import Sequence, Set
from struct import Struct

import msgspec
from xxhash import xxh3_64_intdigest

BYTES_PER_TOKEN = 4
"""A token id is four bytes, and without a tokenizer four bytes of text stand in for a token."""

ROW = 16
"""The first 16 hashes of a prompt are of one block each, the next 16 of two blocks each, the next of four, and so on:
the end of a match is found to within a sixteenth of its length, and a prompt of any length takes few hashes."""


def first_link(model: str, cache_salt: str = "") -> int:
    """The hash that a chain for this model starts from."""
    return xxh3_64_intdigest((model + cache_salt).encode())


def token_bytes(prompt: str | bytes | memoryview | Sequence[int]) -> bytes | memoryview:
    """A prompt as the bytes of its tokens."""
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


class PrefixIndex:
    """Which server holds which blocks, inferred from what it was sent. Memory is bounded by the servers' capacities."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._recency: dict[int, OrderedDict[int, int]] = {}
        """By slot: the links that it holds, least recently used first, each with the blocks that it stands for."""
        self._held: dict[int, int] = {}
        """By slot: blocks in all."""
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        """Entries: pairs of a server and a block."""
        return sum(map(len, self._recency.values()))

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
            slot = self._free.pop() if self._free else len(self._slots)
            self._slots[server] = slot
        return slot

    def record(self, server: str, links: Sequence[int], capacity: int) -> None:
        """A server was sent a prompt with these links, and holds at most `capacity` blocks."""
        slot = self._slots.get(server)
        if slot is None:
            slot = self.slot(server)
        bit = 1 << slot
        recency = self._recency.get(slot)
        if recency is None:
            recency = self._recency[slot] = OrderedDict()
        held = self._held.get(slot, 0)
        # Deepest first, so that a prefix is forgotten from its tail, as engines evict: a run stays unbroken.
        for row in range((len(links) - 1) // ROW, 0, -1):
            held += self._use(links[row * ROW : (row + 1) * ROW], 1 << row, recency, bit)
        held += self._use(links[:ROW], 1, recency, bit)
        while held > capacity:
            link, blocks = recency.popitem(last=False)
            held -= blocks
            self._drop(link, bit)
        self._held[slot] = held

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
        self._free.append(slot)
        self._held.pop(slot, None)
        for link in self._recency.pop(slot, ()):
            self._drop(link, 1 << slot)

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
