"""How busy the GPUs of nodes are: measured there, told with polls, and seen by scaling policies. No GPU is needed."""

import asyncio
from pathlib import Path

from pointsman.runtimes.machine.children import now
from pointsman.runtimes.machine.gpu_usage import GPU_IDLE_S, GpuDrivers
from pointsman.runtimes.ray.cluster import RayNode
from pointsman.runtimes.ray.links import NodeLink
from pointsman.runtimes.ray.node import NodeAgent
from pointsman.runtimes.ray.runtime import NodeGpus, _facts
from pointsman.types import Gpu, Worker
from tests.runtimes.local.test_detection import GIB, Library
from tests.runtimes.local.test_gpu_usage import Clock, cards, gpus, instance


def test_a_node_measures_what_a_poll_asks_for(state: Path) -> None:
    async def story() -> None:
        library = Library(*cards(37, 80))
        node = NodeAgent("n1", str(state / "node"), "127.0.0.1", 0.3, GpuDrivers(library))
        await node.open(1, (), None)
        assert (await node.poll(1, now(), 30.0, None)).busy == {}
        assert not library.open, "no driver is opened for nothing"
        assert (await node.poll(1, now(), 30.0, None, gpus(2))).busy == {0: 0.37, 1: 0.8}
        await node.close(1)

    asyncio.run(story())


def link(name: str, worker: Worker) -> NodeLink:
    """Of a node that has answered; only what it knows is used."""
    made = NodeLink.__new__(NodeLink)
    made.name, made.worker, made.silent_since, made.instances = name, worker, None, set()
    made.last_node = RayNode("id", name, "127.0.0.2", {"GPU": 2.0, "CPU": 4.0}, {})
    made.wanted_gpus, made.busy = (), {}
    return made


def test_policies_see_gpus_of_all_nodes_and_status_shows_them() -> None:
    clock = Clock()
    meter = NodeGpus(clock)
    seen = Worker(name="x", cpus=4, memory_bytes=GIB, gpus=(*gpus(1), Gpu(index=1, memory_bytes=GIB, used_bytes=5)))
    links = {name: link(name, seen) for name in ("n1", "n2")}
    meter.links = links
    instances = [instance("d", [0], on="n1"), instance("d", [1], on="n2"), instance("other", [0], on="n2")]
    asyncio.run(meter.read(["d"], instances))
    assert {name: [gpu.index for gpu in one.wanted_gpus] for name, one in links.items()} == {"n1": [0], "n2": [1]}
    assert meter.of(["d"], instances) is None, "nothing is told yet"
    links["n1"].busy, links["n2"].busy = {0: 0.5}, {1: 0.9}
    assert meter.of(["d"], instances) == 0.7
    assert meter.of(["other"], instances) is None
    assert _facts(links["n2"])["gpu_use"][1] == {"index": 1, "memory_bytes": GIB, "used_bytes": 5, "busy": 0.9}
    clock.now += GPU_IDLE_S
    asyncio.run(meter.read([], instances))
    assert all(one.wanted_gpus == () for one in links.values()), "no policy wants to know any more"
