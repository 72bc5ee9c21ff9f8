"""Policies, instances and deployments change under load without effect on clients."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from pointsman.reasons import Reason
from tests.gateway.backends import DONE, LAST_CHUNK, OK, STREAM, BackendConnection, Gate, chunk, event, stream
from tests.gateway.bed import CHAT_DEPLOYMENT, Bed, MakeBed, plan_of
from tests.gateway.wire import Message, chat, wait_for

STREAMED = stream(*(event(number) for number in range(5)), DONE)
SECOND = {"name": "second", "model": "n", "endpoints": [{"url": "http://127.0.0.1:1"}]}
PICKER = {
    "config": {
        "plugins": [{"type": "round-robin-fairness-policy"}, {"type": "queue-scorer"}],
        "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "queue-scorer"}]}],
    }
}
POLICIES: list[dict[str, Any]] = [
    {"policy": "fifo"}, {"policy": "priority"}, PICKER, {"policy": "slo-aware"}, {"policy": "adaptive"},
    {"policy": "cost-optimized"},
]  # fmt: skip


def stream_or_answer(connection: BackendConnection) -> None:
    while (request := connection.request()) is not None:
        connection.send(STREAMED if b'"stream": true' in request.body else OK)


class Clients:
    """Clients that send requests continuously."""

    def __init__(self, bed: Bed, model: str, number: int) -> None:
        self.answers: list[Message] = []
        self.errors: list[BaseException] = []
        self._bed = bed
        self._model = model
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(turn,)) for turn in range(number)]
        for thread in self._threads:
            thread.start()

    def _ask(self, turn: int) -> None:
        client = self._bed.client()
        try:
            while not self._over.is_set():
                self.answers.append(client.fetch(chat(model=self._model, stream=bool(turn % 2))))
                turn += 1
        except BaseException as error:
            self.errors.append(error)

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def clients_of(bed: Bed, model: str = "m", number: int = 4) -> Iterator[Clients]:
    clients = Clients(bed, model, number)
    try:
        wait_for(lambda: len(clients.answers) > 20 or clients.errors)
        yield clients
        before = len(clients.answers)
        wait_for(lambda: len(clients.answers) > before + 20 or clients.errors)
    finally:
        clients.stop()
    assert clients.errors == []
    assert {answer.status for answer in clients.answers} == {200}
    for answer in clients.answers:
        assert answer.body in (OK.partition(b"\r\n\r\n")[2], b"".join(unframed(STREAMED)))


def unframed(response: bytes) -> Iterator[bytes]:
    rest = response.partition(b"\r\n\r\n")[2]
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            return
        yield rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]


def configure(bed: Bed, *deployments: Mapping[str, Any]) -> None:
    bed.plan = plan_of({}, *deployments)
    bed.thread.call(lambda: bed.gateway.traffic.configure(bed.plan.deployments))


def test_policies_change_under_load(bed: Bed) -> None:
    for _ in range(3):
        bed.backend(stream_or_answer, max_concurrency=2)
    with clients_of(bed) as clients:
        for turn in range(40):
            configure(bed, {**CHAT_DEPLOYMENT, "scheduling": POLICIES[turn % len(POLICIES)]})
    assert bed.dispatcher().counters.outcomes == {"served": len(clients.answers)}
    assert bed.dispatcher().counters.arrived == len(clients.answers)
    strategies = {record.strategy for record in bed.dispatcher().records.newest()}
    assert len(strategies) > 2


def test_policies_change_while_streams_run_and_requests_wait(bed: Bed) -> None:
    """One slot: a stream runs and three requests wait."""
    gate = Gate(then=chunk(event(1)) + chunk(DONE) + LAST_CHUNK, first=STREAM + chunk(event(0)))
    bed.backend(gate, max_concurrency=1)
    clients = [bed.client() for _ in range(4)]
    clients[0].send(chat("x-request-id: n0", stream=True))
    clients[0].until(b"t0")
    for number, client in enumerate(clients[1:], start=1):
        client.send(chat(f"x-request-id: n{number}", stream=True))
        wait_for(lambda waiting=number: bed.waiting() == waiting)  # type: ignore[misc]
    for policy in POLICIES:
        configure(bed, {**CHAT_DEPLOYMENT, "scheduling": policy})
        assert (bed.running(), bed.waiting()) == (1, 3)
    gate.open()
    assert clients[0].until(b"[DONE]")
    for client in clients[1:]:
        assert client.read_response().events()[-1] == DONE[:-2]
    assert bed.dispatcher().counters.outcomes == {"served": 4}


def test_instances_join_and_leave_under_load(bed: Bed) -> None:
    bed.backend(stream_or_answer)
    with clients_of(bed):
        for turn in range(20):
            bed.backend(stream_or_answer, instance_id=f"extra-{turn}")
            seen = len(bed.dispatcher().records)
            wait_for(lambda seen=seen: len(bed.dispatcher().records) > seen + 5)  # type: ignore[misc]
            name = f"extra-{turn}"
            idle = threading.Event()
            bed.thread.call(lambda name=name: bed.gateway.traffic.update("chat", closed(bed, name)))  # type: ignore[misc]
            bed.thread.call(lambda name=name, idle=idle: bed.gateway.traffic.when_idle("chat", name, idle.set))  # type: ignore[misc]
            assert idle.wait(20)
            bed.thread.call(lambda name=name: bed.gateway.traffic.withdraw("chat", name, Reason("stopped")))  # type: ignore[misc]


def closed(bed: Bed, name: str) -> Any:
    return msgspec.structs.replace(bed.dispatcher().fleet[name].instance, can_accept_request=False)


def test_a_deployment_is_removed_under_load(make_bed: MakeBed) -> None:
    """Requests in flight are completed; later ones get 404."""
    bed = make_bed({}, CHAT_DEPLOYMENT, SECOND)
    bed.backend(stream_or_answer)
    gate = Gate()
    backend = bed.backend(gate, deployment="second", max_concurrency=1)
    idle = threading.Event()
    clients = [bed.client() for _ in range(5)]
    with clients_of(bed):
        for client in clients:
            client.send(chat(model="n"))
        wait_for(lambda: len(bed.dispatcher("second")) == 5)
        configure(bed, CHAT_DEPLOYMENT)
        bed.thread.call(lambda: bed.gateway.traffic.when_idle("second", "second-0", idle.set))
        assert bed.fetch(chat(model="n")).status == 404
        assert not idle.is_set()
        gate.open()
        assert [client.read_response().status for client in clients] == [200] * 5
        assert idle.wait(20)
        bed.thread.call(lambda: bed.gateway.traffic.withdraw("second", "second-0", Reason("stopped")))
    assert len(backend.received) == 5
    assert [lane.plan.name for lane in bed.gateway.traffic.all_lanes()] == ["chat"]


def test_a_request_that_waits_for_a_removed_deployment_is_refused(make_bed: MakeBed) -> None:
    bed = make_bed({}, CHAT_DEPLOYMENT, SECOND)
    client = bed.client()
    client.send(chat("x-request-id: it", model="n"))
    wait_for(lambda: len(bed.dispatcher("second")) == 1)
    configure(bed, CHAT_DEPLOYMENT)
    got = client.read_response()
    assert got.status == 503
    assert "second" in got.error["message"]
    assert client.stays_open()


def test_a_draining_deployment_is_idle_when_its_last_waiting_request_times_out(make_bed: MakeBed) -> None:
    bed = make_bed({}, CHAT_DEPLOYMENT, SECOND)
    bed.backend(deployment="second", max_concurrency=1, current_load=1)
    idle = threading.Event()
    client = bed.client()
    client.send(chat("x-pointsman-timeout-s: 0.1", model="n"))
    wait_for(lambda: len(bed.dispatcher("second")) == 1)
    configure(bed, CHAT_DEPLOYMENT)
    bed.thread.call(lambda: bed.gateway.traffic.when_idle("second", "second-0", idle.set))
    assert client.read_response().status == 429
    assert idle.wait(5)
