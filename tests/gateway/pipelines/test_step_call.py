"""Steps are requests of the gateway: refused, stopped and abandoned like those of clients."""

import threading
import time

import pytest

from pointsman.control.status import Unavailable
from pointsman.gateway.pipelines.step_call import StepCall, StepFailure
from pointsman.http.responses import ResponseHead
from pointsman.reasons import Reason
from pointsman.routing.events import Outcome, Refusal, Revoke
from pointsman.runtimes.traffic import refuse_stranded
from pointsman.types import RequestMetadata
from tests.gateway.backends import STREAM, BackendConnection, Gate, answer, answers, chunk, drips, hangs
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


def begin(bed: Bed, *, idempotent: bool = True, in_pieces: bool = False) -> tuple[StepCall, Listener]:
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
        in_pieces=in_pieces,
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


DRIPS = {
    "comments": (STREAM, chunk(b": ping\n\n")),
    "bytes of an event": (STREAM, chunk(b"d")),
    "bytes of a long body": (b"HTTP/1.1 200 OK\r\ncontent-length: 9000000\r\n\r\n", b" "),
}


@pytest.mark.parametrize("in_pieces", [True, False])
@pytest.mark.parametrize("drip", DRIPS.values(), ids=DRIPS.keys())
def test_bytes_that_are_no_progress_do_not_keep_a_step_alive(
    make_bed: MakeBed, drip: tuple[bytes, bytes], in_pieces: bool
) -> None:
    bed = make_bed({"upstream": {"firstTokenTimeout": "200ms", "stallTimeout": "200ms", "maxTries": 1}})
    bed.backend(drips(*drip))
    _, listener = begin(bed, in_pieces=in_pieces)
    wait_for(lambda: listener.failures)
    assert "did not answer in time" in str(listener.failures[0].why)


def test_small_pieces_of_a_generator_keep_a_step_alive(make_bed: MakeBed) -> None:
    """A replica marks them: each is what a generator has yielded."""
    bed = make_bed({"upstream": {"stallTimeout": "1s"}})
    head = b"HTTP/1.1 200 OK\r\nx-pointsman-pieces: 1\r\ntransfer-encoding: chunked\r\n\r\n"

    def script(connection: BackendConnection) -> None:
        connection.request()
        connection.send(head)
        for _ in range(60):
            connection.send(chunk(b"x"))
            threading.Event().wait(0.03)
        connection.send(chunk(b""))

    bed.backend(script)
    _, listener = begin(bed)
    wait_for(lambda: listener.answers or listener.failures)
    assert listener.answers == [(200, b"x" * 60)]


def test_a_step_fails_at_once_if_no_instance_is_expected(bed: Bed) -> None:
    absence = Unavailable(Reason("none-wanted"), 12.0, none_expected=True)
    bed.gateway.traffic.hooks.unavailability = lambda *_: absence
    _, listener = begin(bed)
    wait_for(lambda: listener.failures)
    [failure] = listener.failures
    response = bed.fetch(chat())
    assert (failure.status, failure.retry_after_s) == (503, 12)
    assert (response.status, response.header("retry-after")) == (503, "12")
    assert response.error["reason"]["code"] == "none-expected"
    assert str(failure.why) == response.error["message"]
    assert failure.why.code == response.error["reason"]["code"]


def test_a_step_waits_while_an_instance_is_expected(bed: Bed) -> None:
    absence = Unavailable(Reason("none-wanted"), 12.0)
    bed.gateway.traffic.hooks.unavailability = lambda *_: absence
    _, listener = begin(bed)
    for _ in range(3):
        bed.thread.call(lambda: refuse_stranded(bed.lane()))
    assert (bed.waiting(), listener.failures) == (1, [])
    bed.backend()
    wait_for(lambda: listener.answers)


def test_an_engine_that_takes_no_more_is_paused_for_steps_of_models_too(bed: Bed) -> None:
    bed.backend(answers(answer({}, 429, ("retry-after: 9",))))
    _, listener = begin(bed)
    wait_for(lambda: listener.failures)
    assert (listener.failures[0].status, listener.failures[0].retry_after_s) == (429, 9)
    assert "chat-0" in bed.dispatcher().fleet.pauses
