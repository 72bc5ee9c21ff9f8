"""Several gateways of one plane on virtual time: they do nearly as well as one, and no drain cuts a request off."""

import random
from collections import Counter
from typing import NamedTuple

import pytest

from pointsman.config.revision import ManifestText
from pointsman.routing.endpoints import IN_FLIGHT_REQUESTS
from pointsman.routing.routes import DispatcherSettings
from pointsman.runtimes.simulation.simulation import Simulation
from pointsman.types import RequestMetadata
from tests.runtimes.simulation.test_simulation import ends, manifest

WORKLOAD = """
deployments:
  - name: chat
    model: chat
    replicas: 8
    engine: {type: simulated, parameters: {maxNumSeqs: 32}}
"""
BLOCK = 64 * 4
"""Characters that are hashed as one block."""


DEADLINE_MS = 800.0
"""Some requests miss it: those with long answers, and those that wait for others."""


class Outcome(NamedTuple):
    hit_rate: float
    attainment: float
    served: int


def shared_prefixes(gateways: int, *, cut: bool = False, requests: int = 3000) -> Outcome:
    """Conversations with long common beginnings: the share of prompt tokens found in caches, and of deadlines met."""
    simulation = Simulation(ManifestText(WORKLOAD, "/"), gateways=gateways, settings=DispatcherSettings(seed=1))
    simulation.run_until(5.0)
    if cut and simulation.gateways is not None:
        for one in simulation.gateways.each:
            one.cut_off()
    rng, at = random.Random(7), 5.0
    topics = [f"{number:04d}" * (BLOCK // 4) * 24 for number in range(60)]
    for number in range(requests):
        at += rng.expovariate(90.0)
        topic = rng.randrange(len(topics))
        prompt = topics[topic] + f"{number:08d}" * (BLOCK // 8) * 2
        request = RequestMetadata(
            f"r{number}", prompt, model_name="chat", arrival_time=at, timeout_s=600.0, slo_deadline_ms=DEADLINE_MS
        )
        hashes = [topic * 1000 + block for block in range(96)] + [10**7 + number * 10 + block for block in range(8)]
        simulation.clock.call_at(at, simulation.submit, request, rng.randint(20, 120), hashes, number % gateways)
    simulation.run_until(at + 120.0)
    assert ends(simulation.log) == Counter({f"r{number}": 1 for number in range(requests)})
    lanes = [simulation.traffic.lanes["chat"]]
    if simulation.gateways is not None:
        lanes = [one.traffic.lanes["chat"] for one in simulation.gateways.each]
    records = [record for lane in lanes for record in lane.dispatcher.records.newest()]
    cached = sum(record.cached_tokens or 0 for record in records)
    met = sum(bool(record.met_deadline) for record in records)
    served = sum(record.state == "served" for record in records)
    return Outcome(cached / sum(record.input_tokens for record in records), met / requests, served)


def test_two_and_four_gateways_do_nearly_as_well_as_one() -> None:
    one = shared_prefixes(1)
    print(f"\n1 gateway: hit rate {one.hit_rate:.3f}, attainment {one.attainment:.3f}")
    assert one.hit_rate > 0.5
    for number in (2, 4):
        several = shared_prefixes(number)
        print(f"{number} gateways: hit rate {several.hit_rate:.3f}, attainment {several.attainment:.3f}")
        assert several.hit_rate >= 0.95 * one.hit_rate
        assert several.attainment >= 0.95 * one.attainment
    alone = shared_prefixes(4, cut=True)
    print(f"4 gateways, cut off: hit rate {alone.hit_rate:.3f}, attainment {alone.attainment:.3f}")
    assert alone.served == one.served


@pytest.mark.parametrize("seed", range(4))
def test_no_drain_and_no_scaling_down_cuts_a_request_off(seed: int) -> None:
    simulation = Simulation(manifest(replicas=4), gateways=3, settings=DispatcherSettings(seed=seed))
    simulation.run_until(5.0)
    rng, at = random.Random(seed), 5.0
    for number in range(600):
        at += rng.expovariate(40.0)
        request = RequestMetadata(f"r{number}", model_name="chat", prompt_tokens=100, arrival_time=at, timeout_s=600.0)
        simulation.clock.call_at(at, simulation.submit, request, rng.randint(10, 300), (), rng.randrange(3))
    simulation.run_until(8.0)
    simulation.plane.control.drain("chat-1")
    simulation.run_until(11.0)
    simulation.apply(manifest(replicas=1))
    simulation.run_until(at + 300.0)
    assert ends(simulation.log) == Counter({f"r{number}": 1 for number in range(600)})
    assert {entry.what for entry in simulation.log} == {"sent", "first-token", "served"}, "none failed or was refused"
    assert len(simulation.plane.control.controller.instances()) == 1


def test_a_gateway_that_is_not_connected_holds_a_drain_until_it_is_back() -> None:
    simulation = Simulation(manifest(replicas=2), gateways=2)
    simulation.run_until(5.0)
    assert simulation.gateways is not None
    first = simulation.gateways.each[0]
    lane = first.traffic.lanes["chat"]
    for number in range(4):
        request = RequestMetadata(f"r{number}", model_name="chat", prompt_tokens=100, arrival_time=5.0, timeout_s=600.0)
        simulation.submit(request, 2000, (), 0)
    first.cut_off()
    simulation.plane.control.drain("chat-1")
    simulation.run_until(6.0)
    on_it = lane.dispatcher.fleet.load.columns[IN_FLIGHT_REQUESTS][lane.dispatcher.fleet["chat-1"].row]
    assert on_it > 0
    assert "chat-1" in {one.id for one in simulation.plane.control.controller.instances()}
    first.connect()
    simulation.run_until(200.0)
    assert "chat-1" not in {one.id for one in simulation.plane.control.controller.instances()}
    assert {entry.what for entry in simulation.log} == {"sent", "first-token", "served"}


def test_what_others_have_in_flight_counts_until_they_are_silent_or_gone() -> None:
    simulation = Simulation(manifest(replicas=1), gateways=3)
    simulation.run_until(5.0)
    assert simulation.gateways is not None
    first, second, third = simulation.gateways.each

    def seen() -> tuple[float, float]:
        return first.traffic.lanes["chat"].dispatcher.fleet["chat-1"].theirs

    for number, gateway in enumerate((1, 1, 2)):
        request = RequestMetadata(f"r{number}", model_name="chat", prompt_tokens=100, arrival_time=5.0, timeout_s=600.0)
        simulation.submit(request, 50_000, (), gateway)
    simulation.run_until(5.5)
    assert seen()[0] == 3
    load = simulation.plane.status()["deployments"][0]
    assert load["running"] == 3
    third.end()
    simulation.run_until(5.6)
    assert seen()[0] == 2
    second.is_cut_off = True
    simulation.run_until(7.0)
    assert seen()[0] == 2, "it may be late"
    simulation.run_until(10.0)
    assert seen()[0] == 0
    second.connect()
    simulation.run_until(10.5)
    assert seen()[0] == 2
