"""The scorer that keeps requests for LoRA adapters where the adapters are loaded."""

from pointsman.routing.endpoints import Endpoint, Metrics
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import Column, PerMembers
from pointsman.selection.columns import column_of, placed

MAX_MODELS = 256
"""Maximum number of models whose scores are cached, because clients may send any number of names."""


class LoraAffinityScorer:
    """Prefers endpoints that have the model's adapter loaded (1), then those with room for one more (0.8), then those
    where it is waiting to be loaded (0.6).

    An endpoint that was never measured scores 0. Scores are cached per model, and computed again for endpoints with new
    metrics.
    """

    bounded = True

    def __init__(self) -> None:
        self._known: PerMembers[Endpoint, dict[str, tuple[int, list[Metrics | None], Column]]] = PerMembers(
            lambda _: {}
        )
        """The number of the measurement, the metrics of each endpoint, and the scores computed from them, by model."""

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        model, known = cycle.request.model_name, self._known.of(candidates)
        if len(known) > MAX_MODELS:
            known.clear()
        stamp, seen, scores = known.get(model) or _nothing_seen(candidates)
        latest = None if candidates.stamp is None else candidates.stamp[0]
        if stamp == latest:
            return candidates.cut(scores)
        now = [endpoint.metrics for endpoint in candidates.whole]
        if now != seen:
            changed = [row for row, (new, old) in enumerate(zip(now, seen, strict=True)) if new is not old]
            scores = placed(scores, changed, [_affinity(model, now[row]) for row in changed])
        known[model] = -1 if latest is None else latest, now, scores
        return candidates.cut(scores)


def _nothing_seen(candidates: Endpoints) -> tuple[int, list[Metrics | None], Column]:
    size = len(candidates.whole)
    return -1, [None] * size, column_of([0.0] * size, candidates.arrays)


def _affinity(model: str, metrics: Metrics | None) -> float:
    if metrics is None:
        return 0.0
    active, waiting = metrics.active_models, metrics.waiting_models
    if model in active:
        return 1.0
    if len(active | waiting) < metrics.max_active_models:
        return 0.8
    return 0.6 if model in waiting else 0.0
