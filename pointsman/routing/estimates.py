"""Expected latency and cost of a request on each endpoint. Unknown is nan, never zero.

Latency: the instance's average, stretched by its load (twice the average at its limit). Without an average, the time to
generate the tokens if the requests on the instance share its throughput. Without either it is unknown.

Cost: what the instance's GPUs cost while it processes the tokens at its throughput. Without a throughput it is unknown.
"""

from collections.abc import Mapping
from math import isnan

from pointsman.routing.endpoints import EXPECTED_MS, GPU_SECONDS_PER_TOKEN, LOAD, PRICE, THROUGHPUT
from pointsman.routing.plugins import Endpoints
from pointsman.selection import Column, PerMembers
from pointsman.selection.arrays import np
from pointsman.selection.columns import array, column_of
from pointsman.types import RequestMetadata

DEFAULT_PRICE_PER_GPU_HOUR = 2.0
"""Roughly the rent of a data-centre GPU. Set your own: budgets and estimated costs depend on it."""

DEFAULT_OUTPUT_TOKENS = 256
"""For requests without `max_tokens`."""


def output_tokens(request: RequestMetadata) -> int:
    """The maximum number of tokens of the answer."""
    return DEFAULT_OUTPUT_TOKENS if request.max_tokens is None else request.max_tokens


def latency_ms(request: RequestMetadata, candidates: Endpoints) -> Column:
    """Expected milliseconds to the whole answer, per candidate; nan where unknown."""
    expected_ms = candidates.column(EXPECTED_MS)
    if isinstance(expected_ms, list):
        if not isnan(sum(expected_ms)):
            return expected_ms
        load, throughput = candidates.column(LOAD), candidates.column(THROUGHPUT)
        tokens_ms = output_tokens(request) * 1000
        return [
            ms if ms == ms else tokens_ms * (busy + 1) / rate
            for ms, busy, rate in zip(expected_ms, load, throughput, strict=True)
        ]
    by_tokens = output_tokens(request) * 1000 * (array(candidates.column(LOAD)) + 1)
    return np.where(np.isnan(expected_ms), by_tokens / array(candidates.column(THROUGHPUT)), expected_ms)


class CostRates:
    """The cost of a token on each endpoint, at its own price or else the given one; nan where unknown."""

    def __init__(self, price_per_gpu_hour: float) -> None:
        self._price = price_per_gpu_hour
        self._rates = PerMembers(self._rates_of)
        self._cheapness = PerMembers(self._cheapness_of)

    def of(self, candidates: Endpoints) -> Column:
        return candidates.cut(self._rates.of(candidates))

    def cheapness(self, candidates: Endpoints) -> Column:
        """Tokens per unit of money on each candidate; 0 where unknown, infinite where they are free."""
        return candidates.cut(self._cheapness.of(candidates))

    def _cheapness_of(self, endpoints: Endpoints) -> Column:
        with np.errstate(divide="ignore"):
            tokens = 1 / array(self._rates.of(endpoints))
        return column_of(np.where(np.isnan(tokens), 0.0, tokens), endpoints.arrays)

    def _rates_of(self, endpoints: Endpoints) -> Column:
        price, gpu_seconds = array(endpoints.column(PRICE)), array(endpoints.column(GPU_SECONDS_PER_TOKEN))
        return column_of(np.where(np.isnan(price), self._price, price) / 3600 * gpu_seconds, endpoints.arrays)


def billed_tokens(request: RequestMetadata) -> int:
    """Tokens that a request pays for: those of the prompt, and the maximum of the answer."""
    return request.input_tokens + output_tokens(request)


def expected(
    request: RequestMetadata, row: int, columns: Mapping[str, Column], price_per_gpu_hour: float
) -> tuple[float | None, float | None]:
    """(latency, cost) on the endpoint in one row, by the same formulas; None where unknown."""
    latency = columns[EXPECTED_MS][row]
    if latency != latency:
        latency = output_tokens(request) * 1000 * (columns[LOAD][row] + 1) / columns[THROUGHPUT][row]
    gpu_seconds = columns[GPU_SECONDS_PER_TOKEN][row]
    if gpu_seconds != gpu_seconds:
        return None if latency != latency else float(latency), None
    price = columns[PRICE][row]
    if price != price:
        price = price_per_gpu_hour
    money = price / 3600 * gpu_seconds * billed_tokens(request)
    return None if latency != latency else float(latency), float(money)
