"""The controller learns what is asked, packs with it, and hands it to the next one."""

from pointsman.control.controller import Controller
from pointsman.control.desired import Desired, DesiredDeployment, DesiredEngine
from pointsman.control.events import Applied, WorkerSeen
from pointsman.control.places import remember
from pointsman.placement.asks import Arrangement, Ask, EngineAbility, Need
from pointsman.placement.workload import FIRST_ASKS
from pointsman.types import Gpu, Worker

GIB = 1 << 30
GPUS = tuple(Gpu(index=index, memory_bytes=80 * GIB) for index in range(8))
WORKERS = [Worker(name=f"w{number}", cpus=64, memory_bytes=512 * GIB, gpus=GPUS) for number in range(2)]


def wanted(name: str, size: int, replicas: int) -> DesiredDeployment:
    ask = Ask(
        instance_id="",
        deployment=name,
        need=Need.fixed(size * GIB),
        engine=EngineAbility(),
        arrangement=Arrangement.BINPACK,
    )
    return DesiredDeployment(name=name, model=name, replicas=replicas, engine=DesiredEngine("any"), ask=ask)


def controller_with(*deployments: DesiredDeployment, stored: str = "") -> Controller:
    made = Controller()
    remember(made.places, stored)
    for worker in WORKERS:
        made.handle(WorkerSeen(worker), 0.0)
    made.handle(Applied(Desired({one.name: one for one in deployments})), 0.0)
    return made


def test_asks_are_learned_once_per_instance() -> None:
    controller = controller_with(wanted("small", 10, FIRST_ASKS), wanted("giant", 900, 1))
    counts = {one.kind.need.gpu_bytes() // GIB: one.count for one in controller.places.learned.counts()}
    assert counts == {10: FIRST_ASKS, 900: 1}
    controller.handle(Applied(Desired(dict(controller.desired.deployments if controller.desired else {}))), 500.0)
    again = {one.kind.need.gpu_bytes() // GIB: one.count for one in controller.places.learned.counts()}
    assert again == counts, "an instance that waits for room is not counted again"


def test_packing_uses_what_was_learned() -> None:
    controller = controller_with(wanted("small", 10, FIRST_ASKS + 1))
    assert controller.places.placer.workload is not None
    assert controller_with(wanted("small", 10, 2)).places.placer.workload is None, "too little was asked"


def test_the_next_controller_begins_with_it() -> None:
    first = controller_with(wanted("small", 10, FIRST_ASKS))
    second = controller_with(wanted("small", 10, 1), stored=first.places.learned.as_json())
    workload = second.places.placer.workload
    assert workload is not None
    assert workload.kinds == first.places.placer.workload.kinds  # type: ignore[union-attr]
