"""The blocks of a KV cache: whose they are, what they hold, and which are given up first.

A block is free, or it belongs to running jobs, or it holds the known beginning of some text and waits to be asked for
again. Waiting blocks are given up in the order in which they were last used, the ends of texts before their beginnings.
"""

from collections import OrderedDict
from collections.abc import Sequence


class Lease:
    """The blocks of one job."""

    __slots__ = ("own", "shared")

    def __init__(self) -> None:
        self.shared: list[int] = []
        """Hashes of blocks that others may use too; always those at the beginning."""
        self.own = 0
        """Blocks of its own after them."""


class KvCache:
    """Counts blocks; it holds nothing."""

    def __init__(self, kv_tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self.capacity = kv_tokens // block_size
        self._users: dict[int, int] = {}
        """Hash -> leases that share the block."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Hashes of blocks that nobody uses now, the longest unused first."""
        self._own = 0

    @property
    def used(self) -> int:
        """Blocks of running jobs."""
        return len(self._users) + self._own

    @property
    def idle(self) -> int:
        """Blocks that nobody uses, and that still hold something."""
        return len(self._idle)

    @property
    def usage(self) -> float:
        return self.used / self.capacity if self.capacity else 1.0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_size)

    def known(self, hashes: Sequence[int], most: int) -> int:
        """How many blocks at the beginning are there already."""
        users, idle = self._users, self._idle
        for place, block in enumerate(hashes):
            if place == most or (block not in users and block not in idle):
                return place
        return min(len(hashes), most)

    def lease(self, hashes: Sequence[int], known: int, blocks: int) -> Lease | None:
        """So many blocks, the first `known` of which are there already; None: there is not enough room."""
        idle_hits = sum(block in self._idle for block in hashes[:known])
        if self.used + idle_hits + blocks - known > self.capacity:
            return None
        lease = Lease()
        for block in hashes[:known]:
            self._idle.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
            lease.shared.append(block)
        lease.own = blocks - known
        self.extend(lease.own)
        return lease

    def has_room(self, blocks: int) -> bool:
        return self.used + blocks <= self.capacity

    def extend(self, blocks: int) -> None:
        """Take blocks, for which idle ones are given up; `settle` says later whose they were."""
        self._own += blocks
        while len(self._users) + len(self._idle) + self._own > self.capacity:
            self._idle.popitem(last=False)

    def settle(self, lease: Lease, blocks: int) -> None:
        """The job holds so many blocks now: those beyond its lease were taken with `extend`."""
        lease.own = blocks - len(lease.shared)

    def publish(self, lease: Lease, hashes: Sequence[int], blocks: int) -> None:
        """The first `blocks` blocks are computed: others may share them, unless somebody else computed the same."""
        for block in hashes[len(lease.shared) : blocks]:
            if block in self._users:
                break
            self._idle.pop(block, None)  # computed anew although it was there: the old one is given up
            self._users[block] = 1
            lease.shared.append(block)
            lease.own -= 1
            self._own -= 1

    def release(self, lease: Lease) -> None:
        """The job is gone; what it shared stays until the room is needed."""
        self._own -= lease.own
        for block in reversed(lease.shared):
            users = self._users.pop(block) - 1
            if users:
                self._users[block] = users
            else:
                self._idle[block] = None
        lease.own = 0
        lease.shared.clear()
