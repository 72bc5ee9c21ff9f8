"""What a request would take and cost on each endpoint. What cannot be known is nan, never zero.

Latency: the instance's average, stretched by how full it is (at its limit: twice the average). Without an average, the
time to make the tokens if the instance's throughput is shared by the requests on it. Without either: unknown.

Cost: the tokens' share of what the instance's GPUs cost while it makes them at its throughput. Without a throughput:
unknown.
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
"""What a data-centre GPU rents for, roughly. Give your own: budgets and estimated costs are only as true as it is."""

DEFAULT_OUTPUT_TOKENS = 256
"""Stands in for `max_tokens` where a request gives none."""


def output_tokens(request: RequestMetadata) -> int:
    """How many tokens the answer may have."""
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
    """What a token costs on each endpoint, at its own price or else the given one; nan where unknown."""

    def __init__(self, price_per_gpu_hour: float) -> None:
        self._price = price_per_gpu_hour
        self._rates = PerMembers(self._worked_out)
        self._cheapness = PerMembers(self._tokens_for_one)

    def of(self, candidates: Endpoints) -> Column:
        """One rate per candidate."""
        return candidates.cut(self._rates.of(candidates))

    def cheapness(self, candidates: Endpoints) -> Column:
        """How many tokens the same money buys from each candidate; 0 where unknown, infinite where they are free."""
        return candidates.cut(self._cheapness.of(candidates))

    def _tokens_for_one(self, everybody: Endpoints) -> Column:
        with np.errstate(divide="ignore"):
            bought = 1 / array(self._rates.of(everybody))
        return column_of(np.where(np.isnan(bought), 0.0, bought), everybody.arrays)

    def _worked_out(self, everybody: Endpoints) -> Column:
        price, gpu_seconds = array(everybody.column(PRICE)), array(everybody.column(GPU_SECONDS_PER_TOKEN))
        rates = np.where(np.isnan(price), self._price, price) / 3600 * gpu_seconds
        return column_of(rates, everybody.arrays)


def billed_tokens(request: RequestMetadata) -> int:
    """Tokens that a request is expected to cost: those of the prompt, and those the answer may have."""
    return request.input_tokens + output_tokens(request)


def expected(
    request: RequestMetadata, row: int, columns: Mapping[str, Column], price_per_gpu_hour: float
) -> tuple[float | None, float | None]:
    """(latency, cost) on the endpoint in one row: the same formulas for one candidate; None where unknown."""
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
