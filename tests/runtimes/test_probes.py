"""Probes and scrapes: when they are made, on which connections, and what requests make of them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from pointsman.control.desired import Address
from pointsman.control.events import Answered, ControllerEvent, ProbeNotMade, Silent, WentIdle
from pointsman.engines import OpenAI, ProbeRequest, Vllm
from pointsman.routing.endpoints import Metrics
from pointsman.runtimes import probes as module
from pointsman.runtimes.instances import Evidence
from pointsman.runtimes.interface import Activity
from pointsman.runtimes.probes import (
    AT_ONCE,
    IDLE_SCRAPE_S,
    IDLE_SCRAPES_PER_S,
    HttpProbes,
    ScrapeSchedule,
)
from pointsman.runtimes.tasks import LoopClock, Tasks
from tests.runtimes.local.planes import run
from tests.runtimes.local.processes import eventually
from tests.shortages import no_descriptors

INTERVAL_S = 0.5
HEALTH = ProbeRequest("GET", "/health")
METRICS = b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\n"


# When instances are scraped


class Scraped:
    """A schedule on virtual time. Each scrape takes a millisecond."""

    def __init__(self, count: int) -> None:
        self.schedule = ScrapeSchedule(INTERVAL_S)
        self.now = 0.0
        self.busy: set[str] = set()
        self.times: list[tuple[float, str]] = []
        for number in range(count):
            self.schedule.add(f"i-{number}", self.now)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.schedule.next_due is not None and self.schedule.next_due <= end:
            self.now = max(self.now, self.schedule.next_due)
            for name in self.schedule.take(self.now):
                self.times.append((self.now, name))
                self.schedule.ended(name, self.now + 0.001, is_idle=name not in self.busy)
        self.now = end

    def of(self, name: str) -> list[float]:
        return [at for at, scraped in self.times if scraped == name]


def gaps(times: list[float]) -> list[float]:
    return [round(later - earlier, 6) for earlier, later in pairwise(times)]


def test_idle_instances_are_scraped_at_a_bounded_rate_and_not_all_at_once() -> None:
    scraped = Scraped(500)
    scraped.run(120.0)
    longest_s = 500 / IDLE_SCRAPES_PER_S
    last = [at for at, _ in scraped.times if at > 120.0 - 2 * longest_s]
    assert len(last) / (2 * longest_s) <= IDLE_SCRAPES_PER_S * 1.01
    assert max(Counter(int(at * 10) for at in last).values()) < IDLE_SCRAPES_PER_S / 2
    assert {name for at, name in scraped.times if at > 120.0 - longest_s - 0.01} == {f"i-{n}" for n in range(500)}


def test_busy_instances_are_scraped_at_every_interval_however_many_are_idle() -> None:
    scraped = Scraped(500)
    scraped.busy = {"i-7", "i-8"}
    scraped.run(60.0)
    assert set(gaps(scraped.of("i-7"))) == {INTERVAL_S}
    assert len(scraped.of("i-9")) < 30


def test_an_instance_that_becomes_idle_is_scraped_less_and_less_often() -> None:
    scraped = Scraped(1)
    scraped.busy = {"i-0"}
    scraped.run(10.0)
    scraped.busy.clear()
    before = len(scraped.times)
    scraped.run(60.0)
    found = gaps(scraped.of("i-0")[before - 1 :])
    assert found[:4] == [INTERVAL_S] * 4, "not after a moment without requests"
    assert found[-3:] == [IDLE_SCRAPE_S] * 3


def test_a_request_makes_an_idle_instance_be_scraped_soon() -> None:
    scraped = Scraped(500)
    scraped.run(60.0)
    scraped.busy = {"i-3"}
    scraped.schedule.stir("i-3", scraped.now)
    at = scraped.now
    scraped.run(2.0)
    again = [one for one in scraped.of("i-3") if one >= at]
    assert again[0] - at <= INTERVAL_S
    assert gaps(again) == [INTERVAL_S] * (len(again) - 1)
    scraped.schedule.stir("unknown", scraped.now)


def test_a_request_during_a_scrape_keeps_the_next_one_close() -> None:
    schedule = ScrapeSchedule(INTERVAL_S)
    schedule.add("i", 0.0)
    now = 0.0
    for _ in range(20):
        now = schedule.next_due or 0.0
        assert schedule.take(now) == ["i"]
        assert schedule.next_due is None, "one scrape at a time"
        schedule.ended("i", now, is_idle=True)
    now = schedule.next_due or 0.0
    schedule.take(now)
    schedule.stir("i", now)
    schedule.ended("i", now + 0.1, is_idle=False)
    assert schedule.next_due == now + INTERVAL_S
    schedule.remove("i")
    schedule.ended("i", now + 0.2, is_idle=True)
    assert schedule.next_due is None


# Requests as evidence


class Load:
    """`LoadTable` of the interface, for one instance."""

    def __init__(self) -> None:
        self.seen: Activity | None = Activity(0, 0, -inf)
        self.measurements: list[Metrics] = []
        self.rests: list[float | None] = []

    def measured(self, deployment: str, instance_id: str, metrics: Metrics, source: object) -> None:
        self.measurements.append(metrics)

    def surveyed(self, deployment: str, readings: Sequence[tuple[str, Metrics]]) -> None:
        self.measurements += [metrics for _, metrics in readings]

    def activity(self, deployment: str, instance_id: str) -> Activity | None:
        return self.seen

    def rest(self, deployment: str, instance_id: str, until: float | None = None) -> None:
        self.rests.append(until)


def test_an_instance_that_answered_a_request_needs_no_probe() -> None:
    load, told = Load(), list[ControllerEvent]()
    evidence = Evidence(load, told.append)
    assert not evidence.spares("i", "d", 0.0)
    load.seen = Activity(requests=3, in_flight=2, worked_at=1.5)
    assert evidence.spares("i", "d", 2.0)
    assert told == [Answered("i", readiness=False, ago_s=0.5)]
    assert not evidence.spares("i", "d", 3.5), "it has answered nothing since, and requests are on it"
    load.seen = Activity(requests=4, in_flight=0, worked_at=1.5)
    assert not evidence.spares("i", "d", 5.0)
    assert told[1:] == [], "a request was sent and failed meanwhile"
    assert load.rests == []
    for at in (7.0, 9.0, 11.0):
        assert not evidence.spares("i", "d", at)
    assert told[1:] == [WentIdle("i")], "once"
    assert load.rests == [None]
    load.seen = Activity(requests=5, in_flight=0, worked_at=12.0)
    assert evidence.spares("i", "d", 13.0)
    assert not evidence.spares("i", "d", 15.0)
    assert told[2:] == [Answered("i", readiness=False, ago_s=1.0), WentIdle("i")], "and again"
    evidence.forget("i")
    for at in (16.0, 16.5):
        assert not evidence.spares("i", "d", at)
    assert told[4:] == [WentIdle("i")], "and with its next process"
    load.seen = None
    assert not evidence.spares("i", "d", 17.0)
    evidence.keep([])
    load.seen = Activity(requests=5, in_flight=0, worked_at=18.0)
    assert not evidence.spares("i", "d", 19.0), "nothing is known of it any more"


# Over real connections


class Server:
    """Answers what it is told to, and counts connections and requests by path."""

    def __init__(self) -> None:
        self.connections = 0
        self.requests: Counter[str] = Counter()
        self.answer: Callable[[str], bytes | None] = lambda path: METRICS % 0 if path == "/metrics" else b"{}"
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split()[1].decode()
                self.requests[path] += 1
                body = self.answer(path)
                if body is not None:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


class Bench:
    def __init__(self, server: Server, address: Address, load: Load) -> None:
        self.server, self.address, self.load = server, address, load
        self.told: list[ControllerEvent] = []
        self.tasks = Tasks(asyncio.get_running_loop())
        clock = LoopClock(asyncio.get_running_loop())
        self.probes = HttpProbes(self.told.append, load, clock, self.tasks, 0.02)

    async def probe(self, name: str = "i", question: ProbeRequest = HEALTH, timeout_s: float = 10.0) -> ControllerEvent:
        before = len(self.told)
        self.probes.probe(name, self.address, question, False, timeout_s)
        await eventually(lambda: len(self.told) > before, "what came of a probe")
        return self.told[-1]


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    made = Bench(server, Address("127.0.0.1", listening.sockets[0].getsockname()[1], False), Load())
    try:
        yield made
        assert made.tasks.problems() == []
    finally:
        made.probes.close()
        listening.close()
        for writer in server.writers:
            writer.close()
        await asyncio.sleep(0)


def test_probes_and_scrapes_of_an_instance_in_service_share_one_connection() -> None:
    async def story() -> None:
        async with bench() as made:
            assert await made.probe() == Answered("i", readiness=False)
            assert made.server.connections == 1
            made.probes.follow("d", "i", made.address, Vllm("m"))
            await eventually(lambda: made.load.measurements, "a scrape")
            for _ in range(20):
                assert await made.probe() == Answered("i", readiness=False)
            await eventually(lambda: made.server.requests["/metrics"] > 5, "scrapes")
            assert made.server.connections <= 3, "a probe while a scrape is on takes another connection, which is kept"
            made.server.writers[-1].close()
            made.server.writers[-2].close()
            assert await made.probe() == Answered("i", readiness=False), "a connection that was closed is made anew"
            made.probes.unfollow("i")

    run(story())


def test_an_idle_instance_rests_and_a_request_has_it_scraped_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SCRAPE_S", 1000.0)

    async def story() -> None:
        async with bench() as made:
            made.probes.follow("d", "i", made.address, Vllm("m"))
            await eventually(lambda: made.load.rests, "it rests")
            assert made.load.rests[0] is not None, "and its metrics hold until the next scrape"
            before = made.server.requests["/metrics"]
            made.load.seen = Activity(requests=1, in_flight=1, worked_at=-inf)
            made.probes.stir("i")
            await eventually(lambda: made.server.requests["/metrics"] >= before + 10, "scrapes at every interval")
            made.load.seen = Activity(requests=1, in_flight=0, worked_at=1.0)
            made.server.answer = lambda path: METRICS % 1
            made.load.rests.clear()
            before = made.server.requests["/metrics"]
            await eventually(lambda: made.server.requests["/metrics"] >= before + 10, "others use it")
            assert made.load.rests == []

    run(story())


def test_metrics_that_cannot_be_read_are_a_problem_and_tried_less_often() -> None:
    async def story() -> None:
        async with bench() as made:
            made.server.answer = lambda path: b"nothing of the kind"
            made.probes.follow("d", "i", made.address, Vllm("m"))
            await eventually(lambda: made.load.rests, "it rests")
            assert set(made.load.rests) == {None}, "no metrics hold"
            [problem] = made.probes.problems()
            assert str(problem).startswith("the metrics of i could not be read")
            made.probes.follow("d", "j", made.address, OpenAI())
            made.probes.unfollow("i")
            assert made.probes.problems() == []
            assert made.load.measurements == []

    run(story())


def test_a_probe_is_answered_once_whatever_the_server_does() -> None:
    async def story() -> None:
        async with bench() as made:
            made.probes.follow("d", "i", made.address, OpenAI())
            made.server.answer = lambda path: None
            assert await made.probe(timeout_s=0.05) == Silent("i", "no answer to GET /health within 0.05 s")
            made.server.answer = lambda path: b"{}"
            assert await made.probe() == Answered("i", readiness=False), "not on the connection that hangs"
            made.server.answer = lambda path: None
            made.probes.probe("i", made.address, HEALTH, False, 10.0)
            await eventually(lambda: made.server.requests["/health"] == 3, "the probe arrives")
            made.probes.probe("i", made.address, HEALTH, True, 0.05)
            await eventually(lambda: len(made.told) == 3, "only the later one is answered")
            made.probes.probe("i", made.address, HEALTH, False, 0.05)
            made.probes.forget("i")
            await asyncio.sleep(0.1)
            assert len(made.told) == 3

    run(story())


def test_a_probe_that_cannot_be_made_is_no_evidence() -> None:
    async def story() -> None:
        async with bench() as made:
            with no_descriptors():
                told = await made.probe()
                assert isinstance(told, ProbeNotMade)
                [problem] = made.probes.problems()
                assert "1 instances could not be probed" in str(problem)
                made.probes.probe("i", made.address, HEALTH, False, 10.0)
                assert made.probes.problems() == [problem], "also while the next one is on"
                await eventually(lambda: len(made.told) == 2, "the next probe")
            assert await made.probe() == Answered("i", readiness=False)
            assert made.probes.problems() == []

    run(story())


def test_an_answer_from_a_worker_that_is_cut_off_counts_once_the_worker_answers() -> None:
    async def story() -> None:
        async with bench() as made:
            cut_off = {"i"}
            made.probes.is_out_of_reach = cut_off.__contains__
            made.probes.probe("i", made.address, HEALTH, True, 10.0)
            await eventually(lambda: "i" in made.probes._held, "the answer is held back")
            made.probes.back_in_reach()
            assert made.told == []
            cut_off.clear()
            made.probes.back_in_reach()
            made.probes.back_in_reach()
            assert made.told == [Answered("i", readiness=True)]
            cut_off.add("i")
            made.server.answer = lambda path: None
            assert isinstance(await made.probe(timeout_s=0.05), Silent), "silence counts at once"

    run(story())


def test_hundreds_of_probes_do_not_begin_in_one_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    turn = 0
    real = module.Question.begin

    def begin(question: Any) -> None:
        begun.append(turn)
        real(question)

    monkeypatch.setattr(module.Question, "begin", begin)

    async def story() -> None:
        nonlocal turn
        async with bench() as made:
            for number in range(200):
                made.probes.probe(f"i-{number}", made.address, HEALTH, False, 30.0)
            while len(made.told) < 200:
                turn += 1
                await asyncio.sleep(0)
            assert {type(event) for event in made.told} == {Answered}
        assert len(begun) == 200
        assert max(Counter(begun).values()) <= AT_ONCE

    run(story())
