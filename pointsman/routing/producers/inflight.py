"""How many tokens of a request each endpoint would have to compute."""

from pointsman.routing.plugins import (
    ESTIMATED_OUTPUT_TOKENS,
    PREFIX_MATCH,
    UNCACHED_REQUEST_TOKENS,
    Endpoints,
    RequestCycle,
)
from pointsman.selection import Column
from pointsman.selection.arrays import np
from pointsman.selection.columns import array, column_of, linear
from pointsman.types import RequestMetadata

TYPICAL_OUTPUT_TOKENS = 1000
"""The estimate for an answer of which nothing is known."""


class InflightLoadProducer:
    """Publishes the uncached tokens of the request per endpoint. The ledger counts the same number as in flight.

    Without prefix information all tokens of the prompt count as uncached. With `add_estimated_output_tokens` the answer
    counts too, until it ends: `output_ratio` times the prompt, else 1,000 tokens; at most the request's own limit and
    `max_estimated_output_tokens`.
    """

    def __init__(
        self,
        add_estimated_output_tokens: bool = False,
        max_estimated_output_tokens: int | None = None,
        output_ratio: float | None = None,
    ) -> None:
        given = {"maxEstimatedOutputTokens": max_estimated_output_tokens, "outputRatio": output_ratio}
        for parameter, value in given.items():
            if value is not None and value < 0:
                raise ValueError(f"{parameter} is {value:g}; it must be 0 or more")
        self._estimates = add_estimated_output_tokens
        self._most = max_estimated_output_tokens
        self._ratio = output_ratio

    def produce(self, cycle: RequestCycle, candidates: Endpoints) -> None:
        tokens = uncached_tokens(cycle, candidates)
        if self._estimates:
            output = cycle[ESTIMATED_OUTPUT_TOKENS] = self.output_tokens(cycle.request)
            tokens = linear(tokens, 1.0, output)
        cycle[UNCACHED_REQUEST_TOKENS] = tokens

    def output_tokens(self, request: RequestMetadata) -> float:
        """The expected length of the answer."""
        expected = TYPICAL_OUTPUT_TOKENS if self._ratio is None else self._ratio * request.input_tokens
        limits = [limit for limit in (request.max_tokens, self._most) if limit is not None]
        return float(min([expected, *limits]))


def uncached_tokens(cycle: RequestCycle, candidates: Endpoints) -> Column:
    """One number per row of the whole roster."""
    prompt = float(cycle.request.input_tokens)
    found = cycle.get(PREFIX_MATCH)
    if found is None:
        return column_of([prompt] * len(candidates.whole), candidates.arrays)
    if not candidates.arrays:
        return [
            uncached(prompt, match, total, size)
            for match, total, size in zip(found.match, found.total, found.block_size, strict=True)
        ]
    size = array(found.block_size)
    hashed, cached = array(found.total) * size, array(found.match) * size
    return np.maximum(hashed - cached, 0.0) + np.maximum(prompt - hashed, 0.0)


def uncached(prompt: float, match: float, total: float, block_size: float) -> float:
    """Tokens in blocks that did not match, plus those that were not hashed."""
    return max(0.0, (total - match) * block_size) + max(0.0, prompt - total * block_size)
