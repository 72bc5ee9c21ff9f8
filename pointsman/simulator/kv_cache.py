"""The blocks of a KV cache: owners, content, and eviction.

A block is free, or used by running jobs, or idle: it holds part of a text that may be asked for again. Idle blocks are
evicted in the order of their last use, the end of a text before its beginning.
"""

from collections import OrderedDict
from collections.abc import Sequence


class Lease:
    """The blocks of one job."""

    __slots__ = ("own", "shared")

    def __init__(self) -> None:
        self.shared: list[int] = []
        """Hashes of blocks that other jobs may use too; always those at the beginning."""
        self.own = 0
        """Further blocks, of this job only."""


class KvCache:
    """Counts blocks; it stores no data."""

    def __init__(self, kv_tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self.capacity = kv_tokens // block_size
        self._users: dict[int, int] = {}
        """Hash -> number of leases that share the block."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Hashes of idle blocks, the least recently used first."""
        self._own = 0

    @property
    def used(self) -> int:
        """Blocks of running jobs."""
        return len(self._users) + self._own

    @property
    def idle(self) -> int:
        """Idle blocks."""
        return len(self._idle)

    @property
    def usage(self) -> float:
        return self.used / self.capacity if self.capacity else 1.0

    def blocks_for(self, tokens: int) -> int:
        """Blocks for this many tokens."""
        return -(-tokens // self.block_size)

    def known(self, hashes: Sequence[int], limit: int) -> int:
        """How many blocks at the beginning are cached, at most `limit`."""
        users, idle = self._users, self._idle
        for index, block in enumerate(hashes):
            if index == limit or (block not in users and block not in idle):
                return index
        return min(len(hashes), limit)

    def lease(self, hashes: Sequence[int], known: int, blocks: int) -> Lease | None:
        """Allocate blocks, of which the first `known` are cached; None if there is not enough room."""
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
        """Allocate blocks, evicting idle ones; `settle` assigns them to a lease later."""
        self._own += blocks
        while len(self._users) + len(self._idle) + self._own > self.capacity:
            self._idle.popitem(last=False)

    def settle(self, lease: Lease, blocks: int) -> None:
        """Assign to a job the blocks that were allocated with `extend`: it has this many now."""
        lease.own = blocks - len(lease.shared)

    def publish(self, lease: Lease, hashes: Sequence[int], blocks: int) -> None:
        """The first `blocks` blocks are computed: other jobs may share them, unless another job computed the same."""
        for block in hashes[len(lease.shared) : blocks]:
            if block in self._users:
                break
            self._idle.pop(block, None)  # computed again although it was cached: the old one is evicted
            self._users[block] = 1
            lease.shared.append(block)
            lease.own -= 1
            self._own -= 1

    def release(self, lease: Lease) -> None:
        """Free the blocks of a job; shared ones stay until the room is needed."""
        self._own -= lease.own
        for block in reversed(lease.shared):
            users = self._users.pop(block) - 1
            if users:
                self._users[block] = users
            else:
                self._idle[block] = None
        lease.own = 0
        lease.shared.clear()
