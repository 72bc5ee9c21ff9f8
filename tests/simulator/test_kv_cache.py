from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from pointsman.simulator.kv_cache import NOTHING, BlockRun, KvCache, Lease

Text = tuple[int, ...]


def leased(cache: KvCache, text: Text, blocks: int) -> Lease:
    lease = Lease()
    assert cache.lease(lease, cache.known(text, blocks), blocks)
    cache.publish(lease, text, blocks)
    return lease


def known(cache: KvCache, *text: int) -> int:
    return cache.known(text, len(text)).blocks


def runs_of(lease: Lease) -> list[BlockRun]:
    runs, run = [], lease.run
    while run is not None:
        runs.append(run)
        run = run.parent
    return runs


def test_freed_blocks_are_found_again() -> None:
    cache = KvCache(kv_tokens=64, block_size=16)
    first = leased(cache, (1, 2), 3)
    assert (cache.used, cache.idle, cache.usage) == (3, 0, 0.75)
    cache.release(first)
    assert (cache.used, cache.idle) == (0, 2)
    assert cache.known((1, 2, 3), 3).blocks == 2
    assert cache.known((1, 2, 3), 1).blocks == 1
    assert cache.known((9, 2), 2) is NOTHING


def test_blocks_in_use_are_shared() -> None:
    cache = KvCache(64, 16)
    first, second = leased(cache, (1, 2), 2), leased(cache, (1, 2), 2)
    assert cache.used == 2
    cache.release(first)
    assert (cache.used, cache.idle) == (2, 0)
    cache.release(second)
    assert (cache.used, cache.idle) == (0, 2)


def test_a_block_computed_twice_at_once_is_stored_twice() -> None:
    cache = KvCache(64, 16)
    first, second = Lease(), Lease()
    assert cache.lease(first, NOTHING, 1)
    assert cache.lease(second, NOTHING, 1)
    cache.publish(first, (1,), 1)
    cache.publish(second, (1,), 1)
    assert cache.used == 2
    cache.release(first)
    cache.release(second)
    assert (cache.used, cache.idle) == (0, 1)


def test_eviction_is_least_recently_used_and_ends_before_beginnings() -> None:
    cache = KvCache(64, 16)
    cache.release(leased(cache, (1, 2), 2))
    cache.release(leased(cache, (3, 4), 2))
    cache.release(leased(cache, (1,), 1))  # used again
    taken = leased(cache, (), 1)
    assert (known(cache, 1, 2), known(cache, 3, 4)) == (1, 2)
    cache.release(taken)  # a block without a text is used again first
    leased(cache, (), 2)
    assert (known(cache, 1, 2), known(cache, 3, 4)) == (1, 1)


def test_a_full_cache_refuses_a_lease_and_evicts_nothing() -> None:
    cache = KvCache(64, 16)
    cache.release(leased(cache, (1, 2, 3), 3))
    # Three of these four blocks are cached, which leaves no room for two more.
    assert not cache.lease(Lease(), cache.known((1, 2, 3), 3), 5)
    assert known(cache, 1, 2, 3) == 3
    assert cache.lease(Lease(), cache.known((1, 2, 3), 3), 4)


def test_a_text_that_grows_alone_stays_one_run() -> None:
    """A prompt that is read in many steps must not make the walk through its runs long."""
    cache, lease, text = KvCache(1600, 16), Lease(), tuple(range(50))
    assert cache.lease(lease, NOTHING, 50)
    for blocks in range(1, 51):
        cache.publish(lease, text, blocks)
    assert len(runs_of(lease)) == 1
    assert lease.own == 0


class BlockByBlock:
    """The same cache in the plainest way: each block by itself, found by all of its text up to there."""

    def __init__(self, blocks: int) -> None:
        self.blank = blocks
        self.users: dict[Text, int] = {}
        self.free: OrderedDict[Text, None] = OrderedDict()

    def known(self, text: Text, limit: int) -> int:
        found = 0
        while found < min(len(text), limit) and text[: found + 1] in self.users:
            found += 1
        return found

    def lease(self, text: Text, found: int, blocks: int) -> "PlainLease | None":
        shared = [text[: end + 1] for end in range(found)]
        idle = sum(not self.users[one] for one in shared)
        if blocks - found > self.blank + len(self.free) - idle:
            return None
        for one in shared:
            self.users[one] += 1
            self.free.pop(one, None)
        for _ in range(blocks - found - self.blank):
            gone, _ = self.free.popitem(last=False)
            del self.users[gone]
            self.blank += 1
        self.blank -= blocks - found
        return PlainLease(text, found, blocks - found)

    def publish(self, lease: "PlainLease", blocks: int) -> None:
        blocks = min(blocks, len(lease.text))
        if lease.shared < blocks and lease.text[: lease.shared + 1] not in self.users:
            for end in range(lease.shared, blocks):
                self.users[lease.text[: end + 1]] = 1
            lease.own -= blocks - lease.shared
            lease.shared = blocks

    def release(self, lease: "PlainLease") -> None:
        self.blank += lease.own
        for end in reversed(range(lease.shared)):
            one = lease.text[: end + 1]
            self.users[one] -= 1
            if not self.users[one]:
                self.free[one] = None


class PlainLease:
    def __init__(self, text: Text, shared: int, own: int) -> None:
        self.text, self.shared, self.own = text, shared, own


TEXTS = st.lists(st.integers(0, 2), max_size=6).map(tuple)


@given(st.lists(st.tuples(TEXTS, st.integers(0, 3), st.integers(0, 3), st.booleans(), st.integers(0, 5)), max_size=60))
def test_runs_do_what_single_blocks_would_do(jobs: list[tuple[Text, int, int, bool, int]]) -> None:
    """Whatever texts are leased, published in parts, and given back, in any order."""
    cache, plain = KvCache(160, 16), BlockByBlock(10)
    held: list[tuple[Lease, PlainLease]] = []
    for text, more, part, gives_back, which in jobs:
        blocks, lease = len(text) + more, Lease()
        cached = cache.known(text, max(blocks - 1, 0))
        assert cached.blocks == plain.known(text, max(blocks - 1, 0))
        is_leased = cache.lease(lease, cached, blocks)
        twin = plain.lease(text, cached.blocks, blocks)
        assert is_leased is (twin is not None)
        if twin is not None:
            for end in sorted({part, len(text)}):
                cache.publish(lease, text, end)
                plain.publish(twin, end)
            held.append((lease, twin))
        if held and (gives_back or twin is None):
            one, other = held.pop(which % len(held))
            cache.release(one)
            plain.release(other)
        assert cache.idle == len(plain.free)
        assert cache.used == 10 - plain.blank - len(plain.free)
        assert [one.own for one, _ in held] == [other.own for _, other in held]
        assert [one.shared for one, _ in held] == [other.shared for _, other in held]
    for one, _ in held:
        cache.release(one)
    assert cache.used == 0
