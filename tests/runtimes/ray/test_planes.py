"""Planes of a cluster that come, go and are cut off, without Ray: its actors are called in this process."""

import asyncio
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.chaos.launcher import Failures, first_start_fails
from pointsman.config.plan import PointsmanPlan
from pointsman.config.revision import ManifestText
from pointsman.control.events import ControllerEvent, Launched
from pointsman.engines import LaunchSpec, Samples
from pointsman.errors import NotStored, PointsmanError
from pointsman.placement.asks import Place
from pointsman.routing.endpoints import Metrics
from pointsman.runtimes.interface import Activity, ProcessOrder
from pointsman.runtimes.machine.store import Store
from pointsman.runtimes.ray import keeper as keeper_module
from pointsman.runtimes.ray import links as links_module
from pointsman.runtimes.ray import node as node_module
from pointsman.runtimes.ray.cluster import Bookings, RayCluster, RayNode, RaySettings
from pointsman.runtimes.ray.keeper import Keeper
from pointsman.runtimes.ray.node import NodeAgent
from pointsman.runtimes.ray.runtime import RayRuntime
from pointsman.runtimes.tasks import Tasks
from tests.architecture.house import kept_in
from tests.runtimes.local.processes import eventually, is_alive

SLEEP = "import time; time.sleep(600)"


class ActorError(Exception):
    """What Ray raises for an error of an actor."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Actor:
    """An actor as one caller sees it."""

    def __init__(
        self,
        made: Any,
        is_cut_off: Callable[[], bool] = lambda: False,
        delay: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._made, self._is_cut_off, self._delay = made, is_cut_off, delay

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._call(getattr(self._made, name), args))

    async def _call(self, method: Any, args: tuple[Any, ...]) -> Any:
        if self._is_cut_off():
            await asyncio.Event().wait()
        if self._delay is not None:
            await self._delay(method.__name__)
        try:
            return await method(*args)
        except PointsmanError as error:
            raise ActorError(error) from error


class World:
    """A keeper and one node, which outlive planes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keeper = self._keeper()
        self.node = NodeAgent("n1", str(folder / "node"), "127.0.0.1", 0.3)

    def _keeper(self) -> Keeper:
        return Keeper(str(self.folder / "storage"), 60.0, 3.0, 1.0, "pointsman", lambda *_: Actor(self.node))

    def restart_keeper(self) -> None:
        self.keeper._keeping.cancel()
        self.keeper = self._keeper()


class NoBookings(Bookings):
    """No other job uses the cluster."""

    async def book(self, instance_id: str, place: Place, nodes: Mapping[str, RayNode]) -> None: ...

    async def free(self, instance_id: str) -> None: ...

    async def keep(self, instance_ids: Collection[str]) -> None: ...


class NearCluster(RayCluster):
    """A cluster in this process."""

    def __init__(self, world: World) -> None:
        super().__init__(RaySettings(address="127.0.0.1:1"))
        self.world = world
        self.bookings = NoBookings()
        self.is_slow: asyncio.Event | None = None
        """Images wait for this before they arrive."""
        self.waiting = False
        self.is_cut_off = False
        """From the keeper."""
        self.answers_late = False
        """The keeper stores what it is sent, and its answer comes too late."""

    async def connect(self) -> None:
        self.host = "127.0.0.1"

    async def disconnect(self) -> None: ...

    async def nodes(self) -> list[RayNode]:
        return [RayNode("1", "n1", "127.0.0.1", {"CPU": 4.0}, {})]

    def agent(self, node: RayNode) -> Any:
        return Actor(self.world.node)

    async def keeper(self) -> Any:
        return Actor(_Newest(self.world), lambda: self.is_cut_off, self._delay)

    async def _delay(self, method: str) -> None:
        if self.is_slow is not None and method == "save":
            self.waiting = True
            await self.is_slow.wait()

    async def end(self, actor: Any) -> None: ...

    def save_now(self, epoch: int, number: int, image: bytes) -> None:
        if self.is_cut_off:
            raise NotStored("nothing was changed")
        with pytest.raises(StopIteration):  # it waits for nothing
            self.world.keeper.save(epoch, number, image).send(None)
        if self.answers_late:
            raise NotStored("no answer in time")


class _Newest:
    """The keeper under its name: Ray starts it again."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world.keeper, name)


class NoLoad:
    def measured(self, deployment: str, instance_id: str, metrics: Metrics, source: Samples | None) -> None: ...

    def surveyed(self, deployment: str, readings: Sequence[tuple[str, Metrics]]) -> None: ...

    def activity(self, deployment: str, instance_id: str) -> Activity | None:
        return None

    def rest(self, deployment: str, instance_id: str, until: float | None = None) -> None: ...


class LonePlane:
    """A runtime, and what it tells."""

    def __init__(self, world: World, name: str) -> None:
        self.cluster = NearCluster(world)
        self.runtime = RayRuntime(world.folder / name, self.cluster)
        self.runtime.authority._plane = name
        self.told: list[ControllerEvent] = []

    async def start(self) -> dict[str, str]:
        """Processes that it adopts, by instance."""
        await self.runtime.open()
        return {one.instance_id: one.process for one in await self.runtime.adopt(self.told.append, NoLoad())}

    def launch(self, name: str) -> None:
        spec = LaunchSpec((sys.executable, "-S", "-c", SLEEP))
        self.runtime.launch(
            ProcessOrder(
                instance_id=name, deployment="d", recipe="r", place=None, folder="/", launch=lambda host, port: spec
            )
        )

    def launched(self) -> dict[str, int]:
        return {one.instance_id: int(one.process) for one in self.told if isinstance(one, Launched)}

    async def started(self, name: str) -> int:
        self.launch(name)
        await eventually(lambda: name in self.launched(), f"{name} runs")
        return self.launched()[name]

    async def close(self) -> None:
        await self.runtime.close()
        self.runtime.admin.close()

    def problems(self) -> str:
        return "\n".join(map(str, self.runtime.problems()))


def apply(plane: LonePlane, text: str) -> None:
    documents = plane.runtime.documents
    with documents.together():
        documents.save_manifest(ManifestText(text, "/"), 0.0)


def stored(world: World) -> tuple[str, dict[str, str]]:
    """What the next plane would find: the manifest, and scaling targets."""
    store = Store(Path("next"), world.keeper._kept.image)
    found = store.documents.manifest()
    targets = store.targets.scaling()
    store.close()
    return "" if found is None else found[1].text, targets


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (keeper_module, links_module):
        monkeypatch.setattr(module, "TAKEN_S", 1.0)
        monkeypatch.setattr(module, "BEAT_S", 0.1)
        monkeypatch.setattr(module, "ANSWER_S", 0.7)
    monkeypatch.setattr(keeper_module, "SILENT_S", 0.4)


def test_a_plane_that_is_cut_off_from_its_keeper_starts_and_stops_nothing_and_says_so(state: Path) -> None:
    async def story() -> None:
        plane = LonePlane(World(state), "a")
        assert await plane.start() == {}
        first = await plane.started("m-1")
        plane.cluster.is_cut_off = True
        await eventually(lambda: "starts and stops nothing" in plane.problems(), "it says so")
        plane.launch("m-2")
        plane.runtime.stop("m-1", kill=True)
        with pytest.raises(NotStored):
            apply(plane, "refused")
        await asyncio.sleep(0.5)
        assert plane.launched().keys() == {"m-1"}
        assert is_alive(first), "what runs goes on"
        plane.cluster.is_cut_off = False
        await eventually(lambda: "m-2" in plane.launched(), "what waited is done")
        await eventually(lambda: not is_alive(first), "and what was to be stopped is stopped")
        assert "keeper" not in plane.problems()
        await plane.close()

    asyncio.run(story())


def test_a_target_that_is_set_just_after_an_apply_is_stored_whatever_is_under_way(state: Path) -> None:
    async def story() -> None:
        world = World(state)
        plane = LonePlane(world, "a")
        await plane.start()
        await eventually(lambda: plane.runtime.unsaved().changes == 0, "the first image")
        plane.runtime.targets.save_scaling({"m": "1"})
        plane.cluster.is_slow = asyncio.Event()  # the image with this target arrives last
        while not plane.cluster.waiting:
            await asyncio.sleep(0.001)
        apply(plane, "second")
        plane.runtime.targets.save_scaling({"m": "2"})
        assert stored(world)[0] == "second", "an apply is stored before it is confirmed"
        assert plane.runtime.unsaved().changes == 1
        plane.cluster.is_slow.set()
        await eventually(lambda: plane.runtime.unsaved().changes == 0, "stored")
        assert stored(world) == ("second", {"m": "2"})
        await plane.close()

    asyncio.run(story())


def test_an_apply_that_is_refused_because_the_answer_was_late_is_not_stored_either(state: Path) -> None:
    async def story() -> None:
        world = World(state)
        plane = LonePlane(world, "a")
        await plane.start()
        apply(plane, "first")
        plane.cluster.answers_late = True
        with pytest.raises(NotStored):
            apply(plane, "second")
        assert stored(world)[0] == "second", "it has arrived"
        await eventually(lambda: plane.runtime.unsaved().changes == 0, "sent again")
        assert stored(world)[0] == "first", "what the next plane finds is what this one said"
        await plane.close()

    asyncio.run(story())


def test_an_older_plane_that_runs_on_is_fenced_by_its_epoch(state: Path) -> None:
    async def story() -> None:
        world = World(state)
        older, newer = LonePlane(world, "older"), LonePlane(world, "newer")
        await older.start()
        pid = await older.started("m-1")
        older.cluster.is_cut_off = True
        adopted = await newer.start()
        assert adopted == {"m-1": str(pid)}, "it waits until the older one counts as gone, and adopts"
        await eventually(lambda: older.runtime.authority.outruled, "the node refuses the older one")
        assert "a newer plane" in older.problems()
        older.cluster.is_cut_off = False
        older.launch("m-2")
        older.runtime.stop("m-1", kill=True)
        await older.close()
        assert older.launched().keys() == {"m-1"}
        assert is_alive(pid), "its end ends nothing"
        assert (await newer.started("m-3")) != pid
        await newer.close()
        assert not is_alive(pid)

    asyncio.run(story())


KEPT = ("runtimes/ray/links.py", "runtimes/ray/runtime.py")
OF_NODES = ("runtimes/ray/node.py",)


def test_each_background_task_of_a_plane_and_of_a_node_begins_again(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is to go on for ever, or until something is done; the plane names those of nodes too."""
    told: list[str] = []
    monkeypatch.setattr(Tasks, "complete", first_start_fails(told.append))
    monkeypatch.setattr(node_module, "SWEEP_S", 0.05)

    def names(what: str) -> Counter[str]:
        return Counter(one.removeprefix(f"{what} ") for one in told if one.startswith(f"{what} "))

    async def story() -> None:
        world = World(state)
        plane = LonePlane(world, "a")
        await plane.start()
        pid = await plane.started("m-1")
        plane.runtime.look_at_workers(PointsmanPlan())
        plane.runtime.stop("m-1", kill=True)
        await eventually(lambda: not is_alive(pid), "it is stopped")
        await eventually(lambda: "bookings" in names("again"), "its place is free")
        tasks, of_node = plane.runtime.tasks, world.node._tasks
        assert of_node is not None
        for failing in (Failures(tasks, told.append), Failures(of_node, told.append)):
            for _ in range(2):
                failing.kill_all()
                await eventually(lambda: names("killed") == names("again"), "all of them have begun again")
        assert {name for file in (*KEPT, *OF_NODES) for name in kept_in(file)} <= {
            re.escape(one) for one in names("killed")
        }
        expected = {name for file in KEPT for name in names("killed") if re.escape(name) in kept_in(file)}
        expected |= {f"{one.name} of n1" for one in of_node.alive}
        await eventually(lambda: expected <= tasks.failures().keys(), "the failures of the node are told")
        assert expected <= {one.facts["task"] for one in tasks.problems()}
        assert tasks.failures()["raylet watch of n1"] == 2
        assert "FailedElsewhere: CancelledError: it was cancelled" in {one.facts["error"] for one in tasks.problems()}
        await plane.started("m-2")
        await plane.close()

    asyncio.run(story())


def test_a_keeper_that_is_restarted_from_its_checkpoint_disturbs_no_plane(state: Path) -> None:
    async def story() -> None:
        world = World(state)
        plane = LonePlane(world, "a")
        await plane.start()
        pid, epoch = await plane.started("m-1"), plane.runtime.authority.epoch
        world.restart_keeper()
        heard = time.monotonic()
        await eventually(lambda: plane.runtime.authority._heard_at > heard, "the next keeper hears the plane")
        assert plane.runtime.authority.epoch == epoch, "it knows the plane"
        await plane.started("m-2")
        await eventually(lambda: plane.runtime.unsaved().changes == 0, "the state is stored")
        for one in plane.runtime._background:
            one.cancel()  # the plane is killed
        for one in plane.runtime._nodes._running.values():
            one.cancel()
        plane.runtime.admin.close()
        plane.runtime._lock.release()
        world.restart_keeper()
        again = LonePlane(world, "b")
        assert (await again.start())["m-1"] == str(pid)
        await again.close()

    asyncio.run(story())
