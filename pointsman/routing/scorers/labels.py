"""The scorer that compares a header of the request with a label of the endpoint."""

from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.selection import Column
from pointsman.selection.columns import column_of
from pointsman.selection.labels import LabelColumn


class HeaderLabelAffinityScorer:
    """Prefers endpoints whose label `label_key` has exactly the value of the request's header `header_name`: 1, else 0.

    Without the header all score 0, and so does an endpoint without the label.
    """

    def __init__(self, header_name: str, label_key: str) -> None:
        for parameter, value in {"headerName": header_name, "labelKey": label_key}.items():
            if not value:
                raise ValueError(f"{parameter} is empty; it must be a name")
        self.header = header_name.lower()
        self._label: LabelColumn[Endpoint] = LabelColumn(label_key)

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        wanted = cycle.request.headers.get(self.header)
        if wanted is None:
            return column_of([0.0] * len(candidates), candidates.arrays)
        return self._label.judged(candidates, lambda value: float(value == wanted))
