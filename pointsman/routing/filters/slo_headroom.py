"""The filter for endpoints that are predicted to meet the latency objectives of a request."""

from itertools import compress
from math import nan
from operator import not_

from pointsman.routing.plugins import LATENCY_PREDICTIONS, Endpoints, LatencyPrediction, Rejections, RequestCycle
from pointsman.selection import Rejected

UNPREDICTED = LatencyPrediction(ttft=nan, tpot=nan, ttft_headroom=nan, tpot_headroom=nan)


class SloHeadroomTierFilter:
    """Demands endpoints predicted to meet both latency objectives, if there are any.

    With probability `epsilon_explore_neg` it demands the other endpoints instead, so that their predictions stay
    current. An endpoint without a prediction is one of the others. Without any prediction all endpoints pass.
    """

    def __init__(self, epsilon_explore_neg: float = 0.01) -> None:
        if not 0 <= epsilon_explore_neg <= 1:
            raise ValueError(f"epsilonExploreNeg is {epsilon_explore_neg:g}; it must be from 0 to 1")
        self.epsilon = epsilon_explore_neg

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        known = cycle.get(LATENCY_PREDICTIONS)
        if not known or len(candidates) <= 1:
            return ()
        predictions = [known.get(endpoint.id, UNPREDICTED) for endpoint in candidates]
        in_time = [prediction.ttft_headroom >= 0 and prediction.tpot_headroom >= 0 for prediction in predictions]
        if all(in_time) or not any(in_time):
            return ()
        positions = range(len(candidates))
        if cycle.rng.random() < self.epsilon:
            return Rejected(candidates, list(compress(positions, in_time)), "exploring")
        return Rejected(
            candidates,
            list(compress(positions, map(not_, in_time))),
            "may-be-late",
            ttft_headroom_ms=[prediction.ttft_headroom for prediction in predictions],
            tpot_headroom_ms=[prediction.tpot_headroom for prediction in predictions],
        )
