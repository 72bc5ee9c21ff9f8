"""The scorer and filter for endpoints that are meant for prompts of some length."""

import re

from pointsman.reasons import Reason
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import Endpoints, Rejections, RequestCycle
from pointsman.selection import Column, RejectedEach
from pointsman.selection.columns import where_zero
from pointsman.selection.labels import LabelColumn


class ContextLengthAware:
    """Prefers, and with `enable_filtering` demands, endpoints whose label has a range that the prompt falls in.

    The label is `min-max`, in tokens, both included. Narrow ranges score higher than wide ones. In the same range,
    short prompts score higher than long ones. An endpoint without the label scores 0.5 and passes. An endpoint whose
    label cannot be read scores 0 and is rejected. If the prompt's tokens are not counted, they are estimated from its
    bytes.
    """

    def __init__(self, label: str = "llm-d.ai/context-length-range", enable_filtering: bool = False) -> None:
        if not label:
            raise ValueError("label is empty; it must be the key of a label")
        self.filtering = enable_filtering
        self._ranges: LabelColumn[Endpoint] = LabelColumn(label)

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        if not self.filtering:
            return ()
        tokens = cycle.request.input_tokens
        outside = where_zero(self._ranges.judged(candidates, lambda text: float(_takes(text, tokens))))
        if not len(outside):
            return ()
        key = self._ranges.key
        return RejectedEach(candidates, outside, lambda endpoint: _outside(tokens, key, endpoint))

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        tokens = cycle.request.input_tokens
        return self._ranges.judged(candidates, lambda text: _score(text, tokens))


def _outside(tokens: int, key: str, endpoint: Endpoint) -> Reason:
    return Reason("prompt-out-of-range", {"tokens": tokens, "label": key, "range": endpoint.labels.get(key)})


def _takes(text: str | None, tokens: int) -> bool:
    if text is None:
        return True
    bounds = _bounds(text)
    return bounds is not None and bounds[0] <= tokens <= bounds[1]


def _score(text: str | None, tokens: int) -> float:
    if text is None:
        return 0.5
    bounds = _bounds(text)
    if bounds is None:
        return 0.0
    low, high = bounds
    width = high - low
    if not low <= tokens <= high:
        return 0.3 / (1 + max(low - tokens, tokens - high) / 1000)
    if not width:
        return 1.0
    return 0.3 + 0.7 * (0.7 / (1 + width / 10000) + 0.3 * (high - tokens) / width)


def _bounds(text: str) -> tuple[int, int] | None:
    parts = re.fullmatch(r"([0-9]+)-([0-9]+)", text)
    if parts is None:
        return None
    low, high = map(int, parts.groups())
    return (low, high) if low <= high else None
