"""One script on every runtime, with the same outcomes: on virtual time, on this machine, and on a cluster."""

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import pytest

from bench.chaos.planes import LivePlane
from pointsman.config.revision import ManifestText
from pointsman.runtimes.plane import Plane
from pointsman.runtimes.serving import LocalTraffic
from pointsman.runtimes.simulation.simulation import Simulation, VirtualPolicies, _completed
from pointsman.runtimes.traffic import Traffic
from pointsman.types import RequestMetadata, Worker
from tests.live.manifests import manifest, simulated
from tests.live.ray_clusters import HOSTS, LONG_S, LiveCluster

LITTLE = {"resources": {"gpus": 0, "memory": "1Mi"}}


def wanted(replicas: int, tokens_per_second: int = 200) -> str:
    parameters = {"tokensPerSecond": tokens_per_second}
    return manifest(simulated("m", replicas, placement=LITTLE, parameters=parameters))


class World(Protocol):
    """A plane on a runtime, and what may happen to it."""

    def up(self, manifest: str) -> None: ...
    def apply(self, manifest: str) -> None: ...
    def roll_back(self) -> None: ...
    def restart(self) -> None:
        """The plane is killed, and started again."""

    def instances(self) -> dict[str, dict[str, Any]]: ...
    def until(self, condition: Callable[[], object], what: str) -> None: ...
    def serve(self, number: int) -> set[str]:
        """Send requests. The instances that served them."""

    def kill(self, instance_id: str) -> None: ...
    def drain(self, instance_id: str) -> None: ...
    def lose(self) -> set[str]:
        """Lose a worker that runs something. The instances that ran there."""

    def left(self) -> int:
        """Processes of engines."""


class Outcome(NamedTuple):
    step: str
    ready: int
    """Instances in service afterwards."""
    replaced: bool = True
    """The processes that the step is about are gone."""
    spared: bool = True
    """All others are the same as before."""
    served: bool = True
    """Requests were served, by these instances only."""


EXPECTED = [
    Outcome("deploy", 2),
    Outcome("scale", 3),
    Outcome("upgrade", 3),
    Outcome("roll back", 3),
    Outcome("kill an instance", 3),
    Outcome("drain an instance", 3),
    Outcome("lose a worker", 3),
    Outcome("restart the plane", 3),
    Outcome("delete", 0),
]


def script(world: World) -> list[Outcome]:
    outcomes: list[Outcome] = []
    before: dict[str, Any] = {}

    def processes() -> dict[str, Any]:
        return {name: one["process"] for name, one in world.instances().items() if one["phase"] == "ready"}

    def are_gone(about: Iterable[str], now: dict[str, Any]) -> bool:
        return all(before[name] not in now.values() for name in about)

    def is_settled(number: int, about: Iterable[str]) -> bool:
        """As many are in service, nothing else is there, and nothing is left of those that the step is about."""
        now = processes()
        return len(now) == len(world.instances()) == number and are_gone(about, now)

    def step(name: str, number: int, about: Iterable[str] = ()) -> None:
        """`about`: instances whose processes this step ends."""
        world.until(lambda: is_settled(number, about), f"{name}: {number} instances; {world.instances()}")
        now = processes()
        spared = all(process in now.values() for one, process in before.items() if one not in about)
        served = not number or world.serve(8) <= now.keys()
        outcomes.append(Outcome(name, len(now), are_gone(about, now), spared, served))
        before.clear()
        before.update(now)

    world.up(wanted(2))
    step("deploy", 2)
    world.apply(wanted(3))
    step("scale", 3)
    world.apply(wanted(3, tokens_per_second=300))
    step("upgrade", 3, {*before})
    world.roll_back()
    step("roll back", 3, {*before})
    first = min(before)
    world.kill(first)
    step("kill an instance", 3, {first})
    first = min(before)
    world.drain(first)
    step("drain an instance", 3, {first})
    step("lose a worker", 3, world.lose())
    world.restart()
    step("restart the plane", 3)
    world.apply(manifest())
    step("delete", 0, {*before})
    assert world.left() == 0
    return outcomes


class SimulatedWorld:
    def __init__(self) -> None:
        self._count = 0
        self._workers = [Worker(name=name, cpus=4, memory_bytes=2**33) for name in ("w1", "w2")]

    def up(self, manifest: str) -> None:
        self.simulation = Simulation(_document(manifest), self._workers)
        self.plane = self.simulation.plane

    def apply(self, manifest: str) -> None:
        asyncio.run(self.plane.documents.apply(_document(manifest)))

    def roll_back(self) -> None:
        asyncio.run(self.plane.documents.restore(None))

    def restart(self) -> None:
        made, old = self.simulation, self.plane
        assert old._looking is not None
        old._looking.cancel()
        old.scaling.close()
        old.control.stop_timer()
        made.traffic = Traffic(made.clock, made.engines)
        made.traffic.hooks.gone = partial(made.engines.forget, made.traffic.hooks)
        policies = partial(VirtualPolicies, made.clock)
        self.plane = made.plane = Plane(
            made.runtime, LocalTraffic(made.traffic), clock=made.clock.now, policies=policies
        )
        _completed(self.plane.start(None))

    def instances(self) -> dict[str, dict[str, Any]]:
        return {one["id"]: one for deployment in self.plane.status()["deployments"] for one in deployment["instances"]}

    def until(self, condition: Callable[[], object], what: str) -> None:
        clock = self.simulation.clock
        limit = clock.now() + 600.0
        while not condition():
            assert clock.now() < limit, what
            clock.run_until(clock.now() + 0.1)

    def serve(self, number: int) -> set[str]:
        made, first = self.simulation, self._count
        self._count += number
        for one in range(first, self._count):
            request = RequestMetadata(f"r{one}", model_name="m", prompt_tokens=10, arrival_time=made.clock.now())
            made.submit(request, output_tokens=5)
        names = {f"r{one}" for one in range(first, self._count)}

        def served() -> dict[str, str]:
            return {one.request_id: one.where for one in made.log if one.what == "served" and one.request_id in names}

        self.until(lambda: len(served()) == number, "all are served")
        return set(served().values())

    def kill(self, instance_id: str) -> None:
        self.simulation.runtime.processes.crash(instance_id)

    def drain(self, instance_id: str) -> None:
        self.plane.control.drain(instance_id)

    def lose(self) -> set[str]:
        places = {name: str(one["place"]).partition(":")[0] for name, one in self.instances().items()}
        worker = min(places.values())
        self.simulation.runtime.workers.lose(worker, "its power failed")
        return {name for name, place in places.items() if place == worker}

    def left(self) -> int:
        return len(self.simulation.runtime.processes.all())


class LiveWorld:
    def __init__(self, plane: LivePlane, cluster: LiveCluster | None = None) -> None:
        self.plane, self.cluster = plane, cluster
        self.instances, self.until = plane.instances, plane.until

    def up(self, manifest: str) -> None:
        self.plane.up(manifest)

    def apply(self, manifest: str) -> None:
        self._run("apply", self.plane.write(manifest), "--no-wait", "--yes")

    def roll_back(self) -> None:
        self._run("rollback", "--no-wait", "--yes")

    def restart(self) -> None:
        self.plane.kill()
        self.plane.up()

    def serve(self, number: int) -> set[str]:
        body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 5}).encode()
        url, kind = f"{self.plane.url}/v1/completions", {"content-type": "application/json"}
        served = set()
        for _ in range(number):
            with urllib.request.urlopen(urllib.request.Request(url, body, kind), timeout=30) as answer:
                served.add(answer.headers["x-pointsman-instance"])
        return served

    def kill(self, instance_id: str) -> None:
        os.kill(int(self.instances()[instance_id]["process"]), signal.SIGKILL)

    def drain(self, instance_id: str) -> None:
        self._run("drain", instance_id)

    def lose(self) -> set[str]:
        instances = self.instances()
        if self.cluster is None:  # the only worker is what runs under the supervisor
            [supervisor] = self.plane.supervisors()
            os.kill(supervisor, signal.SIGKILL)
            return {*instances}
        lost = {name for name, one in instances.items() if urlsplit(one["url"]).hostname == HOSTS[1]}
        assert lost, instances
        os.kill(self.cluster.raylet(HOSTS[1]), signal.SIGKILL)
        return lost

    def left(self) -> int:
        here = self.plane.processes() if self.cluster is None else self.cluster.processes()
        return sum("pointsman.simulator" in command for command in here.values())

    def _run(self, *command: str | Path) -> None:
        done = self.plane.pointsman(str(command[0]), *command[1:])
        assert done.returncode == 0, done.stderr


def _document(manifest: str) -> ManifestText:
    return ManifestText(manifest, "/", "manifest.yaml")


@contextmanager
def simulation(folder: Path) -> Iterator[World]:
    yield SimulatedWorld()


@contextmanager
def local(folder: Path) -> Iterator[World]:
    plane = LivePlane(folder)
    try:
        yield LiveWorld(plane)
    finally:
        plane.close()


@contextmanager
def ray(folder: Path) -> Iterator[World]:
    pytest.importorskip("ray")
    with LiveCluster(folder, HOSTS[:2]) as cluster:
        plane = LivePlane(folder, patience_s=LONG_S)
        plane.environment |= cluster.environment
        plane.flags = ["--runtime", "ray", "--address", cluster.address]
        try:
            yield LiveWorld(plane, cluster)
        finally:
            plane.close()


@pytest.mark.parametrize("runtime", [simulation, local, pytest.param(ray, marks=pytest.mark.ray)])
def test_the_same_script_has_the_same_outcomes(runtime: Any, tmp_path: Path) -> None:
    with runtime(tmp_path) as world:
        assert script(world) == EXPECTED
