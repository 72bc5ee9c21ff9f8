"""The product's plane on virtual time: every request ends exactly once, whatever happens to instances."""

import random
from collections import Counter

import pytest

from pointsman.config.revision import ManifestText
from pointsman.routing.routes import DispatcherSettings
from pointsman.runtimes.simulation.engines import LogEntry
from pointsman.runtimes.simulation.simulation import Simulation
from pointsman.types import Gpu, RequestMetadata, Worker

CHAT = """
deployments:
  - name: chat
    model: chat
    replicas: {replicas}
    engine: {{type: simulated, parameters: {{maxNumSeqs: 8}}}}
    scheduling: {{policy: {policy}}}
{more}
"""
SCALED = "    scaling: {min: 1, max: 4, interval: 1s, downDelay: 5s, parameters: {target: 2, lookBack: 2s}}"


def manifest(replicas: int = 2, policy: str = "fifo", more: str = "") -> ManifestText:
    text = CHAT.format(replicas=replicas, policy=policy, more=more)
    return ManifestText(text.replace("    replicas: 0\n", ""), "/")


def simulated_traffic(simulation: Simulation, count: int, seed: int, per_second: float = 20.0) -> float:
    """Requests of random lengths at random times. Returns the time of the last."""
    rng, at = random.Random(seed), simulation.clock.now()
    for number in range(count):
        at += rng.expovariate(per_second)
        request = RequestMetadata(
            f"r{number}", model_name="chat", prompt_tokens=rng.randint(10, 2000), arrival_time=at, timeout_s=600.0
        )
        simulation.clock.call_at(at, simulation.submit, request, rng.randint(1, 200))
    return at


def ends(log: list[LogEntry]) -> Counter[str]:
    return Counter(entry.request_id for entry in log if entry.what in ("served", "refused"))


def test_two_replicas_serve_every_request_once() -> None:
    simulation = Simulation(manifest())
    simulation.run_until(5.0)
    assert simulation.plane.ready
    last = simulated_traffic(simulation, 400, seed=1)
    simulation.run_until(last + 300.0)
    assert ends(simulation.log) == Counter({f"r{number}": 1 for number in range(400)})
    assert {entry.what for entry in simulation.log} == {"sent", "first-token", "served"}
    used = Counter(entry.where for entry in simulation.log if entry.what == "sent")
    assert used.keys() == {"chat-1", "chat-2"}
    assert min(used.values()) > 100
    assert simulation.plane.status()["deployments"][0]["running"] == 0
    times = [entry.at for entry in simulation.log]
    assert times == sorted(times)


@pytest.mark.parametrize("policy", ["fifo", "slo-aware", "adaptive"])
def test_a_killed_instance_fails_each_of_its_requests_once_and_those_not_begun_go_elsewhere(policy: str) -> None:
    simulation = Simulation(manifest(policy=policy))
    simulation.run_until(5.0)
    simulated_traffic(simulation, 300, seed=2, per_second=60.0)
    simulation.run_until(8.0)
    simulation.runtime.processes.crash("chat-1")
    failed = [entry for entry in simulation.log if entry.what == "failed"]
    assert failed
    assert {entry.where for entry in failed} == {"chat-1"}
    assert len({entry.request_id for entry in failed}) == len(failed)
    simulation.run_until(600.0)
    assert ends(simulation.log) == Counter({f"r{number}": 1 for number in range(300)})
    begun = {entry.request_id for entry in simulation.log if entry.what == "first-token" and entry.at <= 8.0}
    refused = {entry.request_id for entry in simulation.log if entry.what == "refused"}
    assert refused == {entry.request_id for entry in failed} & begun, "an answer that has begun cannot be sent again"
    again = {entry.where for entry in simulation.log if entry.what == "sent" and entry.at > 20.0}
    assert again <= {"chat-1", "chat-2"}
    assert simulation.plane.status()["deployments"][0]["ready"] == 2, "its process was started again"


def rough_hour(seed: int) -> list[LogEntry]:
    simulation = Simulation(manifest(3), settings=DispatcherSettings(seed=seed), stop_s=0.5)
    rng = random.Random(seed)
    last = simulated_traffic(simulation, 500, seed, per_second=25.0)
    crash = simulation.runtime.processes.crash
    for _ in range(6):
        simulation.clock.call_at(rng.uniform(3.0, last / 2), crash, f"chat-{rng.randint(1, 3)}")
    simulation.run_until(last / 2)
    simulation.apply(manifest(2, "priority"))
    simulation.run_until(last + 600.0)
    assert set(ends(simulation.log).values()) == {1}
    assert len(ends(simulation.log)) == 500
    return simulation.log


def test_the_same_seed_gives_the_same_log() -> None:
    assert rough_hour(3) == rough_hour(3)
    assert rough_hour(3) != rough_hour(4)


def test_scaling_policies_are_called_on_virtual_time() -> None:
    simulation = Simulation(manifest(0, more=SCALED))
    simulation.run_until(5.0)
    assert simulation.plane.status()["deployments"][0]["ready"] == 1
    last = simulated_traffic(simulation, 600, seed=5, per_second=30.0)
    simulation.run_until(last)
    assert simulation.plane.status()["deployments"][0]["ready"] == 4
    simulation.run_until(last + 120.0)
    assert simulation.plane.status()["deployments"][0]["ready"] == 1
    assert set(ends(simulation.log).values()) == {1}
    assert [one["after"] for one in simulation.plane.scaling.status("chat")["records"]][-1] == 1


def test_parameters_of_simulated_engines_set_their_pace() -> None:
    def first_token_s(parameters: str) -> float:
        text = manifest(1).text.replace("{maxNumSeqs: 8}", parameters)
        simulation = Simulation(ManifestText(text, "/"))
        simulation.run_until(5.0)
        simulation.submit(RequestMetadata("r", model_name="chat", prompt_tokens=100), 10)
        simulation.run_until(60.0)
        return next(entry.at for entry in simulation.log if entry.what == "first-token") - 5.0

    assert first_token_s("{firstTokenMs: 250}") == pytest.approx(0.25)
    assert first_token_s('{hardware: "8B|l4|roofline|tp1"}') > 2 * first_token_s("{}")


def test_a_lost_worker_takes_its_instances_along_and_they_come_back_elsewhere() -> None:
    text = manifest(2).text + "    placement: {resources: {gpus: 0, memory: 6Gi}}\n"
    workers = [Worker(name=name, cpus=8, memory_bytes=8 << 30) for name in ("w1", "w2", "w3")]
    simulation = Simulation(ManifestText(text, "/"), workers)
    simulation.run_until(5.0)
    lost = host(simulation, "chat-1")
    last = simulated_traffic(simulation, 100, seed=6)
    simulation.run_until(6.0)
    simulation.runtime.workers.lose(lost, "no heartbeat")
    simulation.run_until(last + 300.0)
    assert ends(simulation.log) == Counter({f"r{number}": 1 for number in range(100)})
    assert host(simulation, "chat-1") != lost


def host(simulation: Simulation, instance_id: str) -> str:
    process = simulation.runtime.processes.get(instance_id)
    assert process is not None
    return process.host


def test_costs_come_from_the_gpus_of_places_and_the_prices_of_workers() -> None:
    gpus = tuple(Gpu(index=index, memory_bytes=80 * 2**30) for index in range(2))
    workers = [
        Worker(name=name, cpus=64, memory_bytes=512 * 2**30, gpus=gpus, price_per_gpu_hour=price)
        for name, price in (("dear", 90.0), ("cheap", 9.0))
    ]
    placement = "    placement: {resources: {gpus: 2, gpuMemory: 60Gi}}"
    simulation = Simulation(manifest(2, "cost-optimized", more=placement), workers)
    simulation.run_until(5.0)
    [deployment] = simulation.plane.status()["deployments"]
    found = {one["price_per_hour"]: one for one in deployment["instances"]}
    assert found.keys() == {180.0, 18.0}
    for price, one in found.items():
        assert (one["gpus"], one["tensor_parallel_size"], one["tokens_per_second"]) == (2, 2, 2000.0)
        assert one["cost_per_million_tokens"] == pytest.approx(price / 3600 / 2000 * 1e6)

    def send(name: str, budget: float) -> list[tuple[str, str]]:
        request = RequestMetadata(name, model_name="chat", prompt_tokens=100, max_tokens=100, cost_budget=budget)
        simulation.submit(request, 1)
        simulation.run_until(simulation.clock.now() + 30.0)
        return [(entry.what, entry.where) for entry in simulation.log if entry.request_id == name]

    cheap = found[18.0]["id"]
    assert send("enough", 0.01)[0] == ("sent", cheap)
    assert [what for what, _ in send("too-little", 0.00001)] == ["refused"]
