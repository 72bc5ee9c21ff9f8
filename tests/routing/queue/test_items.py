import pytest

from pointsman.routing.queue.items import Queued, flow_of
from pointsman.types import RequestMetadata

NEW, OLD = "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"


@pytest.mark.parametrize(
    ("headers", "user", "flow"),
    [
        ({}, "", "default-flow"),
        ({}, "ann", "ann"),
        ({NEW: "tenant"}, "ann", "tenant"),
        ({OLD: "tenant"}, "ann", "tenant"),
        ({OLD: "old", NEW: "new"}, "", "new"),
        ({OLD: "old", NEW: ""}, "", "default-flow"),  # the current name of the header wins
    ],
)
def test_the_flow_of_a_request(headers: dict[str, str], user: str, flow: str) -> None:
    assert flow_of(RequestMetadata("r", headers=headers, user_id=user)) == flow


def test_the_size_is_that_of_the_prompt() -> None:
    waits = Queued(RequestMetadata("r", prompt="12345678", priority=-1))
    assert (waits.size_bytes, waits.priority) == (8, -1)
