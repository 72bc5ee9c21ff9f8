"""Faults as data; under any of them no request is lost or ends twice, and the same seed gives the same log."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from bench.soak_simulation import soak
from pointsman.errors import PointsmanError
from pointsman.runtimes.simulation.faults import FaultInjector, HangInstance, KillInstance, RandomFaults, read_faults
from pointsman.runtimes.simulation.simulation import SimulatedArrival, Simulation
from pointsman.types import RequestMetadata
from tests.runtimes.simulation.test_simulation import ends, manifest

DOCUMENT = """
faults:
  - {kind: kill, at: 12, instance: chat-1}
  - {kind: slow-down, at: 5, factor: 3, seconds: 10}
random: {count: 4, begin: 10, end: 20, kinds: [hang, lose-metrics]}
"""


def arrivals(count: int, seed: int, gateways: int = 1) -> list[SimulatedArrival]:
    rng, at, found = random.Random(seed), 5.0, []
    for number in range(count):
        at += rng.expovariate(20.0)
        request = RequestMetadata(
            f"r{number}", model_name="chat", prompt_tokens=rng.randint(1, 2000), arrival_time=at, timeout_s=100.0
        )
        found.append(SimulatedArrival(at, request, rng.randint(1, 200), (), rng.randrange(gateways)))
    return found


def test_a_document_gives_faults_in_the_order_of_their_times() -> None:
    drawn = read_faults(DOCUMENT).drawn(seed=1)
    assert [one.at for one in drawn] == sorted(one.at for one in drawn)
    assert Counter(type(one).__struct_config__.tag in ("hang", "lose-metrics") for one in drawn) == {True: 4, False: 2}
    assert KillInstance(at=12, instance="chat-1") in drawn
    assert drawn == read_faults(DOCUMENT).drawn(seed=1) != read_faults(DOCUMENT).drawn(seed=2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("faults: [{kind: explode, at: 1}]", "explode"),
        ("faults: [{kind: kill, at: -1}]", "at"),
        ("faults: [{kind: kill, at: 1, instanse: chat-1}]", "instanse"),
        ("random: {count: 0, end: 5}", "count"),
        ("faults: [", "faults"),
    ],
)
def test_mistakes_are_reported(text: str, why: str) -> None:
    with pytest.raises(PointsmanError, match=why):
        read_faults(text)


def log_of(seed: int) -> bytes:
    simulation = Simulation(manifest(3), gateways=2, stop_s=0.5)
    injector = FaultInjector(simulation, seed)
    injector.schedule(RandomFaults(20, end=20.0, begin=5.0).drawn(random.Random(seed)))
    simulation.play(arrivals(300, seed, gateways=2))
    assert simulation.run(900.0)
    assert ends(simulation.log) == Counter({f"r{number}": 1 for number in range(300)})
    assert injector.happened.total() > 10
    return "\n".join(map(repr, simulation.log)).encode()


def test_the_same_seed_gives_the_same_bytes() -> None:
    first = log_of(1)
    assert first == log_of(1)
    assert first != log_of(2)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_or_doubled_or_left_behind(seed: int) -> None:
    run = soak(seed, requests=300, faults=20)
    assert run.wrong == []
    assert run.ends.total() == 300
    assert run.happened.total() > 5


def test_a_short_hang_delays_an_answer_by_its_length() -> None:
    def served_at(*faults: HangInstance) -> float:
        simulation = Simulation(manifest(1))
        FaultInjector(simulation).schedule(faults)
        request = RequestMetadata("r", model_name="chat", prompt_tokens=100, arrival_time=5.0)
        simulation.play([SimulatedArrival(5.0, request, 200)])
        assert simulation.run(100.0)
        return simulation.log[-1].at

    assert served_at(HangInstance(at=5.5, seconds=3.0)) == pytest.approx(served_at() + 3.0)


def test_a_long_hang_is_noticed_and_the_instance_is_replaced() -> None:
    simulation = Simulation(manifest(2))
    injector = FaultInjector(simulation)
    injector.schedule([HangInstance(at=6.0, seconds=500.0, instance="chat-1")])
    simulation.play(arrivals(200, seed=3))
    assert simulation.run(900.0)
    assert ends(simulation.log) == Counter({f"r{number}": 1 for number in range(200)})
    last = max(entry.at for entry in simulation.log)
    assert last < 200.0
    simulation.run_until(last + 60.0)
    assert simulation.plane.status()["deployments"][0]["ready"] == 2


def test_arrivals_are_taken_one_by_one() -> None:
    simulation, coming, taken = Simulation(manifest(1)), arrivals(50, seed=4), list[str]()

    def counted() -> Iterator[SimulatedArrival]:
        for one in coming:
            taken.append(one.request.request_id)
            yield one

    simulation.play(counted())
    simulation.run_until(coming[10].at)
    assert len(taken) == 12, "those that have arrived, and the next"


def test_a_listener_replaces_the_log() -> None:
    seen: list[str] = []
    simulation = Simulation(manifest(1), listener=lambda _at, what, _one, _where: seen.append(what))
    simulation.play(arrivals(20, seed=5))
    assert simulation.run(300.0)
    assert Counter(seen) == {"sent": 20, "first-token": 20, "served": 20}
    assert simulation.log == []
