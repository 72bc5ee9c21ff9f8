"""Which server probably has which prefix in its cache: chained block hashes, and an index of who was sent what.

The index keeps, per server, the blocks it was sent in order of use (bounded, oldest out first), and per block the
set of its holders as the bits of one integer. Looking a prompt up is a few dictionary accesses for each time that its
holders become fewer, however many blocks and servers there are.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from struct import Struct

from xxhash import xxh64_intdigest

BYTES_PER_TOKEN = 4
"""A token id is four bytes, and without a tokenizer four bytes of text stand in for a token."""

_PAIR = Struct("<QQ").pack


def first_link(model: str, cache_salt: str = "") -> int:
    """The hash that a chain for this model starts from."""
    return xxh64_intdigest((model + cache_salt).encode())


def token_bytes(prompt: str | bytes | Sequence[int]) -> bytes:
    """A prompt as the bytes of its tokens."""
    if isinstance(prompt, str):
        prompt = prompt.encode()
    if isinstance(prompt, bytes):
        short = len(prompt) % BYTES_PER_TOKEN
        return prompt if not short else prompt + b"\0" * (BYTES_PER_TOKEN - short)
    return Struct(f"<{len(prompt)}I").pack(*prompt)


def block_hashes(tokens: bytes, first: int, block_size: int, most: int | None = None) -> list[int]:
    """The chain of a prompt: each hash names its block and everything before it. The last block may be partial."""
    step = block_size * BYTES_PER_TOKEN
    end = len(tokens) if most is None else min(len(tokens), most * step)
    link, chain = first, []
    for start in range(0, end, step):
        link = xxh64_intdigest(_PAIR(xxh64_intdigest(tokens[start : start + step]), link))
        chain.append(link)
    return chain


class PrefixIndex:
    """Who holds which blocks, as far as what we sent tells. Memory is bounded by the capacities of the servers."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._recency: dict[int, OrderedDict[int, None]] = {}
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        """Entries: pairs of a server and a block."""
        return sum(map(len, self._recency.values()))

    @property
    def servers(self) -> Set[str]:
        return self._slots.keys()

    def slot(self, server: str) -> int:
        """The bit of this server in sets of holders; kept until it is forgotten."""
        slot = self._slots.get(server)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._slots)
            self._slots[server] = slot
        return slot

    def record(self, server: str, chain: Sequence[int], capacity: int) -> None:
        """This server was sent a prompt with these blocks and has room for `capacity` of them in all."""
        slot = self.slot(server)
        bit = 1 << slot
        recency = self._recency.get(slot)
        if recency is None:
            recency = self._recency[slot] = OrderedDict()
        holders, known = self._holders, self._holders.get
        # Deepest first, so that a prefix is forgotten from its tail, as engines evict: a run stays unbroken.
        for link in reversed(chain):
            if link in recency:
                recency.move_to_end(link)
            else:
                recency[link] = None
                holders[link] = known(link, 0) | bit
        while len(recency) > capacity:
            self._drop(recency.popitem(last=False)[0], bit)

    def forget(self, server: str) -> None:
        """The server has left or lost its cache."""
        slot = self._slots.pop(server, None)
        if slot is None:
            return
        self._free.append(slot)
        for link in self._recency.pop(slot, ()):
            self._drop(link, 1 << slot)

    def _drop(self, link: int, bit: int) -> None:
        left = self._holders[link] & ~bit
        if left:
            self._holders[link] = left
        else:
            del self._holders[link]

    def runs(self, chain: Sequence[int], among: int) -> list[tuple[int, int]]:
        """(servers, blocks): servers of the set `among` that hold exactly the first so many blocks, none left out.

        Servers that do not hold the first block are not listed. A link names everything before it and is forgotten
        before it, so the holders of each block are among those of the block before: where their set changes is
        found by bisection.
        """
        found: list[tuple[int, int]] = []
        known, last = self._holders.get, len(chain) - 1
        place = 0
        holding = known(chain[0], 0) & among if chain else 0
        while holding:
            if known(chain[last], 0) & holding == holding:
                found.append((holding, last + 1))
                break
            beyond = last
            while beyond - place > 1:
                middle = (place + beyond) // 2
                if known(chain[middle], 0) & holding == holding:
                    place = middle
                else:
                    beyond = middle
            still = known(chain[beyond], 0) & holding
            found.append((holding ^ still, beyond))
            place, holding = beyond, still
        return found


def bits(servers: int) -> Iterator[int]:
    """The slots in a set of servers."""
    while servers:
        lowest = servers & -servers
        yield lowest.bit_length() - 1
        servers ^= lowest
