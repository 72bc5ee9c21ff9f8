"""The scorer that spreads prompts that are not cached anywhere."""

from collections import OrderedDict
from itertools import count

from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import PREFIX_MATCH, Endpoints, RequestCycle
from pointsman.selection import Column, Key, SchedulingResult
from pointsman.selection.columns import clipped, column_of, largest, linear


class NoHitLruScorer:
    """Prefers, for a prompt that no endpoint has cached, the endpoint that was least recently sent such a prompt.

    Endpoints that were never used come first, in their order; then the others, least recent first. For a cached prompt
    all endpoints score 0.5. Without a producer of matches, every prompt counts as not cached.
    """

    def __init__(self, lru_size: int = 1024) -> None:
        self.size = lru_size if lru_size > 0 else 1024
        self._used: OrderedDict[str, None] = OrderedDict()
        self._cold: Key[bool] = Key("no-hit-lru: scored cold")

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        found = cycle.get(PREFIX_MATCH)
        cold = found is None or largest(candidates.cut(found.match)) <= 0.0
        cycle[self._cold] = cold
        if not cold or len(candidates) == 1:
            return column_of([1.0 if cold else 0.5] * len(candidates), candidates.arrays)
        ranks = column_of(self._ranks([endpoint.id for endpoint in candidates]), candidates.arrays)
        return clipped(linear(ranks, -1 / (len(candidates) - 1), 1.0), 0.0, 1.0)

    def _ranks(self, ids: list[str]) -> list[float]:
        fresh = [each for each in ids if each not in self._used]
        ranks = dict(zip([*fresh, *self._used], count(), strict=False))
        return [ranks[each] for each in ids]

    def dispatched(self, cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> None:
        if not cycle.get(self._cold):
            return
        for profile in (result.primary, "prefill"):
            chosen = result.results.get(profile)
            if chosen is not None and chosen.targets:
                self._used[chosen.targets[0].id] = None
                self._used.move_to_end(chosen.targets[0].id)
        while len(self._used) > self.size:
            self._used.popitem(last=False)

    def departed(self, endpoint: Endpoint) -> None:
        self._used.pop(endpoint.id, None)
