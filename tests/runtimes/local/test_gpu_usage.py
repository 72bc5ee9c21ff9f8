"""How busy GPUs are: from drivers, for a deployment, and in the view of a policy."""

import asyncio
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from pointsman.config.revision import ManifestText
from pointsman.control import InstanceStatus, Phase
from pointsman.placement.asks import Claim, Place, Tier
from pointsman.runtimes.machine.gpu_usage import GPU_INTERVAL_S, RETRY_S, GpuDrivers, GpuUsage
from pointsman.scaling.policy import DeploymentView
from pointsman.types import Gpu, Worker
from tests.runtimes.local.planes import manifest, run, running, simulated
from tests.runtimes.local.processes import TIMEOUT_S, eventually, until
from tests.runtimes.local.test_autoscaling import records
from tests.runtimes.local.test_detection import GIB, Card, Error, Info, Library, amd


class Clock:
    """Time that a test turns on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def cards(*busy: int | None) -> list[Card]:
    return [Card(f"0:{place}:0.0", busy=percent) for place, percent in enumerate(busy)]


def gpus(number: int, vendor: str = "nvidia") -> tuple[Gpu, ...]:
    return tuple(Gpu(index=index, memory_bytes=16 * GIB, vendor=vendor) for index in range(number))


# What drivers say


@pytest.mark.parametrize(
    ("busy", "told"),
    [
        ([], {}),
        ([0], {0: 0.0}),
        ([100], {0: 1.0}),
        ([37, 4], {0: 0.37, 1: 0.04}),
        ([37, None, 50], {0: 0.37, 2: 0.5}),
        ([None], {}),
        ([101], {}),
    ],
    ids=["none", "idle", "full", "two", "one is divided", "all are", "nonsense"],
)
def test_nvidia(busy: list[int | None], told: dict[int, float]) -> None:
    library = Library(*cards(*busy))
    drivers = GpuDrivers(library)
    assert drivers.busy(gpus(len(busy))) == told
    drivers.close()
    assert not library.open, "what was opened is closed"


@pytest.mark.parametrize(
    ("file", "told"),
    [("37", {0: 0.37}), ("0", {0: 0.0}), ("100", {0: 1.0}), ("65535", {}), ("-1", {}), ("busy", {}), (None, {})],
)
def test_amd(tmp_path: Path, file: str | None, told: dict[int, float]) -> None:
    amd(tmp_path, 0, "05", {"mem_info_vram_total": GIB} | ({} if file is None else {"gpu_busy_percent": file}))
    assert GpuDrivers(root=tmp_path).busy(gpus(2, "amd")) == told  # and the second is not there


def test_amd_cards_are_counted_by_their_address(tmp_path: Path) -> None:
    for card, bus, busy in ((2, "05", 10), (0, "15", 20), (1, "25", 30)):
        amd(tmp_path, card, bus, {"mem_info_vram_total": GIB, "gpu_busy_percent": busy})
    assert GpuDrivers(root=tmp_path).busy(gpus(3, "amd")) == {0: 0.1, 1: 0.2, 2: 0.3}


def test_an_unreadable_file_of_the_driver(tmp_path: Path) -> None:
    amd(tmp_path, 0, "05", {"mem_info_vram_total": GIB, "gpu_busy_percent/x": ""})  # reading a folder fails
    assert GpuDrivers(root=tmp_path).busy(gpus(1, "amd")) == {}


def test_other_vendors_are_not_read(tmp_path: Path) -> None:
    library = Library(*cards(50))
    assert GpuDrivers(library, tmp_path).busy(gpus(1, "apple")) == {}
    assert not library.open


def test_no_driver_is_fine() -> None:
    assert GpuDrivers(Library(*cards(50), driver=False)).busy(gpus(1)) == {}


def test_a_gpu_without_usage_is_not_read_again_for_a_while() -> None:
    [first, second] = pair = cards(None, 50)
    clock = Clock()
    drivers = GpuDrivers(Library(*pair), clock=clock)
    assert drivers.busy(gpus(2)) == {1: 0.5}
    first.busy = 70
    clock.now += RETRY_S - 1
    assert drivers.busy(gpus(2)) == {1: 0.5}
    clock.now += 1
    assert drivers.busy(gpus(2)) == {0: 0.7, 1: 0.5}
    second.busy = None
    assert drivers.busy(gpus(2)) == {0: 0.7}, "a GPU may stop reporting"


def test_a_driver_that_comes_back_is_opened_again() -> None:
    [card] = one = cards(50)
    library, clock = Library(*one), Clock()
    drivers = GpuDrivers(library, clock=clock)
    assert drivers.busy(gpus(1)) == {0: 0.5}
    assert library.open == 1, "it stays open, as to open it takes long"
    assert drivers.busy(gpus(1)) == {0: 0.5}
    assert library.open == 1
    card.busy = None
    assert drivers.busy(gpus(1)) == {}
    assert not library.open
    card.busy, clock.now = 60, clock.now + RETRY_S
    assert drivers.busy(gpus(1)) == {0: 0.6}
    drivers.close()
    drivers.close()
    assert not library.open


# What becomes of it for a deployment


class Told(GpuDrivers):
    """Drivers that report what a test wants, and record which GPUs were read."""

    def __init__(self, busy: dict[int, float]) -> None:
        super().__init__(Library())
        self.told = busy
        self.asked: list[list[int]] = []
        self.closed = 0

    def busy(self, gpus: Iterable[Gpu]) -> dict[int, float]:
        asked = sorted(gpu.index for gpu in gpus)
        self.asked.append(asked)
        return {index: self.told[index] for index in asked if index in self.told}

    def close(self) -> None:
        self.closed += 1


def usage(drivers: GpuDrivers, machine: Worker, **settings: Any) -> GpuUsage:
    made = GpuUsage(drivers, limit_s=TIMEOUT_S, **settings)
    made.see(machine)
    return made


def worker(number: int, vendor: str = "nvidia") -> Worker:
    return Worker(name="here", cpus=8, memory_bytes=64 * GIB, gpus=gpus(number, vendor))


def instance(
    deployment: str, indices: Collection[int] | None, phase: Phase = Phase.READY, on: str = "here"
) -> InstanceStatus:
    """On these GPUs; None: it has no place."""
    claims = tuple(Claim(worker=on, gpu=index) for index in indices or ()) or (Claim(worker=on),)
    return InstanceStatus(
        id=f"{deployment}-{indices}",
        deployment=deployment,
        phase=phase,
        host="127.0.0.1",
        port=1,
        tls=False,
        process=None,
        in_service=phase is Phase.READY,
        restarts=0,
        reason=None,
        since=0.0,
        until=None,
        drain_asked=False,
        endpoint=None,
        place=None if indices is None else Place(tier=Tier.ONE_GPU, claims=claims),
    )


BUSY = {0: 0.2, 1: 0.4, 2: 0.9, 3: 1.0}


@pytest.mark.parametrize(
    ("instances", "mean"),
    [
        ([], None),
        ([instance("m", [0])], 0.2),
        ([instance("m", [0, 1])], 0.3),
        ([instance("m", [0, 1]), instance("m", [2])], 0.6),
        ([instance("m", [0]), instance("other", [3])], 0.2),
        ([instance("m", [0]), instance("shard", [1])], 0.3),
        ([instance("m", [0]), instance("m", [1], Phase.STARTING), instance("m", [2], Phase.DRAINING)], 0.2),
        ([instance("m", [0]), instance("m", [1], on="elsewhere")], 0.2),
        ([instance("m", [0, 5]), instance("m", [4])], 0.2),
        ([instance("m", [4])], None),
        ([instance("m", []), instance("m", None)], None),
    ],
    ids=[
        "none", "one", "mean of its GPUs", "mean over instances", "not of others", "of all shards",
        "ready ones", "another machine", "those that report", "none reports", "on no GPU",
    ],
)  # fmt: skip
def test_usage_of_a_deployment(instances: list[InstanceStatus], mean: float | None) -> None:
    async def story() -> None:
        looking = usage(Told(BUSY), worker(6))
        await looking.read(["m", "shard"], instances)
        assert looking.of(["m", "shard"], instances) == (None if mean is None else pytest.approx(mean))
        looking.close()

    run(story())


@pytest.mark.parametrize(
    ("machine", "instances"),
    [
        (worker(0), [instance("m", [0])]),
        (worker(1, "apple"), [instance("m", [0])]),
        (worker(2), []),
        (worker(2), [instance("m", []), instance("m", None), instance("other", [1])]),
        (worker(2), [instance("m", [0], Phase.STARTING)]),
    ],
    ids=["no GPUs", "none that says", "no instances", "others have them", "none is ready"],
)
def test_without_gpus_no_driver_is_read(machine: Worker, instances: list[InstanceStatus]) -> None:
    async def story() -> None:
        drivers = Told(BUSY)
        looking = usage(drivers, machine)
        await looking.read(["m"], instances)
        looking.close()
        assert (drivers.asked, drivers.closed) == ([], 0)

    run(story())


def test_drivers_are_read_once_a_second_for_all_policies() -> None:
    async def story() -> None:
        drivers, clock = Told(dict(BUSY)), Clock()
        looking, instances = usage(drivers, worker(4), clock=clock), [instance("a", [0]), instance("b", [1, 0])]
        await asyncio.gather(*(looking.read([name], instances) for name in ("a", "b", "a")))
        assert drivers.asked == [[0, 1]]
        drivers.told[0] = 0.6
        clock.now += GPU_INTERVAL_S / 2
        await looking.read(["a"], instances)
        assert (drivers.asked, looking.of(["a"], instances)) == ([[0, 1]], 0.2)
        clock.now += GPU_INTERVAL_S / 2
        await looking.read(["a"], instances)
        assert (len(drivers.asked), looking.of(["a"], instances)) == (2, 0.6)
        looking.close()
        await eventually(lambda: drivers.closed, "drivers closed")

    run(story())


def test_unused_drivers_are_closed() -> None:
    async def story() -> None:
        drivers = Told(BUSY)
        looking = usage(drivers, worker(1), idle_s=0.01)
        await looking.read(["m"], [instance("m", [0])])
        await eventually(lambda: drivers.closed, "drivers closed")
        looking.close()
        assert drivers.closed == 1

    run(story())


def test_drivers_that_fail_give_no_number() -> None:
    class Broken(Told):
        def busy(self, gpus: Iterable[Gpu]) -> dict[int, float]:
            super().busy(gpus)
            raise RuntimeError("no idea")

    async def story() -> None:
        drivers, instances = Broken(BUSY), [instance("m", [0])]
        looking = usage(drivers, worker(1))
        await looking.read(["m"], instances)
        assert (drivers.asked, looking.of(["m"], instances)) == ([[0]], None)
        looking.close()

    run(story())


# On a plane

POLICY = """
seen = []

def follow(view):
    seen.append(view)
    return 3 if (view.gpu_usage.last or 0) > 0.5 else 2
"""


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[str]:
    """The name of a module beside the manifest, with a policy that remembers what it saw."""
    name = f"policies_{uuid4().hex}"  # modules are loaded once, so each has a name of its own
    (tmp_path / f"{name}.py").write_text(POLICY)
    yield name
    sys.modules.pop(name, None)


def on_gpus(policy: str, folder: Path, library: Library) -> tuple[ManifestText, dict[str, Any]]:
    """A manifest, and a machine with three GPUs, each with room for one instance."""
    scaling = {"policy": f"{policy}:follow", "min": 2, "max": 3, "interval": "100ms"}
    placement = "    placement: {resources: {gpus: 1, gpuMemory: 9Gi}}\n"
    deployment = simulated("m", 0).replace("    replicas: 0\n", "") + f"    scaling: {scaling}\n" + placement
    machine = worker(3)
    settings = {"look_at_machine": lambda *_, **__: machine, "gpu_drivers": GpuDrivers(library)}
    return manifest(deployment, folder=folder), settings


def test_a_policy_sees_how_busy_gpus_are(state: Path, tmp_path: Path, policy: str) -> None:
    each = cards(10, 20, 40)
    library = Library(*each)
    text, settings = on_gpus(policy, tmp_path, library)

    async def story() -> None:
        async with running(state, text, **settings) as scene:
            await scene.until_ready("m-1", "m-2")
            seen: list[DeploymentView] = sys.modules[policy].seen
            places = [one.place for one in scene.plane.control.fleet().occupants]
            had = [each[index].busy or 0 for place in places for _, index in place.gpus]
            assert len(had) == 2
            mean = pytest.approx(sum(had) / 200)
            await scene.until(lambda: seen[-1].gpu_usage.last == mean, "the policy sees the GPUs of both")
            assert seen[0].gpu_usage.count == 0, "at the first call there was no instance"
            for card in each:
                card.busy = 80
            await scene.until_ready("m-1", "m-2", "m-3")
            assert records(scene)[-1]["numbers"]["gpu_usage"] == 0.8
        await eventually(lambda: not library.open, "what was opened is closed")

    run(story())


def test_a_driver_that_hangs_does_not_delay_policies(state: Path, tmp_path: Path, policy: str) -> None:
    go_on = threading.Event()

    class Hanging(Library):
        calls = 0

        def nvmlDeviceGetUtilizationRates(self, handle: Card) -> Info:  # noqa: N802
            self.calls += 1
            go_on.wait()
            raise Error("GPU is lost")

    library = Hanging(*cards(90, 90, 90))
    text, settings = on_gpus(policy, tmp_path, library)

    async def story() -> None:
        async with running(state, text, **settings) as scene:
            await scene.until_ready("m-1", "m-2")
            await scene.until(lambda: library.calls, "the driver asked")
            seen: list[DeploymentView] = sys.modules[policy].seen
            later = seen[-1].now + 2 * GPU_INTERVAL_S
            await scene.until(lambda: seen[-1].now > later, "the policy asked all the same, although it hangs")
            assert library.calls == 1, "one thread waits for it, and no other is begun"
            assert seen[-1].gpu_usage.count == 0

    try:
        run(story())
    finally:
        go_on.set()
    until(lambda: not library.open, "what was opened is closed, once it answers")
