"""An index of the beginnings of the prompts that each server was sent, as hashes.

For each server, the index keeps the blocks that the server was sent, in order of use; their number is bounded, and the
least recently used are dropped first. For each block, it keeps the set of holders as the bits of one integer. Looking
up a prompt takes a few dictionary accesses each time that the set of holders shrinks, however many blocks and servers
there are. Servers report how much they can hold. The memory of the index and the time of each call are bounded,
whatever servers report.
"""

from collections import OrderedDict
from collections.abc import Sequence, Set
from struct import Struct

import msgspec
from xxhash import xxh3_64_intdigest

BYTES_PER_TOKEN = 4
"""A token id has four bytes. Without a tokenizer, four bytes of text count as a token."""

ROW = 16
"""The first 16 hashes of a prompt are for one block each, the next 16 for two blocks each, the next 16 for four, and so
on. So the end of a match is found to within a sixteenth of its length, and a prompt of any length takes few hashes."""


def first_link(model: str, cache_salt: str = "") -> int:
    """The hash with which a chain for this model starts."""
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
    """The hashes of blocks in the first row; in each further row, a hash is for twice as many blocks."""
    blocks: int
    """Total number of blocks; the last may be partial."""

    def blocks_in(self, links: int) -> int:
        """How many blocks the first `links` links cover."""
        if links <= ROW:
            return links
        rows, rest = divmod(links, ROW)
        return min((ROW << rows) - ROW + (rest << rows), self.blocks)


class KnownRows:
    """Rows of hashes from the most recent prompts. A prompt that begins like one of these is hashed a row at a time, at
    the speed of memory. Its new part is hashed block by block."""

    __slots__ = ("_memory", "_rows")

    MOST, ROW_BYTES, SHARE = 2048, 1024, 16
    """Maximum number of rows; assumed bytes per row; and a divisor: rows take at most the memory of the index divided
    by it, in addition. A prompt of 256 KB has five rows."""

    def __init__(self, memory: "IndexMemory") -> None:
        self._memory = memory
        self._rows: OrderedDict[int, list[int]] = OrderedDict()
        """Rows by the hash of all their bytes; this hash is chained to the rows before."""

    def __len__(self) -> int:
        return len(self._rows)

    def links(self, row: memoryview, link: int, step: int) -> list[int]:
        whole = xxh3_64_intdigest(row, link)
        known = self._rows.get(whole)
        if known is not None:
            self._rows.move_to_end(whole)
            return known
        links = self._rows[whole] = _links(row, link, step)
        most = min(self.MOST, self._memory.max_bytes // (self.SHARE * self.ROW_BYTES))
        for _ in range(min(len(self._rows) - most, AT_ONCE)):
            self._rows.popitem(last=False)
        return links


def _links(row: bytes | memoryview, link: int, step: int) -> list[int]:
    return [link := xxh3_64_intdigest(row[at : at + step], link) for at in range(0, len(row), step)]


def block_hashes(
    tokens: bytes | memoryview,
    first: int,
    block_size: int,
    max_blocks: int | None = None,
    *,
    held: int | None = None,
    known: KnownRows | None = None,
) -> Chain:
    """The chain of the first `max_blocks` blocks of a prompt, or of all if that is None. Rows that begin after `held`
    blocks are not hashed, because no server holds more blocks than that."""
    step = block_size * BYTES_PER_TOKEN
    end = len(tokens) if max_blocks is None else min(len(tokens), max_blocks * step)
    blocks = -(-end // step)
    if end < len(tokens) or blocks > ROW:
        tokens = memoryview(tokens)[:end]  # slices of bytes would be copies
    last = end if held is None else min(end, held * step)
    start, link = ROW * step, first
    # The seed of each hash chains it to the hashes before.
    links = [link := xxh3_64_intdigest(tokens[at : at + step], link) for at in range(0, min(start, len(tokens)), step)]
    while start < last:
        step *= 2
        row = memoryview(tokens)[start : start + ROW * step]
        start += ROW * step
        links += _links(row, links[-1], step) if known is None or start > end else known.links(row, links[-1], step)
    return Chain(links, blocks)


MAX_INDEX_BYTES = 512 * 1024 * 1024
AT_ONCE = 1024
"""Maximum number of entries that one call drops; later calls drop the rest."""


class IndexMemory:
    """How many entries an index has, and how many it may have."""

    __slots__ = ("_slots", "dropped", "entries", "max_bytes", "max_entries")

    def __init__(self, max_bytes: int) -> None:
        self.entries = 0
        """Pairs of a server and a block."""
        self.dropped = 0
        """Entries that were dropped because the memory is used up."""
        self._slots = 0
        self.limit(max_bytes)

    @property
    def used_bytes(self) -> int:
        """Approximate bytes of memory."""
        return self.entries * self._entry_bytes

    @property
    def is_short(self) -> bool:
        """Whether memory limits the index, not the caches of servers."""
        return self.dropped > 0 and self.entries >= self.max_entries * 0.9

    @property
    def _entry_bytes(self) -> int:
        """Measured size of an entry in each of two dictionaries, and of an integer with a bit for each slot."""
        return 240 + self._slots // 7

    def limit(self, max_bytes: int) -> None:
        """Use at most this much memory; the next calls drop the excess."""
        self.max_bytes = max_bytes
        self.max_entries = max_bytes // self._entry_bytes

    def new_slot(self) -> int:
        self._slots += 1
        self.limit(self.max_bytes)
        return self._slots - 1


class PrefixIndex:
    """Which server holds which blocks, inferred from what it was sent.

    The caches of servers bound the index, and so does a memory limit. Beyond that limit, the server with the most
    entries loses the entries that it used least recently.
    """

    def __init__(self, max_bytes: int = MAX_INDEX_BYTES) -> None:
        self.memory = IndexMemory(max_bytes)
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._recency: dict[int, OrderedDict[int, int]] = {}
        """The links that each slot holds, least recently used first, each with its number of blocks."""
        self._left: dict[int, OrderedDict[int, int]] = {}
        """The links of servers that have left, until their entries are dropped."""
        self._held: dict[int, int] = {}
        """The total number of blocks of each slot."""
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        """Entries: pairs of a server and a block."""
        return self.memory.entries

    @property
    def servers(self) -> Set[str]:
        return self._slots.keys()

    def held(self, server: str) -> int:
        """Number of blocks that a server holds; 0 if the server is unknown."""
        return self._held.get(self._slots.get(server, -1), 0)

    def slot(self, server: str) -> int:
        """The bit of a server in sets of holders; kept until the server is forgotten."""
        slot = self._slots.get(server)
        if slot is None:
            slot = self._slots[server] = self._free.pop() if self._free else self.memory.new_slot()
        return slot

    def record(self, server: str, links: Sequence[int], capacity: int) -> None:
        """Record that a server, which holds at most `capacity` blocks, was sent a prompt with these links."""
        slot = self._slots.get(server)
        if slot is None:
            slot = self.slot(server)
        bit, memory = 1 << slot, self.memory
        recency = self._recency.get(slot)
        if recency is None:
            recency = self._recency[slot] = OrderedDict()
        held, entries = self._held.get(slot, 0), len(recency)
        # Deepest first: a prefix is then dropped from its end, as engines evict, and stays contiguous.
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
        """Drop entries of servers that have left. If too many remain, drop entries of the server with the most."""
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
        """Drop a server's least recently used entries; returns the number of their blocks."""
        blocks, count, bit = 0, min(most, len(recency)), 1 << slot
        for _ in range(count):
            link, stands_for = recency.popitem(last=False)
            blocks += stands_for
            self._drop(link, bit)
        self.memory.entries -= count
        return blocks

    def _use(self, links: Sequence[int], blocks: int, recency: OrderedDict[int, int], bit: int) -> int:
        """Record that a server uses links of `blocks` blocks each; returns how many blocks are new to it."""
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
        """Record that a server has left, or lost its cache."""
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

        Servers that do not hold the first link are not listed. Each link names everything before it, and is forgotten
        before the links before it. So the holders of a link hold all earlier links too, and bisection finds where the
        set of holders shrinks.
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
