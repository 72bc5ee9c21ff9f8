"""Figures of one replay: latencies, objectives met, tokens, costs and fairness.

Enters: the outcome of each request, one by one. Leaves: plain numbers, small enough to keep. The one rule: shares are
of all requests that arrived. A request that was not served meets no objective.
"""

import math
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from pointsman.lab.traffic.replay import Replayed, RequestOutcome, TimeLine
from pointsman.routing.estimates import DEFAULT_PRICE_PER_GPU_HOUR

QUANTILES = tuple(index / 100 for index in range(101))
SHOWN = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
NO_TENANT = "(none)"


class Objectives(msgspec.Struct, frozen=True):
    """Latency objectives. A request with its own `slo_ms` must be answered within that time instead."""

    ttft_s: float = 5.0
    """Time to the first token, from the arrival."""
    tpot_s: float = 0.1
    """Mean time per output token after the first token."""

    def met(self, one: RequestOutcome) -> bool:
        if not one.served:
            return False
        if one.request.slo_ms is not None:
            return one.latency_s * 1000 <= one.request.slo_ms
        return one.ttft_s <= self.ttft_s and one.tpot_s <= self.tpot_s


class Latencies(msgspec.Struct, frozen=True):
    """Latencies of served requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    quantiles: list[float]
    """Quantiles at 0 %, 1 %, and so on up to 100 %."""


class TenantFigures(msgspec.Struct, frozen=True):
    requests: int
    attainment: float
    ttft_mean_s: float


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures for one policy at one speed with one seed."""

    policy: str
    speed: float
    seed: int
    requests: int
    served: int
    attainment: float
    """Share of all requests that met their objectives."""
    late: float
    """Share of requests whose first token was late. Requests with an objective of their own do not count as late."""
    slow: float
    """Share of requests whose first token was in time, but whose further tokens came too slowly."""
    rejected: float
    """Share of requests that were not served."""
    ttft: Latencies
    tpot: Latencies
    latency: Latencies
    """Time from arrival to end."""
    hit_rate: float
    """Share of input tokens that were in prefix caches."""
    goodput_per_s: float
    """Number of requests that met their objectives, per second of the recording."""
    tokens_per_s: float
    """Output tokens per second, until the last request ends."""
    seconds: float
    gpu_hours: float
    cost_per_million_tokens: float | None
    """Cost per million input and output tokens of served requests. None if there are no such requests, or no GPUs."""
    fairness: float
    """Jain's index over the attainments of tenants: 1 if all are equal, 1/n if one of n tenants gets everything."""
    tenants: dict[str, TenantFigures]
    outcomes: dict[str, int]
    line: TimeLine
    errors: list[str]


RELATIVE = 1e-3
"""The width of the bins of a `Spread`."""
LEAST = 1e-9
"""A value below this counts as this value."""
AT_ONCE = 4096
"""Number of values that are counted together. This takes a tenth of the time of counting them one by one."""


class Spread:
    """The distribution of values in constant memory. Values are counted by logarithm.

    Quantiles are within half a thousandth of the true ones; the mean is exact.
    """

    __slots__ = ("_counts", "_fresh", "_number", "_sum", "add", "high", "low")

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf
        self._number, self._sum = 0, 0.0
        self._counts: dict[int, int] = {}
        self._fresh = array("d")
        """Values that were added but are not counted yet."""
        self.add = self._fresh.append
        """Add a value, which must be at least 0. The caller must call `count_fresh` now and then to free memory."""

    def count_fresh(self) -> None:
        fresh = np.frombuffer(self._fresh)
        if not len(fresh):
            return
        self._number += len(fresh)
        self._sum += float(fresh.sum())
        self.low, self.high = min(self.low, float(fresh.min())), max(self.high, float(fresh.max()))
        places = np.floor(np.log(np.maximum(fresh, LEAST)) / RELATIVE).astype(np.int64)
        counts = self._counts
        for place, count in zip(*(each.tolist() for each in np.unique(places, return_counts=True)), strict=True):
            counts[place] = counts.get(place, 0) + count
        del fresh  # while this buffer exists, the array cannot shrink
        del self._fresh[:]

    @property
    def count(self) -> int:
        self.count_fresh()
        return self._number

    @property
    def mean(self) -> float:
        count = self.count
        return self._sum / count if count else math.nan

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """The quantiles at these shares. The shares must be in ascending order."""
        found: list[float] = []
        last = self.count - 1
        places = iter(sorted(self._counts.items()))
        value, below = self.low, 0
        for share in shares:
            rank = share * last
            while below <= rank:
                place, count = next(places)
                value = min(max(math.exp((place + 0.5) * RELATIVE), self.low), self.high)
                below += count
            found.append(value)
        return found

    def latencies(self) -> Latencies:
        """The latencies as figures. All are nan if there are no values."""
        if not self.count:
            return Latencies(math.nan, math.nan, math.nan, math.nan, [])
        shown = dict(zip(SHOWN, self.quantiles(list(SHOWN.values())), strict=True))
        points = [round(value, 6) for value in self.quantiles(QUANTILES)]
        return Latencies(mean=self.mean, quantiles=points, **shown)


class _TenantSums:
    __slots__ = ("met", "requests", "served", "ttft_s")

    def __init__(self) -> None:
        self.requests = self.met = self.served = 0
        self.ttft_s = 0.0

    def figures(self) -> TenantFigures:
        ttft_s = self.ttft_s / self.served if self.served else math.nan
        return TenantFigures(self.requests, self.met / self.requests, ttft_s)


class RunCounters:
    """Sums up requests as they end. It keeps none of these requests."""

    def __init__(self, objectives: Objectives) -> None:
        self._objectives = objectives
        self._ttft, self._tpot, self._latency = Spread(), Spread(), Spread()
        self._requests = self._served = self._met = self._late = self._slow = 0
        self._input = self._output = self._cached = 0
        """Numbers of input, output and cached tokens of served requests."""
        self._last_at = 0.0
        self._tenants: dict[str, _TenantSums] = {}
        self._outcomes: dict[str, int] = {}

    def add(self, one: RequestOutcome) -> None:
        request, is_met = one.request, self._objectives.met(one)
        self._requests += 1
        self._met += is_met
        self._last_at = max(self._last_at, one.at)
        self._outcomes[one.outcome] = self._outcomes.get(one.outcome, 0) + 1
        name = request.tenant or NO_TENANT
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _TenantSums()
        tenant.requests += 1
        tenant.met += is_met
        if not one.served:
            return
        ttft_s, output = one.ttft_s, request.output_length
        self._served += 1
        self._input += request.input_length
        self._output += output or 1
        self._cached += one.cached_tokens
        self._ttft.add(ttft_s)
        self._latency.add(one.latency_s)
        if output > 1:
            self._tpot.add(one.tpot_s)
        if not is_met and request.slo_ms is None:
            is_late = ttft_s > self._objectives.ttft_s
            self._late += is_late
            self._slow += not is_late
        tenant.served += 1
        tenant.ttft_s += ttft_s
        if self._requests % AT_ONCE == 0:
            for spread in (self._ttft, self._tpot, self._latency):
                spread.count_fresh()

    def figures(
        self,
        replayed: Replayed,
        *,
        policy: str,
        speed: float,
        seed: int,
        gpu_price: float = DEFAULT_PRICE_PER_GPU_HOUR,
    ) -> RunFigures:
        """The figures of the requests that were added. Figures that requests do not have come from the replay."""
        requests, span_s = self._requests, self._last_at or 1.0
        tokens = self._input + self._output
        tenants = {name: sums.figures() for name, sums in sorted(self._tenants.items())}
        has_cost = tokens and replayed.gpu_hours
        return RunFigures(
            policy=policy,
            speed=speed,
            seed=seed,
            requests=requests,
            served=self._served,
            attainment=self._met / requests,
            late=self._late / requests,
            slow=self._slow / requests,
            rejected=1 - self._served / requests,
            ttft=self._ttft.latencies(),
            tpot=self._tpot.latencies(),
            latency=self._latency.latencies(),
            hit_rate=self._cached / self._input if self._input else 0.0,
            goodput_per_s=self._met / span_s,
            tokens_per_s=self._output / replayed.seconds if replayed.seconds else 0.0,
            seconds=replayed.seconds,
            gpu_hours=replayed.gpu_hours,
            cost_per_million_tokens=replayed.gpu_hours * gpu_price / tokens * 1e6 if has_cost else None,
            fairness=jain([one.attainment for one in tenants.values()]),
            tenants=tenants,
            outcomes=dict(sorted(self._outcomes.items())),
            line=replayed.line,
            errors=replayed.errors,
        )


def figures(replayed: Replayed, objectives: Objectives, *, policy: str, speed: float, seed: int) -> RunFigures:
    """The figures of a replay that kept the outcomes of its requests."""
    counters = RunCounters(objectives)
    for one in replayed.ended:
        counters.add(one)
    return counters.figures(replayed, policy=policy, speed=speed, seed=seed)


def jain(shares: Sequence[float]) -> float:
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
