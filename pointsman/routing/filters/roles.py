"""Filters for fleets in which endpoints only encode, prefill or decode."""

from collections.abc import Set

from pointsman.reasons import Reason
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import Endpoints, Rejections, RequestCycle
from pointsman.selection import RejectedEach
from pointsman.selection.columns import where_zero
from pointsman.selection.labels import LabelColumn

ROLE = "llm-d.ai/role"


class HasRole:
    """Demands one of some roles. An endpoint without a role passes if `unlabelled` is set."""

    def __init__(self, code: str, roles: Set[str], *, unlabelled: bool = False) -> None:
        """`code` is the code of the reason for rejecting all other endpoints."""
        self._code = code
        self.roles: Set[str | None] = roles | {None} if unlabelled else roles
        self._label: LabelColumn[Endpoint] = LabelColumn(ROLE)

    def rejections(self, cycle: RequestCycle, candidates: Endpoints) -> Rejections:
        rejected = where_zero(self._label.judged(candidates, lambda role: float(role in self.roles)))
        return RejectedEach(candidates, rejected, self._why) if len(rejected) else ()

    def _why(self, endpoint: Endpoint) -> Reason:
        return Reason(self._code, {"role": endpoint.labels.get(ROLE)})


class DecodeFilter(HasRole):
    """Demands an endpoint that may decode, by its role. One without a role may."""

    def __init__(self) -> None:
        super().__init__(
            "not-for-decode", {"decode", "prefill-decode", "both", "encode-prefill-decode"}, unlabelled=True
        )


class PrefillFilter(HasRole):
    """Demands an endpoint that may prefill, by its role. One without a role may not."""

    def __init__(self) -> None:
        super().__init__(
            "not-for-prefill", {"prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"}
        )


class EncodeFilter(HasRole):
    """Demands an endpoint that may encode, by its role. One without a role may not."""

    def __init__(self) -> None:
        super().__init__("not-for-encode", {"encode", "encode-prefill", "encode-prefill-decode"})
