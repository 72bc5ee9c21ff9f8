"""The filter for any demand on labels."""

from collections.abc import Sequence

from pointsman.routing.plugins import Endpoints, Rejections, RequestCycle
from pointsman.selection import Column, PerMembers
from pointsman.selection.columns import column_of, where_zero
from pointsman.selection.labels import LabelExpression, Labels, LabelSelector, RejectedForLabels


class LabelSelectorFilter:
    """Demands that an endpoint's labels match a selector in the form of Kubernetes. The empty selector: anybody."""

    def __init__(
        self, match_labels: dict[str, str] | None = None, match_expressions: Sequence[LabelExpression] = ()
    ) -> None:
        self.selector = LabelSelector(match_labels, match_expressions)
        self._matching = PerMembers(self._matches)

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        others = where_zero(candidates.cut(self._matching.of(candidates)))
        return RejectedForLabels(candidates, others, self._why) if len(others) else ()

    def _matches(self, everybody: Endpoints) -> Column:
        matching = [float(self.selector.matches(endpoint.labels)) for endpoint in everybody]
        return column_of(matching, everybody.arrays)

    def _why(self, labels: Labels) -> str:
        return f"labels do not match: {self.selector.mismatch(labels)}"
