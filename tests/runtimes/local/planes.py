"""Real planes on real engines, with a carrier that only remembers what it was told to send."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from pointsman.config.revision import ManifestText
from pointsman.routing.events import Arrived, Ended, Refuse, Revoke, Send
from pointsman.runtimes.local.runtime import LocalRuntime
from pointsman.runtimes.plane import Plane
from pointsman.runtimes.serving import LocalTraffic
from pointsman.runtimes.tasks import LoopClock
from pointsman.runtimes.traffic import Lane, Traffic
from pointsman.types import RequestMetadata
from tests.runtimes.local.processes import eventually

LIFECYCLE = """
    lifecycle:
      probeInterval: 100ms
      probeTimeout: 400ms
      drainTimeout: 5s
      stopGrace: 2s
      backoff: 50ms
"""
SIMULATED = """
  - name: {name}
    model: {name}
    replicas: {replicas}
    engine:
      type: simulated
      parameters: {{maxNumSeqs: {slots}}}
"""


def simulated(name: str = "m", replicas: int = 1, slots: int = 8, more: str = "") -> str:
    """One deployment of a manifest."""
    return SIMULATED.format(name=name, replicas=replicas, slots=slots) + LIFECYCLE + more


def manifest(*deployments: str, more: str = "", folder: Path = Path("/")) -> ManifestText:
    return ManifestText("kind: Pointsman\n" + more + "deployments:" + "".join(deployments), str(folder), "test.yaml")


class Carrier:
    """A gateway without clients."""

    def __init__(self) -> None:
        self.sent: list[Send] = []

    def send(self, lane: Lane, command: Send) -> None:
        self.sent.append(command)

    def refuse(self, lane: Lane, command: Refuse) -> None:
        raise AssertionError(command)

    def revoke(self, lane: Lane, command: Revoke) -> None:
        raise AssertionError(command)


class Stage:
    """A plane, and short ways to look at it."""

    def __init__(self, plane: Plane, runtime: LocalRuntime, traffic: Traffic, carrier: Carrier) -> None:
        self.plane, self.runtime, self.traffic, self.carrier = plane, runtime, traffic, carrier

    def instances(self, deployment: str = "") -> dict[str, dict[str, Any]]:
        return {
            instance["id"]: instance
            for one in self.plane.status()["deployments"]
            if deployment in ("", one["name"])
            for instance in one["instances"]
        }

    def ready(self) -> set[str]:
        return {name for name, instance in self.instances().items() if instance["phase"] == "ready"}

    def pids(self) -> dict[str, int]:
        return {name: int(one["process"]) for name, one in self.instances().items() if one["process"] is not None}

    async def until_ready(self, *names: str) -> None:
        await self.until(lambda: self.ready() == set(names), f"{names} ready")

    async def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            await eventually(condition, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.plane.status()}") from None

    def request(self, name: str, model: str = "m") -> None:
        self.traffic.by_model[model].tell(Arrived((RequestMetadata(name, model_name=model),)))

    def end(self, name: str, deployment: str = "m") -> None:
        lane = self.traffic.lanes.get(deployment) or self.traffic._closing[deployment]
        sent = next(one for one in self.carrier.sent if one.request.request_id == name)
        lane.tell(Ended(name, 1))
        lane.worked(sent.decision.target_instance_id)


def stage(state: Path, **settings: Any) -> Stage:
    """A plane that was not started yet."""
    carrier = Carrier()
    traffic = Traffic(LoopClock(asyncio.get_running_loop()), carrier)
    clock = settings.pop("clock", time.time)
    runtime = LocalRuntime(state, scrape_interval_s=0.1, **settings)
    return Stage(Plane(runtime, LocalTraffic(traffic), clock=clock), runtime, traffic, carrier)


@asynccontextmanager
async def running(state: Path, wanted: ManifestText | None, **settings: Any) -> AsyncIterator[Stage]:
    made = stage(state, **settings)
    await made.plane.start(wanted)
    try:
        yield made
    finally:
        await made.plane.stop()


def run(story: Coroutine[Any, Any, None]) -> None:
    """On the event loop of the product."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story)
