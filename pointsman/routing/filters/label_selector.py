"""The filter for the labels of endpoints."""

from collections.abc import Sequence

from pointsman.reasons import Reason
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import Endpoints, Rejections, RequestCycle
from pointsman.selection import Column, PerMembers, RejectedEach
from pointsman.selection.columns import column_of, where_zero
from pointsman.selection.labels import LabelExpression, LabelSelector


class LabelSelectorFilter:
    """Demands that an endpoint's labels match a selector in the form of Kubernetes. The empty selector matches all."""

    def __init__(
        self, match_labels: dict[str, str] | None = None, match_expressions: Sequence[LabelExpression] = ()
    ) -> None:
        self.selector = LabelSelector(match_labels, match_expressions)
        self._matching = PerMembers(self._matches)

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        mismatched = where_zero(candidates.cut(self._matching.of(candidates)))
        return RejectedEach(candidates, mismatched, self._why) if len(mismatched) else ()

    def _matches(self, endpoints: Endpoints) -> Column:
        return column_of([float(self.selector.matches(endpoint.labels)) for endpoint in endpoints], endpoints.arrays)

    def _why(self, endpoint: Endpoint) -> Reason:
        return Reason("labels-differ", self.selector.mismatch(endpoint.labels) or {})
