"""Chains of block hashes, and the index of what each server was sent, against a model of plain sets and lists."""

import struct
from math import ceil

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pointsman.routing.producers.prefix_index import (
    AT_ONCE,
    ROW,
    Chain,
    IndexMemory,
    KnownRows,
    PrefixIndex,
    block_hashes,
    first_link,
    token_bytes,
)
from tests.properties import examples

# Hashes


def chain_of(model: str, salt: str, words: bytes, block_size: int) -> list[int]:
    """The definition: h_i = xxh3_64(part i, seed h_{i-1}), from the model and its salt. A part
    is a block, from the 17th on two blocks, from the 33rd on four, and so on."""
    link = xxhash.xxh3_64((model + salt).encode(), seed=0).intdigest()
    chain: list[int] = []
    while words:
        size = block_size * 4 * 2 ** (len(chain) // 16)
        link = xxhash.xxh3_64(words[:size], seed=link).intdigest()
        words = words[size:]
        chain.append(link)
    return chain


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=20), st.data())
def test_a_hash_covers_its_block_and_everything_before_it(blocks: list[bytes], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(blocks) - 1))
    other = data.draw(st.binary(min_size=8, max_size=8).filter(lambda block: block != blocks[place]))
    changed = [*blocks[:place], other, *blocks[place + 1 :]]
    before, after = (block_hashes(b"".join(words), first_link("m"), 2).links for words in (blocks, changed))
    assert before[:place] == after[:place]
    assert all(one != another for one, another in zip(before[place:], after[place:], strict=True))


def test_a_chain_as_it_is_defined() -> None:
    prompt = b"0123456789abcdefghi"  # two blocks of 2 tokens, then one whole token and part of another
    expected = chain_of("llama", "salt", prompt, block_size=2)
    assert len(expected) == 3
    assert block_hashes(token_bytes(prompt), first_link("llama", "salt"), 2) == Chain(expected, 3)


@given(
    st.binary(max_size=200),
    st.integers(1, 9),
    st.text(max_size=5),
    st.text(max_size=3),
    st.none() | st.integers(0, 60),
)
def test_any_chain(prompt: bytes, block_size: int, model: str, salt: str, most: int | None) -> None:
    chain = block_hashes(token_bytes(prompt), first_link(model, salt), block_size, most)
    hashed = prompt if most is None else prompt[: most * block_size * 4]
    assert chain.links == chain_of(model, salt, hashed, block_size)
    assert chain.blocks == chain.blocks_in(len(chain.links)) == ceil(len(hashed) / 4 / block_size)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 6) | st.just(1000))
def test_other_prompts_change_no_hash(shared: list[int], block_size: int, rows: int) -> None:
    """Prompts that begin alike, with memory for few rows or for many."""
    known = KnownRows(IndexMemory(rows * KnownRows.SHARE * KnownRows.ROW_BYTES))
    for number, length in enumerate(shared):
        prompt = b"x" * length + b"%04d" % number * (length // 8)
        chain = block_hashes(prompt, first_link("m"), block_size, known=known)
        assert chain == block_hashes(prompt, first_link("m"), block_size)
        assert len(known) <= rows


@given(st.integers(0, 3000), st.integers(1, 3), st.integers(1, 900))
def test_no_more_is_hashed_than_a_server_can_hold(length: int, block_size: int, held: int) -> None:
    whole = block_hashes(b"x" * length, first_link("m"), block_size)
    chain = block_hashes(b"x" * length, first_link("m"), block_size, held=held)
    assert chain.blocks == whole.blocks
    assert chain.links == whole.links[: len(chain.links)]
    assert min(held, whole.blocks) <= chain.blocks_in(len(chain.links)) < 2 * held + 2 * ROW


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 3), st.none() | st.integers(0, 900))
def test_long_prompts(shared: int, length: int, block_size: int, most: int | None) -> None:
    """The common prefix of two prompts is found exactly if it is short, else to within a sixteenth of its length."""
    shared = min(shared, length)
    one, other = b"x" * length, b"x" * shared + b"y" * (length - shared)
    chains = [block_hashes(words, first_link("m"), block_size, most) for words in (one, other)]
    equal = sum(a == b for a, b in zip(chains[0].links, chains[1].links, strict=True))
    assert chains[0].links[:equal] == chains[1].links[:equal], "from the first on"
    assert chains[0].blocks == chains[0].blocks_in(len(chains[0].links)) == chains[1].blocks
    step = block_size * 4
    whole = length if most is None else min(length, most * step)
    found, there = chains[0].blocks_in(equal), min(shared, whole) // step
    assert found == chains[0].blocks if shared >= whole else found <= there <= found + max(there / 16, 0.5)


def test_tokens_are_little_endian_and_text_is_utf8() -> None:
    assert token_bytes([1, 0x01020304, 2**32 - 1]) == struct.pack("<III", 1, 0x01020304, 2**32 - 1)
    assert token_bytes("né") == b"n\xc3\xa9"
    assert token_bytes("") == token_bytes(b"") == token_bytes([]) == b""
    assert token_bytes("abcd") == b"abcd"


@pytest.mark.parametrize("token", [-1, 2**32])
def test_an_invalid_token_is_an_error(token: int) -> None:
    with pytest.raises(struct.error):
        token_bytes([token])


def test_the_last_block_may_be_partial_and_differs_from_the_whole_one() -> None:
    short, whole = (
        block_hashes(token_bytes(text), first_link("m"), 2).links for text in ("aaaabbbbcccc", "aaaabbbbccccdddd")
    )
    assert (len(short), len(whole)) == (2, 2)
    assert short[0] == whole[0]
    assert short[1] != whole[1]


def test_chains_of_other_models_salts_and_prefixes_share_nothing() -> None:
    words = token_bytes("x" * 64)
    chains = [
        block_hashes(words, first_link("m"), 4),
        block_hashes(words, first_link("n"), 4),
        block_hashes(words, first_link("m", "salt"), 4),
        block_hashes(token_bytes("y" + "x" * 63), first_link("m"), 4),
    ]
    assert len({link for chain in chains for link in chain.links}) == 16


# The index


def held(index: PrefixIndex, server: str, chain: list[int]) -> int:
    """How many blocks of this chain, from the first on, the index finds with this server."""
    slot = index.slot(server)
    return sum(depth for servers, depth in index.runs(chain, 1 << slot) if servers >> slot & 1)


def test_only_the_unbroken_run_of_the_same_server_counts() -> None:
    index = PrefixIndex()
    index.record("a", [1, 2], 10)
    index.record("b", [1, 2, 3, 4], 10)
    index.record("c", [2, 3], 10)  # not the first block
    slots = {name: index.slot(name) for name in "abcd"}
    all_servers = sum(1 << slot for slot in slots.values())
    found = index.runs([1, 2, 3, 9], all_servers)
    assert found == [(1 << slots["a"], 2), (1 << slots["b"], 3)]
    assert index.runs([1, 2], all_servers) == [(1 << slots["a"] | 1 << slots["b"], 2)]
    assert index.runs([1, 2, 3, 9], 1 << slots["a"]) == [(1 << slots["a"], 2)], "only the servers of the set"
    assert index.runs([], all_servers) == []
    assert index.runs([9], all_servers) == []
    assert index.runs([1], 0) == []


def test_a_prefix_is_evicted_from_its_tail() -> None:
    index = PrefixIndex()
    index.record("a", [1, 2, 3, 4, 5], 3)
    assert len(index) == 3
    assert held(index, "a", [1, 2, 3, 4, 5]) == 3
    index.record("a", [7], 3)
    assert held(index, "a", [1, 2, 3, 4, 5]) == 2
    assert held(index, "a", [7]) == 1


def test_recently_used_blocks_stay_and_a_shared_prefix_counts_as_used_by_both() -> None:
    index = PrefixIndex()
    index.record("a", [1, 2], 4)
    index.record("a", [5, 6], 4)
    index.record("a", [1, 3], 4)  # uses 1 again: 2 is the oldest now
    assert [held(index, "a", chain) for chain in ([1, 2], [1, 3], [5, 6])] == [1, 2, 2]
    index.record("a", [8, 9], 4)
    assert [held(index, "a", chain) for chain in ([1, 3], [5, 6], [8, 9])] == [2, 0, 2]


def test_one_server_evicts_nothing_of_another() -> None:
    index = PrefixIndex()
    index.record("a", [1, 2], 2)
    index.record("b", [1, 2], 2)
    index.record("b", [5, 6], 2)
    assert (held(index, "a", [1, 2]), held(index, "b", [1, 2])) == (2, 0)


def test_a_smaller_cache_forgets_at_the_next_record() -> None:
    index = PrefixIndex()
    index.record("a", [1, 2, 3, 4], 4)
    index.record("a", [5], 2)
    assert (len(index), held(index, "a", [5]), held(index, "a", [1, 2])) == (2, 1, 1)
    index.record("a", [6], 0)
    assert (len(index), len(index._holders)) == (0, 0)


def test_a_forgotten_server_leaves_nothing_to_the_next_server_in_its_slot() -> None:
    index = PrefixIndex()
    index.record("a", [1, 2], 10)
    index.record("b", [1], 10)
    slot = index.slot("a")
    index.forget("a")
    index.forget("a")
    index.forget("never seen")
    assert index.slot("new") == slot
    assert held(index, "new", [1, 2]) == 0
    assert held(index, "b", [1, 2]) == 1
    assert index.servers == {"b", "new"}
    assert held(index, "a", [1]) == 0, "it starts again from nothing"


def test_a_link_of_many_blocks_counts_as_many() -> None:
    index = PrefixIndex()
    long = list(range(ROW + 3))
    index.record("a", long, ROW + 3 * 2)
    assert held(index, "a", long) == ROW + 3
    index.record("a", [-1], ROW + 3 * 2)
    assert held(index, "a", long) == ROW + 2, "the last of them made room for a single block"
    index.record("a", [-2], ROW + 3 * 2)
    assert (held(index, "a", long), held(index, "a", [-1])) == (ROW + 2, 1)


# Memory


def unique(number: int, links: int = 100) -> list[int]:
    return list(range(number * links, (number + 1) * links))


def test_beyond_its_memory_the_server_with_the_most_entries_forgets_its_oldest() -> None:
    index = PrefixIndex(max_bytes=240 * 1000)
    index.record("small", [-1, -2, -3], 10**9)
    for number in range(50):
        index.record("large", unique(number, ROW), 10**9)
        assert len(index) <= 1000
    assert index.memory.dropped == 0
    for number in range(50, 500):
        index.record("large", unique(number, ROW), 10**9)
        assert len(index) <= 1000
        assert held(index, "large", unique(number, ROW)) == ROW, "the newest is there"
    assert held(index, "small", [-1, -2, -3]) == 3, "the other has few entries"
    assert held(index, "large", unique(0, ROW)) == 0
    assert index.memory.dropped + len(index) == 500 * ROW + 3
    assert index.held("large") == len(index) - 3
    assert index.memory.is_short


def test_less_memory_takes_effect_with_the_next_records() -> None:
    index = PrefixIndex()
    for number in range(500):
        index.record("a", unique(number), 10**9)
    index.memory.limit(240 * 1000)
    for number in range(500, 600):
        before = len(index)
        index.record("a", unique(number), 10**9)
        assert before - len(index) <= AT_ONCE, "not all in one call"
    assert len(index) <= 1000
    assert len(index._holders) == len(index)


def test_a_cache_that_shrinks_and_a_server_that_leaves_cost_little_at_a_time() -> None:
    index = PrefixIndex()
    for number in range(500):
        index.record("a", unique(number), 10**9)
        index.record("b", unique(-number - 1), 10**9)
    before = len(index)
    index.record("a", [10**9], 1)
    assert 0 < before - len(index) <= AT_ONCE + 1
    before, slot = len(index), index.slot("b")
    index.forget("b")
    assert 0 < before - len(index) <= AT_ONCE
    assert index.slot("new") != slot, "its slot is free when nothing is left in it"
    for number in range(200):
        index.record("new", [10**9 + number], 10)
        index.record("a", [10**9 + number], 1)
    assert len(index) == 10 + 1
    assert len(index._holders) == 10
    assert index.slot("newer") == slot


class Beside(RuleBasedStateMachine):
    """The index agrees with plain lists in order of use, and holds nothing more."""

    chains = st.builds(
        # A block is identified by everything before it, as hashes are: a common prefix is shared blocks.
        lambda turns: [hash(tuple(turns[: depth + 1])) for depth in range(len(turns))],
        st.lists(st.integers(0, 1), max_size=5),
    )
    servers = st.sampled_from("abcde")

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.used: dict[str, list[int]] = {}
        """Oldest first."""
        self.most: dict[str, int] = {}

    @rule(server=servers, chain=chains, capacity=st.integers(0, 8))
    def record(self, server: str, chain: list[int], capacity: int) -> None:
        self.index.record(server, chain, capacity)
        kept = [link for link in self.used.get(server, []) if link not in chain] + chain[::-1]
        self.used[server] = kept[max(0, len(kept) - capacity) :]
        self.most[server] = capacity

    @precondition(lambda self: self.used)
    @rule(server=servers)
    def forget(self, server: str) -> None:
        self.index.forget(server)
        self.used.pop(server, None)
        self.most.pop(server, None)

    @rule(chain=chains, among=st.sets(servers))
    def look_up(self, chain: list[int], among: set[str]) -> None:
        slots = {name: self.index.slot(name) for name in sorted(among)}
        for name in among:
            self.used.setdefault(name, [])
        assert len(set(slots.values())) == len(slots)
        depths: dict[str, int] = dict.fromkeys(slots, 0)
        for servers, depth in self.index.runs(chain, sum(1 << slot for slot in slots.values())):
            for slot in (place for place in range(servers.bit_length()) if servers >> place & 1):
                [name] = [name for name, own in slots.items() if own == slot]
                assert depths[name] == 0, "listed twice"
                depths[name] = depth
        for name in among:
            run = 0
            while run < len(chain) and chain[run] in self.used[name]:
                run += 1
            assert depths[name] == run

    @invariant()
    def holds_exactly_what_the_model_holds(self) -> None:
        assert len(self.index) == sum(map(len, self.used.values()))
        assert all(len(links) <= self.most.get(name, 0) for name, links in self.used.items())
        expected: dict[int, int] = {}
        for name, links in self.used.items():
            for link in links:
                expected[link] = expected.get(link, 0) | 1 << self.index.slot(name)
        assert self.index._holders == expected, "and a block without holders takes no memory"

    @invariant()
    def slots_stay_few(self) -> None:
        assert {self.index.slot(name) for name in self.index.servers} <= set(range(5))


TestBeside = Beside.TestCase
TestBeside.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
