"""Scorers for the load of endpoints, as reported by engines or as counted here."""

from pointsman.routing.endpoints import IN_FLIGHT_REQUESTS, IN_FLIGHT_TOKENS, KV_USAGE, LOAD, RUNNING, WAITING
from pointsman.routing.plugins import UNCACHED_REQUEST_TOKENS, Endpoints, RequestCycle
from pointsman.selection import Column
from pointsman.selection.columns import (
    array,
    best_over,
    clipped,
    falling,
    filled,
    largest,
    linear,
    placed,
    plus,
    take,
    where_above,
)


class QueueScorer:
    """Prefers short waiting queues: 1 for the shortest, 0 for the longest, 1 for all if they are equal.

    An endpoint that was never measured counts as having an empty queue.
    """

    bounded = True
    steady = True

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        return falling(candidates.column(WAITING))


class RunningRequestsSizeScorer:
    """Prefers endpoints that run few requests: 1 for the fewest, 0 for the most, 1 for all if they are equal.

    An endpoint that was never measured counts as running nothing.
    """

    bounded = True
    steady = True

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        return falling(candidates.column(RUNNING))


class KvCacheUtilizationScorer:
    """Prefers free KV cache: scores the free share of it. An endpoint never measured counts as free."""

    steady = True

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        return linear(candidates.column(KV_USAGE), -1.0, 1.0)


class TokenLoadScorer:
    """Prefers endpoints with few prompt tokens to compute: the score falls from 1 at none to 0 at
    `queue_threshold_tokens`. It counts the tokens in flight and, if a producer reports them, those that this request
    would add. Both are counted here, so they are never stale.
    """

    def __init__(self, queue_threshold_tokens: int = 4194304) -> None:
        self.threshold = queue_threshold_tokens if queue_threshold_tokens > 0 else 4194304

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        tokens = candidates.column(IN_FLIGHT_TOKENS)
        added = cycle.get(UNCACHED_REQUEST_TOKENS)
        if added is not None:
            tokens = plus(tokens, candidates.cut(added))
        return linear(clipped(tokens, 0.0, self.threshold), -1 / self.threshold, 1.0)


class ActiveRequestScorer:
    """Prefers endpoints with few requests in flight.

    Up to `idle_threshold` requests score 1; above it, scores fall from `max_busy_score` to 0 for the busiest candidate.
    Requests are counted here, so the count is never stale.
    """

    def __init__(self, idle_threshold: int = 0, max_busy_score: float = 1.0) -> None:
        self.idle = max(0, idle_threshold)
        self.busy = max_busy_score if 0.0 <= max_busy_score <= 1.0 else 1.0

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        requests = candidates.column(IN_FLIGHT_REQUESTS)
        busy = where_above(requests, self.idle)
        if not len(busy):
            return filled(1.0, requests)
        falls = linear(take(requests, busy), -self.busy / largest(requests), self.busy)
        return placed(filled(1.0, requests), busy, falls)


class LoadAwareScorer:
    """Prefers short waiting queues: the score falls from 0.5 for an empty queue to 0 at `threshold` and above.

    An endpoint that was never measured counts as having an empty queue.
    """

    def __init__(self, threshold: int = 128) -> None:
        self.threshold = threshold if threshold > 0 else 128

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        queues = clipped(candidates.column(WAITING), 0.0, self.threshold)
        return linear(queues, -0.5 / self.threshold, 0.5)


class PendingWorkScorer:
    """Prefers endpoints with little work: 1 for the least, 0.5 for twice as much.

    Work is (prompt tokens still to compute + `own_weight` times those of this request that the endpoint has not cached)
    times (requests there + `base_requests`): tokens delay the first token, requests slow down all others. What was sent
    from here counts at once; measurements only add requests that others have sent.
    """

    bounded = True

    def __init__(self, own_weight: float = 3.0, base_requests: float = 8.0) -> None:
        for parameter, value in {"ownWeight": own_weight, "baseRequests": base_requests}.items():
            if not value > 0:
                raise ValueError(f"{parameter} is {value:g}; it must be above 0")
        self._own, self._base = own_weight, base_requests

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        pending, load = candidates.column(IN_FLIGHT_TOKENS), candidates.column(LOAD)
        found, weight, base = cycle.get(UNCACHED_REQUEST_TOKENS), self._own, self._base
        own = filled(cycle.request.input_tokens, pending) if found is None else candidates.cut(found)
        if isinstance(pending, list):
            work: Column = [
                (weight * mine + theirs + 1.0) * (requests + base)
                for mine, theirs, requests in zip(own, pending, load, strict=True)
            ]
        else:
            work = (weight * array(own) + pending + 1.0) * (array(load) + base)
        scores = best_over(work)
        return work if scores is None else scores  # None: there are no candidates
