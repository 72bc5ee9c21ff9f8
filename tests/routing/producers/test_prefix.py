"""How much of a prompt each endpoint probably has, through whole cycles."""

import tracemalloc
from typing import Any

import msgspec
import pytest
import xxhash

from pointsman.routing.endpoints import Endpoint, EndpointTable, Metrics
from pointsman.routing.plugins import PREFIX_MATCH, Endpoints, RequestCycle
from pointsman.routing.producers import ApproxPrefixCacheProducer
from pointsman.selection import Cycle, SchedulingResult
from pointsman.selection.columns import ARRAYS_FROM
from pointsman.types import ExecutionInstance, RequestMetadata
from tests.routing.fleets import both_lengths, result_of

STORY = "".join(f"{number:04d}" for number in range(16))
"""Sixteen tokens of four bytes."""


def fleet_of(number: int = 3, *, long: bool = False) -> EndpointTable:
    return EndpointTable(
        [ExecutionInstance(instance_id=str(n)) for n in range(ARRAYS_FROM + number if long else number)]
    )


def producer(block_size: int = 4, **parameters: Any) -> ApproxPrefixCacheProducer:
    made = ApproxPrefixCacheProducer(block_size_tokens=block_size, **parameters)
    made.geometry = msgspec.structs.replace(made.geometry, min_block_size=1)
    return made


def produced(subject: ApproxPrefixCacheProducer, roster: Endpoints, prompt: Any = STORY, **facts: Any) -> RequestCycle:
    """A cycle with the facts of the producer about this prompt."""
    cycle: RequestCycle = Cycle(RequestMetadata("r", prompt, **facts))
    subject.produce(cycle, roster)
    return cycle


def send(
    subject: ApproxPrefixCacheProducer, fleet: EndpointTable, where: int, prompt: Any = STORY, **facts: Any
) -> None:
    """Send the request to the endpoint of this number."""
    cycle = produced(subject, fleet.roster, prompt, **facts)
    subject.dispatched(cycle, went_to(fleet.roster, where))


def went_to(roster: Endpoints, where: int) -> SchedulingResult[Endpoint]:
    return SchedulingResult({"default": result_of("default", roster, where)}, "default")


def matches(
    subject: ApproxPrefixCacheProducer, fleet: EndpointTable, prompt: Any = STORY, most: int = 3, **facts: Any
) -> list[tuple[float, float]]:
    """(match, total) of the first few endpoints."""
    found = produced(subject, fleet.roster, prompt, **facts)[PREFIX_MATCH]
    assert len(found.match) == len(found.total) == len(found.block_size) == len(found.cached) == len(fleet)
    assert [float(blocks) for blocks in found.cached] == [float(blocks) for blocks in found.match]
    return [(float(match), float(total)) for match, total in zip(found.match, found.total, strict=True)][:most]


@both_lengths
def test_a_prompt_is_found_where_it_was_sent(long: bool) -> None:
    subject, fleet = producer(), fleet_of(long=long)
    assert matches(subject, fleet) == [(0, 4)] * 3
    send(subject, fleet, 1)
    assert matches(subject, fleet) == [(0, 4), (4, 4), (0, 4)]
    assert matches(subject, fleet, STORY[:32] + "another end than before") == [(0, 4), (2, 4), (0, 4)]
    assert matches(subject, fleet, "?" + STORY) == [(0, 5)] * 3


@both_lengths
def test_a_lookup_records_nothing(long: bool) -> None:
    subject, fleet = producer(), fleet_of(long=long)
    for _ in range(3):
        assert matches(subject, fleet) == [(0, 4)] * 3
    assert len(subject.index) == 0


def test_the_blocks_that_are_remembered_are_those_that_were_sent() -> None:
    subject, fleet = producer(block_size=8), fleet_of()
    send(subject, fleet, 0, STORY[:44], model_name="llama", cache_salt="s")
    link = xxhash.xxh3_64_intdigest(b"llamas")
    expected = set()
    for block in (STORY[:32], STORY[32:44]):
        link = xxhash.xxh3_64_intdigest(block.encode(), link)
        expected.add(link)
    assert set(subject.index._holders) == expected


@both_lengths
def test_models_and_salts_share_nothing(long: bool) -> None:
    subject, fleet = producer(), fleet_of(long=long)
    send(subject, fleet, 0, model_name="m", cache_salt="one")
    assert matches(subject, fleet, model_name="m", cache_salt="one")[0] == (4, 4)
    assert matches(subject, fleet, model_name="n", cache_salt="one")[0] == (0, 4)
    assert matches(subject, fleet, model_name="m", cache_salt="two")[0] == (0, 4)
    assert matches(subject, fleet, model_name="m")[0] == (0, 4)


@both_lengths
def test_only_the_unbroken_run_of_the_same_endpoint_counts(long: bool) -> None:
    """Another endpoint that holds the middle does not bridge the gap of this one."""
    subject, fleet = producer(lru_capacity_per_server=3), fleet_of(long=long)
    send(subject, fleet, 0)  # keeps the first three of four blocks
    send(subject, fleet, 1, STORY[:16])
    assert matches(subject, fleet) == [(3, 4), (1, 4), (0, 4)]
    send(subject, fleet, 0, "something else")  # one block more: the third goes
    assert matches(subject, fleet)[0] == (2, 4)


@both_lengths
def test_several_prompts_are_hashed_separately_and_summed(long: bool) -> None:
    subject, fleet = producer(), fleet_of(long=long)
    send(subject, fleet, 2, (STORY[:32], STORY))
    assert matches(subject, fleet, (STORY[:32], STORY))[2] == (6, 6)
    assert matches(subject, fleet, STORY[:32])[2] == (2, 2)
    assert matches(subject, fleet, (STORY, "x" * 16))[2] == (4, 5)
    assert matches(subject, fleet, (STORY + STORY[:32],))[2] == (4, 6), "they are not one long prompt"


def test_token_ids_take_precedence_over_text_and_equal_its_bytes() -> None:
    subject, fleet = producer(), fleet_of()
    ids = tuple(int.from_bytes(STORY[at : at + 4].encode(), "little") for at in range(0, len(STORY), 4))
    send(subject, fleet, 0, "ignored", token_ids=ids)
    assert matches(subject, fleet, "ignored", token_ids=ids)[0] == (4, 4)
    assert matches(subject, fleet, "ignored")[0] == (0, 1)
    assert matches(subject, fleet)[0] == (4, 4)
    assert matches(subject, fleet, STORY.encode())[0] == (4, 4), "bytes are as good as text"


@both_lengths
def test_a_partial_last_block_counts_and_must_be_the_same(long: bool) -> None:
    subject, fleet = producer(), fleet_of(long=long)
    send(subject, fleet, 0, STORY[:24])
    assert matches(subject, fleet, STORY[:24])[0] == (2, 2)
    assert matches(subject, fleet, STORY[:28])[0] == (1, 2)
    assert matches(subject, fleet, STORY)[0] == (1, 4)


def test_nothing_to_match_in_an_empty_prompt_or_an_empty_fleet() -> None:
    subject, fleet = producer(), fleet_of()
    send(subject, fleet, 0, "")
    assert matches(subject, fleet, "") == [(0, 0)] * 3
    assert matches(subject, EndpointTable()) == []


# Block sizes


@both_lengths
def test_endpoints_with_different_block_sizes_are_each_matched_in_their_own(long: bool) -> None:
    subject, fleet = producer(block_size=4), fleet_of(long=long)
    fleet.measure("1", Metrics(block_size=2), 0.0)
    fleet.measure("2", Metrics(block_size=16), 0.0)
    for where in range(3):
        send(subject, fleet, where)
    assert matches(subject, fleet) == [(4, 4), (8, 8), (1, 1)]
    found = produced(subject, fleet.roster)[PREFIX_MATCH]
    assert [float(size) for size in found.block_size][:3] == [4, 2, 16]
    assert matches(subject, fleet, STORY[:32]) == [(2, 2), (4, 4), (0, 1)], "16 tokens were one block, 8 are another"


@both_lengths
def test_a_block_size_that_changes_makes_the_cache_unknown(long: bool) -> None:
    subject, fleet = producer(), fleet_of(long=long)
    send(subject, fleet, 0)
    send(subject, fleet, 1)
    fleet.measure("0", Metrics(block_size=2), 1.0)
    assert matches(subject, fleet)[:2] == [(0, 8), (4, 4)]
    send(subject, fleet, 0)
    assert matches(subject, fleet)[:2] == [(8, 8), (4, 4)]


def test_a_block_size_that_changes_between_lookup_and_sending_records_nothing() -> None:
    subject, fleet = producer(), fleet_of()
    cycle = produced(subject, fleet.roster)
    fleet.measure("0", Metrics(block_size=2), 1.0)
    subject.dispatched(cycle, went_to(fleet.roster, 0))
    assert matches(subject, fleet)[0] == (0, 8)


@pytest.mark.parametrize(
    ("parameters", "metrics", "expected"),
    [
        ({}, None, 64),
        ({}, Metrics(block_size=16), 64),
        ({}, Metrics(block_size=128), 128),
        ({}, Metrics(block_size=0), 64),
        ({"block_size_tokens": 256}, None, 256),
        ({"block_size_tokens": 256}, Metrics(block_size=128), 128),
        ({"block_size_tokens": 256, "auto_tune": False}, Metrics(block_size=128), 256),
        ({"block_size": 100}, None, 100),
        ({"block_size": 100, "block_size_tokens": 200}, None, 200),
        ({"block_size_tokens": 0}, None, 64),
    ],
)
def test_the_block_size_of_an_endpoint(parameters: dict[str, Any], metrics: Metrics | None, expected: int) -> None:
    fleet = fleet_of()
    if metrics is not None:
        fleet.measure("0", metrics, 0.0)
    geometry = ApproxPrefixCacheProducer(**parameters).geometry
    assert geometry.block_size_of(fleet["0"]) == expected
    geometry = msgspec.structs.replace(geometry, min_block_size=1)
    reported = metrics.block_size if metrics is not None and parameters.get("auto_tune", True) else 0
    assert geometry.block_size_of(fleet["0"]) == max(
        1, reported or parameters.get("block_size_tokens", parameters.get("block_size", 16))
    )


@pytest.mark.parametrize(
    ("parameters", "metrics", "expected"),
    [
        ({}, None, 31250),
        ({}, Metrics(block_size=16), 31250),
        ({"lru_capacity_per_server": 7}, None, 7),
        # 1000 blocks of 16 tokens are 250 of ours, which have 64.
        ({}, Metrics(block_size=16, num_blocks=1000), 250),
        ({}, Metrics(block_size=128, num_blocks=1000), 1000),
        ({}, Metrics(num_blocks=1000), 1000),
        ({}, Metrics(block_size=16, num_blocks=1), 1),
        ({"auto_tune": False, "lru_capacity_per_server": 7}, Metrics(block_size=16, num_blocks=1000), 7),
    ],
)
def test_capacity_counts_in_the_unit_of_the_entries(
    parameters: dict[str, Any], metrics: Metrics | None, expected: int
) -> None:
    fleet = fleet_of()
    if metrics is not None:
        fleet.measure("0", metrics, 0.0)
    geometry = ApproxPrefixCacheProducer(**parameters).geometry
    assert geometry.capacity_of(fleet["0"], geometry.block_size_of(fleet["0"])) == expected


LIES = [
    Metrics(block_size=1, num_blocks=10**15),
    Metrics(block_size=-7, num_blocks=10**15),
    Metrics(block_size=0, num_blocks=10**18),
    Metrics(block_size=16, num_blocks=-1),
    Metrics(block_size=10**12, num_blocks=10**12),
    Metrics(block_size=64, num_blocks=1),
]


def test_memory_is_bounded_whatever_engines_report() -> None:
    limit = 2 * 2**20
    subject, fleet = producer(), fleet_of()
    subject.index.memory.limit(limit)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(3_000):
            fleet.measure(str(number % 3), LIES[number % len(LIES)], float(number))  # other numbers at every scrape
            send(subject, fleet, number % 3, f"{number:08d}" * 160)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    memory = subject.index.memory
    assert memory.dropped > 0
    assert memory.is_short
    assert used < 1.3 * limit
    assert len(subject.index._holders) <= len(subject.index) <= memory.max_entries
    assert memory.used_bytes <= limit


def test_a_prompt_is_hashed_for_few_block_sizes_however_many_engines_report() -> None:
    subject, fleet = producer(), fleet_of(40)
    for number in range(40):
        fleet.measure(str(number), Metrics(block_size=4 if number < 5 else 10 + number, num_blocks=1000), 0.0)
    cycle = produced(subject, fleet.roster)
    assert len(set(cycle[PREFIX_MATCH].block_size)) <= 4
    assert subject.sizes_merged
    send(subject, fleet, 39)
    assert matches(subject, fleet, most=40)[39] == (4.0, 4.0), "matched by the most common size"
    for number in range(40):
        fleet.measure(str(number), Metrics(block_size=4, num_blocks=1000), 1.0)
    produced(subject, fleet.roster)
    assert not subject.sizes_merged


def test_memory_is_bounded_by_the_capacities() -> None:
    subject, fleet = producer(lru_capacity_per_server=5), fleet_of()
    fleet.measure("1", Metrics(block_size=4, num_blocks=9), 0.0)
    for number in range(40):
        send(subject, fleet, number % 3, f"{number}" + STORY)
    assert len(subject.index) == 5 + 9 + 5
    assert len(subject.index._holders) <= 19


@pytest.mark.parametrize(
    ("parameters", "total"),
    [
        ({}, 4),
        ({"max_prefix_tokens_to_match": 8}, 2),
        ({"max_prefix_tokens_to_match": 11}, 2),
        ({"max_prefix_tokens_to_match": 3}, 0),
        ({"max_prefix_tokens_to_match": 0, "max_prefix_blocks_to_match": 3}, 3),
        ({"max_prefix_tokens_to_match": 0, "max_prefix_blocks_to_match": 0}, 4),
    ],
)
def test_the_matched_length_of_a_prompt_is_bounded(parameters: dict[str, int], total: int) -> None:
    subject, fleet = producer(**parameters), fleet_of()
    send(subject, fleet, 0)
    assert matches(subject, fleet) == [(total, total), (0, total), (0, total)]


# Members


@both_lengths
def test_an_endpoint_that_left_returns_without_a_cache(long: bool) -> None:
    subject, fleet = producer(), fleet_of(long=long)
    for where in range(3):
        send(subject, fleet, where)
    subject.departed(fleet.remove("1"))
    assert matches(subject, fleet)[:2] == [(4, 4), (4, 4)]
    assert len(subject.index) == 8
    fleet.add(ExecutionInstance(instance_id="1"))
    found = produced(subject, fleet.roster)[PREFIX_MATCH].match
    assert float(found[fleet["1"].row]) == 0
    assert float(found[fleet["2"].row]) == 4


def test_an_endpoint_that_left_unnoticed_is_forgotten_at_the_next_request() -> None:
    subject, fleet = producer(), fleet_of()
    send(subject, fleet, 0)
    send(subject, fleet, 2)
    fleet.remove("0")
    assert matches(subject, fleet) == [(0, 4), (4, 4)]
    assert subject.index.servers == {"/1", "/2"}


def test_rows_that_move_keep_their_matches() -> None:
    subject, fleet = producer(), fleet_of(ARRAYS_FROM)
    send(subject, fleet, 63, "last " + STORY)
    send(subject, fleet, 40)
    for name in range(30):
        subject.departed(fleet.remove(str(name)))
    fleet.add(ExecutionInstance(instance_id="new"))
    for prompt, holder in ((STORY, "40"), ("last " + STORY, "63")):
        found = produced(subject, fleet.roster, prompt)[PREFIX_MATCH].match
        assert [str(one) for one in fleet.roster if found[one.row]] == [holder]


def test_many_holders_at_once() -> None:
    """From 64 servers on, a set of them is spread over the column in one go."""
    subject, fleet = producer(), fleet_of(150)
    for where in range(1, 150, 2):
        send(subject, fleet, where)
    for where in range(0, 150, 10):
        send(subject, fleet, where, STORY[:16])
    expected = [4.0 if where % 2 else 1.0 if where % 10 == 0 else 0.0 for where in range(150)]
    assert [match for match, _ in matches(subject, fleet, most=150)] == expected


@both_lengths
def test_a_smaller_roster_gets_numbers_for_the_whole_fleet(long: bool) -> None:
    subject, fleet = producer(), fleet_of(long=long)
    send(subject, fleet, 2)
    cut = fleet.roster.without([0, 1])
    found = produced(subject, cut)[PREFIX_MATCH]
    assert len(found.match) == len(fleet)
    assert [float(match) for match in cut.cut(found.match)][:1] == [4]


# Recording


def test_prefill_and_primary_targets_are_recorded_and_others_are_not() -> None:
    subject, fleet = producer(), fleet_of()
    cycle = produced(subject, fleet.roster)
    results = {
        name: result_of(name, fleet.roster, *targets)
        for name, targets in {"decode": (0, 1), "prefill": (2,), "encode": (1,)}.items()
    }
    subject.dispatched(cycle, SchedulingResult(results, "decode"))
    assert matches(subject, fleet) == [(4, 4), (0, 4), (4, 4)]


def test_a_result_of_a_cycle_without_its_facts_records_nothing() -> None:
    subject, fleet = producer(), fleet_of()
    subject.dispatched(Cycle(RequestMetadata("r", STORY)), went_to(fleet.roster, 0))
    assert len(subject.index) == 0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"auto_tune": False, "block_size_tokens": 0},
            "blockSizeTokens must be positive when autoTune is off, found 0",
        ),
        ({"auto_tune": False, "block_size": -1}, "found -1"),
        ({"max_prefix_tokens_to_match": -1}, "maxPrefixTokensToMatch must not be negative, found -1"),
        ({"max_prefix_blocks_to_match": -1}, "maxPrefixBlocksToMatch must not be negative, found -1"),
        ({"lru_capacity_per_server": 0}, "lruCapacityPerServer must be at least 1, found 0"),
    ],
)
def test_bad_parameters(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ApproxPrefixCacheProducer(**parameters)
