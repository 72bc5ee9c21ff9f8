"""The blocks of a KV cache: owners, content, and eviction, as in vLLM.

A block is free, or running jobs use it. A free block may still hold part of a text that may be requested again. Free
blocks without such a text are taken first. The other free blocks follow in the order in which they were freed; the end
of a text is freed before its beginning.

Blocks with equal owners are kept together as a run. Runs form a tree: a run continues the text of its parent, and its
first block is the key under which the parent has it. A job refers to the last run of its text and, through this run, to
all earlier runs. So the cost of a job depends on the number of its runs, not of its blocks.
"""

from collections import OrderedDict
from typing import NamedTuple


class BlockRun:
    """Successive blocks of one text, with the same owners."""

    __slots__ = ("begin", "end", "following", "hashes", "parent", "users")

    def __init__(
        self, hashes: tuple[int, ...], begin: int, end: int, parent: "BlockRun | None", users: int = 1
    ) -> None:
        self.hashes = hashes
        """Hashes of the whole text. This run is the part of it from `begin` to `end`."""
        self.begin = begin
        self.end = end
        self.parent = parent
        self.users = users
        """The number of jobs that use this run. It is never greater than the number for the parent."""
        self.following: dict[int, BlockRun] | None = None
        """The runs that continue this run's text, by their first block; None before the first of them."""


class Cached(NamedTuple):
    """The longest cached beginning of a text."""

    blocks: int
    run: BlockRun | None
    """The run with the last cached block; None if no block is cached."""


NOTHING = Cached(0, None)


class Lease:
    """The blocks of one job."""

    __slots__ = ("own", "run")

    def __init__(self) -> None:
        self.run: BlockRun | None = None
        """The last run of the job's text that other jobs may also use; None if there is no such run."""
        self.own = 0
        """The number of further blocks, which only this job uses."""

    @property
    def shared(self) -> int:
        """The number of blocks, from the beginning of the text, that other jobs may also use."""
        return 0 if self.run is None else self.run.end


class KvCache:
    """Counts blocks; it stores no data."""

    def __init__(self, kv_tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self.capacity = kv_tokens // block_size
        self.used = 0
        """Blocks of running jobs."""
        self._first: dict[int, BlockRun] = {}
        """The runs that texts begin with, by their first block."""
        self._free: OrderedDict[BlockRun, None] = OrderedDict()
        """Runs that no job uses, in the order in which they are evicted."""
        self._blank = self.capacity
        """Free blocks without a reusable text."""

    @property
    def idle(self) -> int:
        """Free blocks with a reusable text."""
        return self.capacity - self.used - self._blank

    @property
    def usage(self) -> float:
        return self.used / self.capacity if self.capacity else 1.0

    @property
    def room(self) -> int:
        """Blocks that no job uses."""
        return self.capacity - self.used

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def known(self, hashes: tuple[int, ...], limit: int) -> Cached:
        """The cached beginning of a text, of at most `limit` blocks."""
        most = len(hashes)
        if most > limit:
            most = limit
        at, last, following = 0, None, self._first
        while at < most and following:
            run = following.get(hashes[at])
            if run is None:
                break
            last, end = run, run.end
            if end > most:
                end = most
            theirs = run.hashes
            if theirs[at:end] != hashes[at:end]:
                while end - at > 1:
                    middle = (at + end) // 2
                    if theirs[at:middle] == hashes[at:middle]:
                        at = middle
                    else:
                        end = middle
                break
            at = end
            if end < run.end:
                break
            following = run.following  # type: ignore[assignment]
        return Cached(at, last) if last is not None else NOTHING

    def lease(self, lease: Lease, cached: Cached, blocks: int) -> bool:
        """Allocate blocks, the first of which are cached. Returns False if there is not enough room."""
        known, last = cached
        if last is not None:
            if self.used + blocks - known + (0 if last.users else _idle_to(last, known)) > self.capacity:
                return False
            if last.end > known:
                last = self._split(last, known)
            lease.run = run = last
            while run is not None:
                if not run.users:
                    del self._free[run]
                    self.used += run.end - run.begin
                run.users += 1
                run = run.parent  # type: ignore[assignment]
        elif self.used + blocks > self.capacity:
            return False
        lease.own = blocks - known
        self.allocate(blocks - known)
        return True

    def allocate(self, blocks: int) -> None:
        """Allocate further blocks, for which there must be room; the caller adds them to a lease."""
        self.used += blocks
        self._blank -= blocks
        if self._blank < 0:
            self._evict(-self._blank)

    def publish(self, lease: Lease, hashes: tuple[int, ...], blocks: int) -> None:
        """Let other jobs share the first `blocks` blocks, unless another job already shares the same blocks."""
        run = lease.run
        begin = 0 if run is None else run.end
        if blocks > len(hashes):
            blocks = len(hashes)
        if begin >= blocks:
            return
        if run is None:
            following = self._first
        elif run.following:
            following = run.following
        elif run.users == 1 and run.hashes is hashes:
            run.end = blocks  # no other job uses this run, so no second run is needed
            lease.own -= blocks - begin
            return
        else:
            following = run.following = {}
        block = hashes[begin]
        if block not in following:
            following[block] = lease.run = BlockRun(hashes, begin, blocks, run)
            lease.own -= blocks - begin

    def release(self, lease: Lease) -> None:
        """Free the blocks of a job. Blocks of shared texts can be found again until their room is needed."""
        free = self._free
        used, self._blank = self.used - lease.own, self._blank + lease.own
        lease.own = 0
        run, lease.run = lease.run, None
        while run is not None:
            run.users -= 1
            if not run.users:
                free[run] = None
                used -= run.end - run.begin
            run = run.parent
        self.used = used

    def _split(self, run: BlockRun, at: int) -> BlockRun:
        """Divide a run. The job that needs this uses the first part at once; the second part keeps its place."""
        parent = run.parent
        first = BlockRun(run.hashes, run.begin, at, parent, run.users)
        siblings = self._first if parent is None else parent.following
        assert siblings is not None, "the run is one of them"
        siblings[run.hashes[run.begin]] = first
        first.following = {run.hashes[at]: run}
        run.begin, run.parent = at, first
        if not first.users:
            self._free[first] = None
        return first

    def _evict(self, blocks: int) -> None:
        free = self._free
        self._blank += blocks
        while blocks:
            run = next(iter(free))
            size = run.end - run.begin
            if size > blocks:
                run.end -= blocks
                return
            blocks -= size
            del free[run]
            parent = run.parent
            siblings = self._first if parent is None else parent.following
            assert siblings is not None, "the run is one of them"
            del siblings[run.hashes[run.begin]]


def _idle_to(last: BlockRun, known: int) -> int:
    """The number of free blocks at the end of a text's first blocks, if the last run is free. `known`: the number of
    these first blocks, which may end within the last run."""
    idle, run = known - last.begin, last.parent
    while run is not None and not run.users:
        idle += run.end - run.begin
        run = run.parent
    return idle
