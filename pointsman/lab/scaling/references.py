"""Plain policies to compare with."""

import math

from pointsman.scaling.policy import Wish
from pointsman.scaling.view import DeploymentView


class Reactive:
    """What comes now, times a headroom."""

    def __init__(self, replica_per_s: float, headroom: float = 1.2) -> None:
        self._replica_per_s, self._headroom = replica_per_s, headroom

    def desired_replicas(self, view: DeploymentView) -> Wish:
        now = view.arrivals_per_s[min(view.arrivals_per_s)]
        return Wish(
            math.ceil(self._headroom * now / self._replica_per_s - 1e-9), f"{self._headroom:g} times {now:.4g}/s"
        )
