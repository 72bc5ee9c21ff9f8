"""The scorer for the predicted headroom to the latency objectives of a request."""

from collections.abc import Sequence
from math import trunc
from typing import Annotated, Literal

from pointsman.parameters import Spelled
from pointsman.routing.endpoints import KV_USAGE, WAITING
from pointsman.routing.plugins import LATENCY_PREDICTIONS, PREFIX_MATCH, Endpoints, LatencyPrediction, RequestCycle
from pointsman.selection import Column
from pointsman.selection.columns import column_of, filled, largest, linear, plus, ratio, rounded

UNPREDICTED = LatencyPrediction(ttft=0.0, tpot=0.0, ttft_headroom=0.0, tpot_headroom=0.0)
"""The prediction for an endpoint without a prediction: it counts as just in time."""


class LatencyScorer:
    """Prefers, among endpoints predicted to meet the latency objectives, those with the least (or most) headroom;
    if there are none, idle endpoints, then those that miss the objectives by least.

    An endpoint without a prediction counts as just in time. Without any prediction, scores are for free KV cache, short
    queues and cached prefixes instead. An endpoint that was never measured then counts as free and empty.
    """

    def __init__(
        self,
        ttft_weight: float = 0.8,
        tpot_weight: float = 0.2,
        headroom_selection_strategy: Literal["least", "most"] = "least",
        composite_kv_weight: Annotated[float, Spelled("compositeKVWeight")] = 1.0,
        composite_queue_weight: float = 1.0,
        composite_prefix_weight: float = 1.0,
    ) -> None:
        if headroom_selection_strategy not in ("least", "most"):
            raise ValueError(f'headroomSelectionStrategy is "{headroom_selection_strategy}"; it must be least or most')
        self.most = headroom_selection_strategy == "most"
        self.weights = _normalised(ttft_weight, tpot_weight)
        self.composite = _normalised(composite_kv_weight, composite_queue_weight, composite_prefix_weight)

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        known = cycle.get(LATENCY_PREDICTIONS)
        if not known or not any(endpoint.id in known for endpoint in candidates):
            return self._without_predictions(cycle, candidates)
        predictions = [known.get(endpoint.id, UNPREDICTED) for endpoint in candidates]
        in_time = [position for position, prediction in enumerate(predictions) if not _late(prediction)]
        group = in_time or _least_late(predictions)
        ranked = self._by_headroom([predictions[position] for position in group], most=self.most and bool(in_time))
        scores = [0.0] * len(predictions)
        for position, score in zip(group, ranked, strict=True):
            scores[position] = score
        return column_of(scores, candidates.arrays)

    def _by_headroom(self, group: Sequence[LatencyPrediction], *, most: bool) -> list[float]:
        ttfts, ttfts_differ = _spread([abs(prediction.ttft_headroom) for prediction in group])
        tpots, tpots_differ = _spread([abs(prediction.tpot_headroom) for prediction in group])
        for_ttft, for_tpot = self.weights if ttfts_differ == tpots_differ else (ttfts_differ, tpots_differ)
        headrooms = [for_ttft * ttft + for_tpot * tpot for ttft, tpot in zip(ttfts, tpots, strict=True)]
        return [(trunc((c if most else 1 - c) * 100) + 1) / 100 for c in headrooms]

    def _without_predictions(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        waiting = candidates.column(WAITING)
        longest = largest(waiting)
        free = linear(candidates.column(KV_USAGE), -1.0, 1.0)
        short = ratio(linear(waiting, -1.0, longest), filled(longest, waiting)) if longest else filled(1.0, waiting)
        found = cycle.get(PREFIX_MATCH)
        cached = filled(0.0, free) if found is None else ratio(candidates.cut(found.match), candidates.cut(found.total))
        for_kv, for_queue, for_prefix = self.composite
        loads = plus(linear(free, for_kv, 0.0), linear(short, for_queue, 0.0))
        return rounded(plus(loads, linear(cached, for_prefix, 0.0)), 2)


def _normalised(*weights: float) -> tuple[float, ...]:
    total = sum(weights)
    if total <= 0:
        return (1.0, *[0.0] * (len(weights) - 1))
    return tuple(weight / total for weight in weights)


def _late(prediction: LatencyPrediction) -> bool:
    return prediction.ttft_headroom < 0 or prediction.tpot_headroom < 0


def _least_late(late: Sequence[LatencyPrediction]) -> list[int]:
    """The positions to choose from if all endpoints are late: the first group of them that is not empty."""
    groups: dict[str, list[int]] = {"idle": [], "tpot": [], "ttft": [], "both": []}
    for position, prediction in enumerate(late):
        if not prediction.dispatched_requests:
            groups["idle"].append(position)
        elif prediction.ttft_headroom >= 0:
            groups["tpot"].append(position)
        else:
            groups["ttft" if prediction.tpot_headroom >= 0 else "both"].append(position)
    return next(group for group in groups.values() if group)


def _spread(values: Sequence[float]) -> tuple[list[float], bool]:
    """The values scaled to [0, 1], and whether they differ. If not, each becomes 0.5."""
    low, high = min(values), max(values)
    if high - low <= 1e-9:
        return [0.5] * len(values), False
    return [(value - low) / (high - low) for value in values], True
