"""Steps are requests of the gateway: refused, stopped and abandoned like those of clients."""

import time

import pytest

from pointsman.gateway.pipelines.step_call import StepCall, StepFailure
from pointsman.http.responses import ResponseHead
from pointsman.reasons import Reason
from pointsman.routing.events import Outcome, Refusal, Revoke
from pointsman.types import RequestMetadata
from tests.gateway.backends import Gate, answers, hangs
from tests.gateway.bed import CHAT_DEPLOYMENT, Bed, MakeBed
from tests.gateway.wire import chat, wait_for

SHORT_TTL = {
    "config": {
        "featureGates": ["flowControl"],
        "schedulingProfiles": [{"name": "default"}],
        "flowControl": {"noEndpointRequestTTL": "50ms"},
    }
}


class Listener:
    """Records its calls."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.answers: list[tuple[int, bytes]] = []
        self.failures: list[StepFailure] = []

    def step_sent(self, index: int, instance_id: str) -> None:
        self.sent.append(instance_id)

    def step_answered(self, index: int, head: ResponseHead, body: bytes) -> None:
        self.answers.append((head.status, body))

    def step_began(self, index: int, head: ResponseHead) -> None: ...

    def step_piece(self, index: int, payload: bytes) -> None: ...

    def step_ended(self, index: int) -> None: ...

    def step_failed(self, index: int, failure: StepFailure) -> None:
        self.failures.append(failure)


def begin(bed: Bed, *, idempotent: bool = True) -> tuple[StepCall, Listener]:
    """Begin a step in the lane of the only deployment."""
    listener, lane, gateway = Listener(), bed.lane(), bed.gateway
    request = RequestMetadata("request.step", model_name=lane.plan.model, arrival_time=time.monotonic())
    call = StepCall(
        listener,
        0,
        b"/call",
        b"x-request-id: request.step\r\n",
        b"{}",
        idempotent=idempotent,
        in_pieces=False,
        upstream=gateway.upstream,
        lane=lane,
        request=request,
        counts=gateway.metrics.of(lane.plan.name),
    )
    bed.thread.call(lambda: call.begin(time.monotonic()))
    return call, listener


def test_a_step_without_an_instance_fails_like_a_clients_request(make_bed: MakeBed) -> None:
    bed = make_bed({}, {**CHAT_DEPLOYMENT, "scheduling": SHORT_TTL})
    bed.lane().start_up_s = 30.0
    response = bed.fetch(chat())
    _, listener = begin(bed)
    wait_for(lambda: listener.failures)
    [failure] = listener.failures
    assert failure.status == response.status == 503
    assert failure.code == "not_served"
    assert (failure.retry_after_s, response.header("retry-after")) == (30, "30")
    assert bed.gateway.metrics.of("chat").statuses[503] == 2


def test_a_failed_step_that_is_not_idempotent_is_502_without_retry_after(bed: Bed) -> None:
    bed.backend(answers(b"not HTTP at all"))
    _, listener = begin(bed, idempotent=False)
    wait_for(lambda: listener.failures)
    [failure] = listener.failures
    assert (failure.status, failure.retry_after_s) == (502, None)


@pytest.mark.parametrize("how", ["abandon", "revoke"])
def test_a_stopped_step_leaves_nothing_behind(bed: Bed, how: str) -> None:
    backend = bed.backend(hangs(), max_concurrency=1)
    call, listener = begin(bed)
    wait_for(lambda: backend.received)
    refusal = Refusal(Outcome.EVICTED_IN_FLIGHT, Reason("stopped-for-priority"))
    bed.thread.call(
        call.abandon
        if how == "abandon"
        else lambda: bed.gateway.upstream.revoke(bed.lane(), Revoke(call.request, refusal))
    )
    assert bed.unfinished_requests() == {}
    assert [failure.status for failure in listener.failures] == ([] if how == "abandon" else [429])
    assert bed.gateway.metrics.of("chat").abandoned == (1 if how == "abandon" else 0)


def test_a_step_queues_behind_a_client_request(bed: Bed) -> None:
    gate = Gate()
    backend = bed.backend(gate, max_concurrency=1)
    client = bed.client()
    client.send(chat())
    wait_for(lambda: backend.received)
    _, listener = begin(bed)
    assert bed.waiting() == 1
    gate.open()
    assert client.read_response().status == 200
    wait_for(lambda: listener.answers)
    assert listener.sent == ["chat-0"]
    assert [status for status, _ in listener.answers] == [200]
