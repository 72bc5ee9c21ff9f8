"""The pool as a whole: how full it is when prefill and decode have instances of their own, and what is shed then."""

from collections.abc import Set

from pointsman.routing.filters.roles import ROLE, DecodeFilter, PrefillFilter
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.queue.saturation import SaturationDetector


class PoolSaturation:
    """The saturation of the fuller one of two sub-pools: those that may prefill, and those that may decode.

    An endpoint without a role may decode; one with a mixed role is in both. A sub-pool without members does not count.
    """

    def __init__(self, detector: SaturationDetector) -> None:
        self.detector = detector
        self._roles = (PrefillFilter().roles, DecodeFilter().roles)
        self._split: Endpoints | None = None
        self._sub_pools: list[Endpoints] = []

    def of(self, endpoints: Endpoints, now: float) -> float:
        """How full these endpoints are. Nobody is as full as can be: 1.0."""
        if endpoints is not self._split:  # a fleet has the same roster until its members change
            self._split, self._sub_pools = endpoints, self._split_by_role(endpoints)
        return max(self.detector.saturation(sub_pool, now) for sub_pool in self._sub_pools)

    def _split_by_role(self, endpoints: Endpoints) -> list[Endpoints]:
        if not any(ROLE in endpoint.labels for endpoint in endpoints):
            return [endpoints]
        sub_pools = [_having(roles, endpoints) for roles in self._roles]
        return [sub_pool for sub_pool in sub_pools if len(sub_pool)] or sub_pools


class LegacyAdmission:
    """Without flow control nobody waits: requests of negative priority are turned away while the pool is full."""

    def __init__(self, detector: SaturationDetector) -> None:
        self._pool = PoolSaturation(detector)

    def denial(self, cycle: RequestCycle, endpoints: Endpoints) -> str | None:
        priority = cycle.request.priority
        if priority >= 0:
            return None
        saturation = self._pool.of(endpoints, cycle.now)
        if saturation < 1.0:
            return None
        return (
            f"shed by priority {priority}: saturation is {saturation:.2f}, and from 1 on only priority 0 and above is "
            "served; send it again later"
        )


def _having(roles: Set[str | None], endpoints: Endpoints) -> Endpoints:
    return endpoints.without([i for i, endpoint in enumerate(endpoints) if endpoint.labels.get(ROLE) not in roles])
