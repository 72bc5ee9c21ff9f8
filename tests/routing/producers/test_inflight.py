"""The tokens of a request that an endpoint would have to compute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.routing.plugins import ESTIMATED_OUTPUT_TOKENS, UNCACHED_REQUEST_TOKENS
from pointsman.routing.producers import InflightLoadProducer
from pointsman.types import RequestMetadata
from tests.routing.fleets import Candidate, both_lengths, matched, scene


def uncached(candidates: list[Candidate], prompt_tokens: int, long: bool) -> list[float]:
    cycle, roster = scene(candidates, long=long, request=RequestMetadata("r", prompt_tokens=prompt_tokens))
    InflightLoadProducer().produce(cycle, roster)
    column = cycle[UNCACHED_REQUEST_TOKENS]
    assert len(column) == len(roster.whole), "one per row of the whole fleet, whatever the candidates"
    return [float(tokens) for tokens in column][: len(candidates)]


@both_lengths
@pytest.mark.parametrize(
    ("candidates", "prompt", "expected"),
    [
        ([matched(0, 4), matched(1, 4), matched(4, 4)], 64, [64, 48, 0]),
        # The last block is partial: it counts as a whole one.
        ([matched(0, 4), matched(3, 4)], 50, [64, 16]),
        # More tokens than were hashed: the rest are uncached everywhere.
        ([matched(4, 4), matched(0, 4)], 100, [36, 100]),
        ([matched(2, 2, block_size=32), matched(2, 4)], 64, [0, 32]),
        ([matched(0, 0)], 10, [10]),
        ([matched(5, 4)], 64, [0]),
        ([Candidate(), Candidate()], 7, [7, 7]),
        ([matched(0, 1)], 0, [16]),
    ],
)
def test_uncached_tokens(candidates: list[Candidate], prompt: int, expected: list[float], long: bool) -> None:
    assert uncached(candidates, prompt, long) == expected


@both_lengths
def test_an_empty_fleet_has_an_empty_column(long: bool) -> None:
    assert uncached([], 10, long) == []


@given(
    st.lists(
        st.builds(matched, st.integers(0, 50), st.integers(0, 50), st.sampled_from([1, 16, 64])), min_size=1, max_size=5
    ),
    st.integers(0, 2000),
)
def test_lists_and_arrays_agree_and_nothing_is_negative(candidates: list[Candidate], prompt: int) -> None:
    short = uncached(candidates, prompt, long=False)
    assert short == uncached(candidates, prompt, long=True)
    assert min(short) >= 0


@both_lengths
@pytest.mark.parametrize(
    ("parameters", "max_tokens", "output"),
    [
        ({}, None, 1000),
        ({}, 40, 40),
        ({"max_estimated_output_tokens": 300}, None, 300),
        ({"max_estimated_output_tokens": 300}, 40, 40),
        ({"max_estimated_output_tokens": 0}, None, 0),
        ({"output_ratio": 1.5}, None, 96),
        ({"output_ratio": 1.5, "max_estimated_output_tokens": 10}, None, 10),
        ({"output_ratio": 0.0}, 40, 0),
    ],
)
def test_the_expected_answer_counts_if_configured(
    parameters: dict[str, float], max_tokens: int | None, output: float, long: bool
) -> None:
    request = RequestMetadata("r", prompt_tokens=64, max_tokens=max_tokens)
    cycle, roster = scene([matched(0, 4), matched(4, 4)], long=long, request=request)
    InflightLoadProducer(add_estimated_output_tokens=True, **parameters).produce(cycle, roster)  # type: ignore[arg-type]
    assert [float(tokens) for tokens in cycle[UNCACHED_REQUEST_TOKENS]][:2] == [64 + output, output]
    assert cycle[ESTIMATED_OUTPUT_TOKENS] == output


@pytest.mark.parametrize("parameter", ["max_estimated_output_tokens", "output_ratio"])
def test_negative_estimates_are_refused(parameter: str) -> None:
    with pytest.raises(ValueError, match="it must be 0 or more"):
        InflightLoadProducer(**{parameter: -1})  # type: ignore[arg-type]
