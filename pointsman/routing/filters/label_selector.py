"""The filter for any demand on labels."""

from collections.abc import Sequence

from pointsman.reasons import Reason
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import Endpoints, Rejections, RequestCycle
from pointsman.selection import Column, PerMembers, RejectedEach
from pointsman.selection.columns import column_of, where_zero
from pointsman.selection.labels import LabelExpression, LabelSelector


class LabelSelectorFilter:
    """Demands that an endpoint's labels match a selector in the form of Kubernetes. The empty selector: anybody."""

    def __init__(
        self, match_labels: dict[str, str] | None = None, match_expressions: Sequence[LabelExpression] = ()
    ) -> None:
        self.selector = LabelSelector(match_labels, match_expressions)
        self._matching = PerMembers(self._matches)

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        others = where_zero(candidates.cut(self._matching.of(candidates)))
        return RejectedEach(candidates, others, self._why) if len(others) else ()

    def _matches(self, everybody: Endpoints) -> Column:
        matching = [float(self.selector.matches(endpoint.labels)) for endpoint in everybody]
        return column_of(matching, everybody.arrays)

    def _why(self, endpoint: Endpoint) -> Reason:
        return Reason("labels-differ", self.selector.mismatch(endpoint.labels) or {})
