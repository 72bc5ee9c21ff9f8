"""Policies, instances and deployments that change while requests are in flight: no client notices."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from tests.gateway.backends import DONE, LAST_CHUNK, OK, STREAM, Gate, Line, chunk, event, stream
from tests.gateway.bed import CHAT_DEPLOYMENT, Bed, Lay, plan_of
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


def lively(line: Line) -> None:
    while (request := line.request()) is not None:
        line.send(STREAMED if b'"stream": true' in request.body else OK)


class Crowd:
    """Clients that send requests continuously."""

    def __init__(self, bed: Bed, model: str, number: int) -> None:
        self.answers: list[Message] = []
        self.trouble: list[BaseException] = []
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
                self.answers.append(client.ask(chat(model=self._model, stream=bool(turn % 2))))
                turn += 1
        except BaseException as error:
            self.trouble.append(error)

    def leave(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def crowd(bed: Bed, model: str = "m", number: int = 4) -> Iterator[Crowd]:
    asking = Crowd(bed, model, number)
    try:
        wait_for(lambda: len(asking.answers) > 20 or asking.trouble)
        yield asking
        so_far = len(asking.answers)
        wait_for(lambda: len(asking.answers) > so_far + 20 or asking.trouble)
    finally:
        asking.leave()
    assert asking.trouble == []
    assert {answer.status for answer in asking.answers} == {200}
    for answer in asking.answers:
        assert answer.body in (OK.partition(b"\r\n\r\n")[2], b"".join(unframed(STREAMED)))


def unframed(said: bytes) -> Iterator[bytes]:
    rest = said.partition(b"\r\n\r\n")[2]
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
        bed.backend(lively, max_concurrency=2)
    with crowd(bed) as asking:
        for turn in range(40):
            configure(bed, {**CHAT_DEPLOYMENT, "scheduling": POLICIES[turn % len(POLICIES)]})
    assert bed.dispatcher().counters.outcomes == {"served": len(asking.answers)}
    assert bed.dispatcher().counters.arrived == len(asking.answers)
    strategies = {record.strategy for record in bed.dispatcher().records.newest()}
    assert len(strategies) > 2


def test_policies_change_while_streams_run_and_requests_wait(bed: Bed) -> None:
    """One seat: a stream has it, and three requests wait."""
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
        assert client.answer().events()[-1] == DONE[:-2]
    assert bed.dispatcher().counters.outcomes == {"served": 4}


def test_instances_join_and_leave_under_load(bed: Bed) -> None:
    bed.backend(lively)
    with crowd(bed):
        for turn in range(20):
            bed.backend(lively, instance_id=f"guest-{turn}")
            seen = len(bed.dispatcher().records)
            wait_for(lambda seen=seen: len(bed.dispatcher().records) > seen + 5)  # type: ignore[misc]
            name = f"guest-{turn}"
            idle = threading.Event()
            bed.thread.call(lambda name=name: bed.gateway.traffic.update("chat", closed(bed, name)))  # type: ignore[misc]
            bed.thread.call(lambda name=name, idle=idle: bed.gateway.traffic.when_idle("chat", name, idle.set))  # type: ignore[misc]
            assert idle.wait(20)
            bed.thread.call(lambda name=name: bed.gateway.traffic.withdraw("chat", name, "stopped"))  # type: ignore[misc]


def closed(bed: Bed, name: str) -> Any:
    return msgspec.structs.replace(bed.dispatcher().fleet[name].instance, can_accept_request=False)


def test_a_deployment_is_removed_under_load(lay: Lay) -> None:
    """Earlier requests are served; later ones are answered that there is no such model."""
    bed = lay({}, CHAT_DEPLOYMENT, SECOND)
    bed.backend(lively)
    gate = Gate()
    backend = bed.backend(gate, deployment="second", max_concurrency=1)
    idle = threading.Event()
    clients = [bed.client() for _ in range(5)]
    with crowd(bed):
        for client in clients:
            client.send(chat(model="n"))
        wait_for(lambda: len(bed.dispatcher("second")) == 5)
        configure(bed, CHAT_DEPLOYMENT)
        bed.thread.call(lambda: bed.gateway.traffic.when_idle("second", "second-0", idle.set))
        assert bed.ask(chat(model="n")).status == 404
        assert not idle.is_set()
        gate.open()
        assert [client.answer().status for client in clients] == [200] * 5
        assert idle.wait(20)
        bed.thread.call(lambda: bed.gateway.traffic.withdraw("second", "second-0", "stopped"))
    assert len(backend.received) == 5
    assert [lane.plan.name for lane in bed.gateway.traffic.all_lanes()] == ["chat"]


def test_a_request_that_waits_for_a_removed_deployment_is_refused(lay: Lay) -> None:
    bed = lay({}, CHAT_DEPLOYMENT, SECOND)
    client = bed.client()
    client.send(chat("x-request-id: it", model="n"))
    wait_for(lambda: len(bed.dispatcher("second")) == 1)
    configure(bed, CHAT_DEPLOYMENT)
    got = client.answer()
    assert got.status == 503
    assert "second" in got.error["message"]
    assert client.stays_open()


def test_a_draining_deployment_is_idle_when_its_last_waiting_request_times_out(lay: Lay) -> None:
    bed = lay({}, CHAT_DEPLOYMENT, SECOND)
    bed.backend(deployment="second", max_concurrency=1, current_load=1)
    idle = threading.Event()
    client = bed.client()
    client.send(chat("x-pointsman-timeout-s: 0.1", model="n"))
    wait_for(lambda: len(bed.dispatcher("second")) == 1)
    configure(bed, CHAT_DEPLOYMENT)
    bed.thread.call(lambda: bed.gateway.traffic.when_idle("second", "second-0", idle.set))
    assert client.answer().status == 429
    assert idle.wait(5)
