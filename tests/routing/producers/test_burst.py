"""Bursts of equal prompts go to one endpoint, within a window and up to a limit."""

from typing import Any

import pytest

from pointsman.routing.plugins import PREFIX_MATCH
from pointsman.routing.producers import BurstPrefixCacheProducer
from pointsman.selection import SchedulingResult
from pointsman.types import RequestMetadata
from tests.routing.fleets import Candidate, both_lengths, result_of, scene

ROWS = [Candidate()] * 3


def prompt(*blocks: int) -> RequestMetadata:
    """A prompt of blocks of 64 tokens, each named by a number."""
    return RequestMetadata("r", token_ids=tuple(block for block in blocks for _ in range(64)))


def match(producer: BurstPrefixCacheProducer, request: RequestMetadata, now: float = 0.0, **more: Any) -> list[float]:
    """Matching blocks per endpoint; empty if there is no such fact."""
    cycle, roster = scene(ROWS, request=request, now=now, **more)
    producer.produce(cycle, roster)
    found = cycle.get(PREFIX_MATCH)
    return [] if found is None else [float(blocks) for blocks in found.match[:3]]


def send(producer: BurstPrefixCacheProducer, request: RequestMetadata, where: int, now: float = 0.0) -> None:
    cycle, roster = scene(ROWS, request=request, now=now)
    producer.produce(cycle, roster)
    producer.dispatched(cycle, SchedulingResult({"default": result_of("default", roster, where)}, "default"))


@both_lengths
def test_an_equal_prompt_follows_the_first(long: bool) -> None:
    producer = BurstPrefixCacheProducer()
    assert match(producer, prompt(1, 2), long=long) == []
    send(producer, prompt(1, 2), 1)
    assert match(producer, prompt(1, 2), 0.05, long=long) == [0.0, 2.0, 0.0]
    assert match(producer, prompt(1, 3), 0.05, long=long) == [], "only equal ones"
    assert match(producer, prompt(1, 2, 3), 0.05, long=long) == []


def test_a_window_ends() -> None:
    producer = BurstPrefixCacheProducer(window_duration_ms=100)
    send(producer, prompt(1), 1, 0.0)
    send(producer, prompt(1), 1, 0.09)
    assert match(producer, prompt(1), 0.0999) == [0.0, 1.0, 0.0]
    assert match(producer, prompt(1), 0.1) == [], "it began with the first request"


def test_at_most_so_many_go_to_one_endpoint() -> None:
    producer = BurstPrefixCacheProducer(max_per_replica=2)
    for _ in range(2):
        send(producer, prompt(1), 0)
    assert match(producer, prompt(1)) == [0.0, 0.0, 0.0], "the scorers choose another"
    rows = [Candidate(match=8.0, total=8.0), Candidate(match=3.0, total=8.0), Candidate(match=0.0, total=8.0)]
    cycle, roster = scene(rows, request=prompt(1))
    producer.produce(cycle, roster)
    assert list(cycle[PREFIX_MATCH].match) == [0.0, 3.0, 0.0], "even if the prompt is cached there"
    send(producer, prompt(1), 2)
    assert match(producer, prompt(1)) == [0.0, 0.0, 1.0]


def test_prompts_that_begin_alike_follow_each_other_within_their_share() -> None:
    producer = BurstPrefixCacheProducer(min_colocate_blocks=2)
    send(producer, prompt(1, 2, 3), 0)
    assert match(producer, prompt(1, 2, 4)) == [], "one of two requests on three endpoints is more than a share"
    send(producer, prompt(7), 1)
    send(producer, prompt(8), 2)
    assert match(producer, prompt(1, 2, 4)) == [3.0, 0.0, 0.0]
    assert match(producer, prompt(1, 9, 4)) == [], "it shares one block only"
    assert match(producer, prompt(1)) == []


def test_what_is_cached_from_earlier_on_still_counts() -> None:
    producer = BurstPrefixCacheProducer()
    send(producer, prompt(1, 2), 2)
    rows = [Candidate(match=1.0, total=8.0), Candidate(match=0.0, total=8.0), Candidate(match=3.0, total=8.0)]
    cycle, roster = scene(rows, request=prompt(1, 2))
    producer.produce(cycle, roster)
    assert list(cycle[PREFIX_MATCH].match) == [1.0, 0.0, 8.0]


def test_several_prompts_and_texts() -> None:
    producer = BurstPrefixCacheProducer(block_size_tokens=1)
    both = RequestMetadata("r", prompt=("abcd", "efghij"))
    send(producer, both, 1)
    assert match(producer, both) == [0.0, 3.0, 0.0]
    assert match(producer, RequestMetadata("r", prompt="abcd")) == []
    send(producer, RequestMetadata("r"), 0)
    assert match(producer, RequestMetadata("r")) == [], "an empty prompt follows none"


def test_only_as_much_as_is_to_be_matched_counts() -> None:
    producer = BurstPrefixCacheProducer(max_prefix_tokens_to_match=128)
    send(producer, prompt(1, 2, 3), 0)
    assert match(producer, prompt(1, 2, 4)) == [2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"window_duration_ms": 0}, "windowDurationMs is 0; it must be at least 1"),
        ({"max_per_replica": 0}, "maxPerReplica is 0; it must be -1, for no limit, or at least 1"),
        ({"block_size_tokens": 0}, "blockSizeTokens is 0"),
        ({"max_prefix_tokens_to_match": -1}, "maxPrefixTokensToMatch is -1"),
        ({"min_colocate_blocks": -1}, "minColocateBlocks is -1"),
    ],
)
def test_bad_parameters(parameters: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BurstPrefixCacheProducer(**parameters)
