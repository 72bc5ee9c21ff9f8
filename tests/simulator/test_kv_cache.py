from hypothesis import given
from hypothesis import strategies as st

from pointsman.simulator.continuous_batching import KvCache, Lease


def leased(cache: KvCache, hashes: list[int], blocks: int) -> Lease:
    known = cache.known(hashes, blocks)
    lease = cache.lease(hashes, known, blocks)
    assert lease is not None
    cache.publish(lease, hashes, blocks)
    return lease


def test_freed_blocks_are_found_again() -> None:
    cache = KvCache(kv_tokens=64, block_size=16)
    first = leased(cache, [1, 2], 3)
    assert (cache.used, cache.idle, cache.usage) == (3, 0, 0.75)
    cache.release(first)
    assert (cache.used, cache.idle) == (0, 2)
    assert cache.known([1, 2, 3], 3) == 2
    assert cache.known([1, 2, 3], 1) == 1
    assert cache.known([9, 2], 2) == 0


def test_blocks_in_use_are_shared() -> None:
    cache = KvCache(64, 16)
    first, second = leased(cache, [1, 2], 2), leased(cache, [1, 2], 2)
    assert cache.used == 2
    cache.release(first)
    assert (cache.used, cache.idle) == (2, 0)
    cache.release(second)
    assert (cache.used, cache.idle) == (0, 2)


def test_a_block_computed_twice_at_once_is_stored_twice() -> None:
    cache = KvCache(64, 16)
    first, second = cache.lease([1], 0, 1), cache.lease([1], 0, 1)
    assert first is not None
    assert second is not None
    cache.publish(first, [1], 1)
    cache.publish(second, [1], 1)
    assert cache.used == 2
    cache.release(first)
    cache.release(second)
    assert (cache.used, cache.idle) == (0, 1)


def test_eviction_is_least_recently_used_and_ends_before_beginnings() -> None:
    cache = KvCache(64, 16)
    cache.release(leased(cache, [1, 2], 2))
    cache.release(leased(cache, [3, 4], 2))
    cache.release(leased(cache, [1], 1))  # used again
    taken = leased(cache, [], 1)
    assert [cache.known([hash_], 1) for hash_ in (1, 2, 3, 4)] == [1, 0, 1, 1]
    cache.release(taken)
    leased(cache, [], 2)
    assert [cache.known([hash_], 1) for hash_ in (1, 2, 3, 4)] == [1, 0, 1, 0]


def test_a_full_cache_refuses_a_lease_and_evicts_nothing() -> None:
    cache = KvCache(64, 16)
    cache.release(leased(cache, [1, 2, 3], 3))
    # Three of these four blocks are cached, which leaves no room for two more.
    assert cache.lease([1, 2, 3], 3, 5) is None
    assert cache.known([1, 2, 3], 3) == 3
    assert cache.lease([1, 2, 3], 3, 4) is not None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=40))
def test_the_number_of_blocks_is_constant(jobs: list[tuple[int, int, bool]]) -> None:
    cache = KvCache(160, 16)
    held: list[Lease] = []
    for family, blocks, gives_back in jobs:
        hashes = [family * 100 + place for place in range(blocks - 1)]
        known = cache.known(hashes, blocks - 1)
        lease = cache.lease(hashes, known, blocks)
        if lease is not None:
            cache.publish(lease, hashes, blocks - 1)
            held.append(lease)
        elif held:
            cache.release(held.pop(0))
        if gives_back and held:
            cache.release(held.pop())
        shared = {hash_ for one in held for hash_ in one.shared}
        assert cache.used == len(shared) + sum(one.own for one in held)
        assert cache.used + cache.idle <= cache.capacity
    for one in held:
        cache.release(one)
    assert cache.used == 0
