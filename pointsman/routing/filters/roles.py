"""Filters for fleets that split a request's work: who may encode, who may prefill, who may decode."""

from collections.abc import Set

from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import Endpoints, Rejections, RequestCycle
from pointsman.selection.columns import where_zero
from pointsman.selection.labels import LabelColumn, Labels, RejectedForLabels

ROLE = "llm-d.ai/role"


class HasRole:
    """Demands one of some roles; an endpoint without a role only passes if `unlabelled` ones may."""

    def __init__(self, stage: str, roles: Set[str], *, unlabelled: bool = False) -> None:
        self.stage = stage
        self.roles: Set[str | None] = roles | {None} if unlabelled else roles
        self._label: LabelColumn[Endpoint] = LabelColumn(ROLE)

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        others = where_zero(self._label.judged(candidates, lambda role: float(role in self.roles)))
        return RejectedForLabels(candidates, others, self._why) if len(others) else ()

    def _why(self, labels: Labels) -> str:
        return f"not for {self.stage}: {ROLE} is {labels.get(ROLE, 'absent')}"


class DecodeFilter(HasRole):
    """Demands an endpoint that may decode, by its role. Without a role it may."""

    def __init__(self) -> None:
        super().__init__("decode", {"decode", "prefill-decode", "both", "encode-prefill-decode"}, unlabelled=True)


class PrefillFilter(HasRole):
    """Demands an endpoint that may prefill, by its role. Without a role it may not."""

    def __init__(self) -> None:
        super().__init__("prefill", {"prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"})


class EncodeFilter(HasRole):
    """Demands an endpoint that may encode, by its role. Without a role it may not."""

    def __init__(self) -> None:
        super().__init__("encode", {"encode", "encode-prefill", "encode-prefill-decode"})
