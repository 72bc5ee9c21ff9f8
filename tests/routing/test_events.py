"""What a client is told when its request leaves."""

import pytest

from pointsman.reasons import Reason
from pointsman.routing.events import Outcome, Refusal

CODES = {
    Outcome.DISPATCHED: "dispatched",
    Outcome.REJECTED_CAPACITY: "rejected_capacity",
    Outcome.REJECTED_NO_ENDPOINTS: "rejected_no_endpoints",
    Outcome.REJECTED_ADMISSION: "rejected_admission",
    Outcome.REJECTED_UNSCHEDULABLE: "rejected_unschedulable",
    Outcome.REJECTED_OTHER: "rejected_other",
    Outcome.EVICTED_TTL: "evicted_ttl",
    Outcome.EVICTED_NO_ENDPOINTS: "evicted_no_endpoints",
    Outcome.EVICTED_CANCELLED: "evicted_context_cancelled",
    Outcome.EVICTED_SHUTTING_DOWN: "evicted_shutting_down",
    Outcome.EVICTED_IN_FLIGHT: "evicted_in_flight",
    Outcome.EVICTED_NOT_SENT: "evicted_not_sent",
    Outcome.EVICTED_OTHER: "evicted_other",
}
"""Published: programs look at them."""


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_has_a_code_and_a_status(outcome: Outcome) -> None:
    assert outcome.code == CODES[outcome]
    assert Refusal(outcome, Reason("client-gone")).status in (200, 429, 500, 503)
