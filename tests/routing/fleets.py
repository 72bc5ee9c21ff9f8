"""Candidates written as table rows, and the cycle and roster that a plugin gets for them."""

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from pointsman.routing.endpoints import Endpoint, EndpointTable, Metrics
from pointsman.routing.plugins import (
    LATENCY_PREDICTIONS,
    PREFIX_MATCH,
    UNCACHED_REQUEST_TOKENS,
    Endpoints,
    LatencyPrediction,
    PrefixMatch,
    RequestCycle,
)
from pointsman.selection import Column, Cycle, Filter, ProfileResult, Ranked, Scorer, Trace
from pointsman.selection.columns import ARRAYS_FROM, column_of
from pointsman.types import ExecutionInstance, RequestMetadata

both_lengths = pytest.mark.parametrize("long", [False, True], ids=["lists", "arrays"])
"""Runs a table on a short roster and on one cut from a fleet long enough to have arrays."""


class Candidate(msgspec.Struct, frozen=True):
    """One row: what is known of an endpoint. None is unknown."""

    metrics: Metrics | None = None
    requests: int = 0
    """Ours in flight, and their tokens."""
    tokens: float = 0.0
    labels: Mapping[str, str] = {}
    match: float | None = None
    """Prefix match in blocks; any row that has one makes all of them have one."""
    total: float = 0.0
    block_size: float = 16.0
    cached: float | None = None
    uncached: float | None = None
    prediction: LatencyPrediction | None = None
    host: str = "10.0.0.1"
    namespace: str = "pool"


def waiting(size: float) -> Candidate:
    return Candidate(Metrics(waiting_queue_size=size))


def running(size: float) -> Candidate:
    return Candidate(Metrics(running_requests_size=size))


def kv(usage: float) -> Candidate:
    return Candidate(Metrics(kv_cache_usage=usage))


def labelled(**labels: str) -> Candidate:
    return Candidate(labels=labels)


def matched(match: float, total: float, block_size: float = 16.0) -> Candidate:
    return Candidate(match=match, total=total, block_size=block_size)


def predicted(ttft: float, tpot: float, dispatched: int = 1) -> Candidate:
    """A row by its headrooms."""
    return Candidate(prediction=prediction(ttft, tpot, dispatched))


def prediction(ttft: float, tpot: float, dispatched: int = 1) -> LatencyPrediction:
    return LatencyPrediction(
        ttft=100.0, tpot=10.0, ttft_headroom=ttft, tpot_headroom=tpot, dispatched_requests=dispatched
    )


def fleet_of(candidates: Sequence[Candidate], *, long: bool = False) -> EndpointTable:
    """Endpoints called 0, 1, 2... in the order of the rows, with more behind them if the fleet is to be long."""
    rows = [*candidates, *[Candidate()] * (ARRAYS_FROM if long else 0)]
    fleet = EndpointTable(
        [
            ExecutionInstance(
                instance_id=str(place),
                namespace=row.namespace,
                labels=dict(row.labels),
                host=row.host,
                port=8000 + place,
            )
            for place, row in enumerate(rows)
        ]
    )
    for place, row in enumerate(rows):
        if row.metrics is not None:
            fleet.measure(str(place), row.metrics, now=0.0)
        for number in range(row.requests):
            fleet.load.reserve(fleet[str(place)], 0.0 if number else row.tokens)
        if row.tokens and not row.requests:
            fleet.load.release_tokens(fleet[str(place)], -row.tokens)
    return fleet


def scene(
    candidates: Sequence[Candidate],
    *,
    long: bool = False,
    request: RequestMetadata | None = None,
    headers: Mapping[str, str] | None = None,
    now: float = 0.0,
    seed: int = 0,
    fleet: EndpointTable | None = None,
    trace: Trace | None = None,
) -> tuple[RequestCycle, Endpoints]:
    """The cycle and the roster of which these rows are the candidates."""
    fleet = fleet or fleet_of(candidates, long=long)
    subject = request or RequestMetadata("r", headers=dict(headers or {}))
    cycle: RequestCycle = Cycle(subject, now=now, seed=seed, trace=trace)
    rows = [*candidates, *[Candidate()] * (len(fleet) - len(candidates))]

    def column(values: list[float]) -> Column:
        return column_of(values, fleet.roster.arrays)

    if any(row.match is not None for row in candidates):
        cycle[PREFIX_MATCH] = PrefixMatch(
            match=column([row.match or 0.0 for row in rows]),
            total=column([row.total for row in rows]),
            block_size=column([row.block_size for row in rows]),
            cached=column([row.match or 0.0 if row.cached is None else row.cached for row in rows]),
        )
    if any(row.uncached is not None for row in candidates):
        cycle[UNCACHED_REQUEST_TOKENS] = column([row.uncached or 0.0 for row in rows])
    known = {f"{row.namespace}/{place}": row.prediction for place, row in enumerate(rows)}
    if any(known.values()):
        cycle[LATENCY_PREDICTIONS] = {name: one for name, one in known.items() if one is not None}
    roster = fleet.roster
    return cycle, roster.without(range(len(candidates), len(fleet))) if len(fleet) > len(candidates) else roster


def scores(scorer: Scorer[Endpoint], cycle: RequestCycle, roster: Endpoints) -> list[float]:
    """The scores of a scorer, as a list."""
    return [float(score) for score in scorer.scores(cycle, roster)]


def kept(chooser: Filter[Endpoint], cycle: RequestCycle, roster: Endpoints) -> list[int]:
    """The indexes of the candidates that pass a filter."""
    gone = {endpoint.instance.instance_id for endpoint, _ in chooser.rejections(cycle, roster)}
    return [place for place in range(len(roster)) if roster[place].instance.instance_id not in gone]


def reasons(chooser: Filter[Endpoint], cycle: RequestCycle, roster: Endpoints) -> list[str]:
    """The reasons of the rejections, in order."""
    return [str(why) for _, why in chooser.rejections(cycle, roster)]


def result_of(profile: str, roster: Endpoints, *targets: int) -> ProfileResult[Endpoint]:
    """The result of a profile that chose the candidates of these indexes."""
    return ProfileResult(profile, [roster[place] for place in targets], Ranked(roster, [0.0] * len(roster)))
