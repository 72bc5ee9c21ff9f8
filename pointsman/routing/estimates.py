"""Expected latency and cost of a request on each endpoint. Unknown is nan, never zero.

Latency is the instance's average, stretched by its load (twice the average at its limit). Without an average, it is the
time to generate the tokens if the requests on the instance share its throughput. Without a throughput too, it is
unknown.

Cost is the price of the instance for the time in which it processes the tokens at its throughput. An instance without a
price of its own has a price per GPU. Without a throughput or a price, the cost is unknown.
"""

from collections.abc import Mapping
from math import isnan, nan

from pointsman.routing.endpoints import (
    EXPECTED_MS,
    GPUS,
    LATENCY_MS,
    LOAD,
    PRICE,
    THROUGHPUT,
    Endpoint,
    EndpointTable,
)
from pointsman.routing.plugins import Endpoints
from pointsman.selection import Column, PerMembers
from pointsman.selection.arrays import np
from pointsman.selection.columns import array, column_of, or_else, quotient
from pointsman.types import RequestMetadata

DEFAULT_PRICE_PER_GPU_HOUR = 2.0
"""Roughly the rent of a data-centre GPU. Set your own: budgets and estimated costs depend on it."""

UNKNOWN_PRICE = nan
"""Instances without a price of their own have unknown costs."""

DEFAULT_OUTPUT_TOKENS = 256
"""Assumed output tokens of requests without `max_tokens`."""


def output_tokens(request: RequestMetadata) -> int:
    """The maximum number of tokens of the answer."""
    return DEFAULT_OUTPUT_TOKENS if request.max_tokens is None else request.max_tokens


def latency_ms(request: RequestMetadata, candidates: Endpoints) -> Column:
    """Expected milliseconds until the whole answer, per candidate; nan where unknown."""
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
    """The cost of a token on each endpoint, at its own price or else at the given one; nan where unknown."""

    def __init__(self, price_per_gpu_hour: float) -> None:
        self._price = price_per_gpu_hour
        self._per_second = PerMembers(self._per_second_of)

    def of(self, candidates: Endpoints) -> Column:
        return quotient(candidates.cut(self._per_second.of(candidates)), candidates.column(THROUGHPUT))

    def cheapness(self, candidates: Endpoints) -> Column:
        """Tokens per unit of money on each candidate; 0 where unknown, infinite where they are free."""
        return or_else(quotient(candidates.column(THROUGHPUT), candidates.cut(self._per_second.of(candidates))), 0.0)

    def _per_second_of(self, endpoints: Endpoints) -> Column:
        """The prices of whole endpoints. Prices change only with the members; throughputs are learned."""
        own, gpus = array(endpoints.column(PRICE)), array(endpoints.column(GPUS))
        by_gpu = np.where(gpus > 0, gpus * self._price, nan)
        return column_of(np.where(np.isnan(own), by_gpu, own) / 3600, endpoints.arrays)


def billed_tokens(request: RequestMetadata) -> int:
    """Tokens that a request pays for: the tokens of its prompt, and the maximum number of tokens of its answer."""
    return request.input_tokens + output_tokens(request)


def expected(
    request: RequestMetadata, row: int, columns: Mapping[str, Column], price_per_gpu_hour: float
) -> tuple[float | None, float | None]:
    """(latency, cost) on the endpoint in one row, by the formulas for columns; None where unknown."""
    latency = columns[EXPECTED_MS][row]
    if latency != latency:
        latency = output_tokens(request) * 1000 * (columns[LOAD][row] + 1) / columns[THROUGHPUT][row]
    found = None if latency != latency else float(latency)
    price, throughput = columns[PRICE][row], columns[THROUGHPUT][row]
    if price != price and columns[GPUS][row]:
        price = price_per_gpu_hour * columns[GPUS][row]
    if price != price or throughput != throughput:
        return found, None
    return found, float(price / 3600 * billed_tokens(request) / throughput)


def speed_and_cost(fleet: EndpointTable, endpoint: Endpoint) -> dict[str, float | None]:
    """The speed and the price that decisions use for an endpoint, declared or learned; None if unknown."""
    columns, row = fleet.load.columns, endpoint.row
    latency, throughput, price = (float(columns[name][row]) for name in (LATENCY_MS, THROUGHPUT, PRICE))
    per_million = price / 3600 / throughput * 1e6
    found = {
        "latency_ms": latency,
        "tokens_per_second": throughput,
        "price_per_hour": price,
        "cost_per_million_tokens": per_million,
    }
    return {name: None if isnan(value) else value for name, value in found.items()}
