"""The producer of how many tokens of a request each endpoint would have to compute."""

from pointsman.routing.plugins import (
    ESTIMATED_OUTPUT_TOKENS,
    PREFIX_MATCH,
    UNCACHED_REQUEST_TOKENS,
    Endpoints,
    RequestCycle,
)
from pointsman.selection.columns import column_of, linear
from pointsman.types import RequestMetadata

TYPICAL_OUTPUT_TOKENS = 1000
"""The estimated length of an answer about which nothing else is known."""


class InflightLoadProducer:
    """Publishes the uncached tokens of the request per endpoint. The ledger counts the same number as in flight.

    Without prefix information all tokens of the prompt count as uncached. With `add_estimated_output_tokens` the answer
    counts too, until it ends. Its estimated length is `output_ratio` times the prompt, or 1,000 tokens without a ratio.
    It is at most the request's own limit, and at most `max_estimated_output_tokens`.
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
        prompt, found = float(cycle.request.input_tokens), cycle.get(PREFIX_MATCH)
        if found is None:
            tokens = column_of([prompt] * len(candidates.whole), candidates.arrays)
        else:
            tokens = found.uncached_tokens(prompt)
        if self._estimates:
            output = cycle[ESTIMATED_OUTPUT_TOKENS] = self.output_tokens(cycle.request)
            tokens = linear(tokens, 1.0, output)
        cycle[UNCACHED_REQUEST_TOKENS] = tokens

    def output_tokens(self, request: RequestMetadata) -> float:
        """The expected length of the answer."""
        expected = TYPICAL_OUTPUT_TOKENS if self._ratio is None else self._ratio * request.input_tokens
        limits = [limit for limit in (request.max_tokens, self._most) if limit is not None]
        return float(min([expected, *limits]))
