"""The actor of a node, without Ray: real processes under a real supervisor."""

import asyncio
import sys
from pathlib import Path

import pytest

from pointsman.errors import PointsmanError
from pointsman.reasons import Reason
from pointsman.runtimes.machine.children import now
from pointsman.runtimes.machine.processes import InstanceEnded, InstanceStarted, ProcessStart, WorkerReport
from pointsman.runtimes.machine.store import StoredProcess
from pointsman.runtimes.ray.node import NodeAgent, OlderPlane
from tests.runtimes.local.processes import eventually, is_alive

SLEEP = ("/plane/python", "-S", "-c", "import time; print('here', flush=True); time.sleep(600)")
LEASE_S = 30.0


def agent(state: Path) -> NodeAgent:
    return NodeAgent("n1", str(state / "node"), "127.0.0.1", 0.3)


async def start(node: NodeAgent, name: str, epoch: int = 1) -> None:
    process = StoredProcess(name, "d", "r", "127.0.0.1", await node.reserve(epoch, name), worker="n1")
    await node.start(epoch, ProcessStart(process, SLEEP, {}, "/"), "/plane/python")


async def report(node: NodeAgent, after: int = 0, epoch: int = 1) -> tuple[int, WorkerReport]:
    for _ in range(60):
        answer = await node.poll(epoch, now(), LEASE_S, after)
        if answer.reports:
            return answer.reports[0]
    raise AssertionError("no report")


def test_processes_start_report_and_end(state: Path) -> None:
    async def story() -> None:
        node = agent(state)
        opened = await node.open(1, (), None)
        assert opened.running == ()
        assert opened.worker.memory_bytes > 0
        await node.poll(1, now(), LEASE_S, None)
        await start(node, "a-1")
        number, started = await report(node)
        assert isinstance(started, InstanceStarted), started
        cmdline = Path(f"/proc/{started.pid}/cmdline").read_bytes()
        assert cmdline.startswith(sys.executable.encode()), "the plane's Python became that of the node"
        assert (await report(node, number - 1))[1] == started, "reports stay until they have arrived"
        await node.stop(1, "a-1", kill=False)
        _, ended = await report(node, number)
        assert isinstance(ended, InstanceEnded)
        assert ended.why == "killed by SIGTERM"
        assert "here" in str(await node.logs(1, "a-1", 10))
        assert await node.logs(1, "unknown", 10) is None
        await node.close(1)

    asyncio.run(story())


def test_the_next_plane_adopts_and_outrules_the_one_before(state: Path) -> None:
    async def story() -> None:
        node = agent(state)
        await node.open(1, (), None)
        await node.poll(1, now(), LEASE_S, None)
        await start(node, "a-1")
        await start(node, "a-2")
        started = [one for _, one in [await report(node), await report(node, 1)] if isinstance(one, InstanceStarted)]
        pids = {one.id: one.pid for one in started}
        opened = await node.open(2, (), None)
        assert {one.id: one.pid for one in opened.running} == pids
        for call in (node.poll(1, now(), LEASE_S, 0), node.stop(1, "a-1", kill=True), node.close(1)):
            with pytest.raises(OlderPlane):
                await call
        kept = await node.open(2, (), ("a-2",))
        assert [one.id for one in kept.running] == ["a-2"]
        await eventually(lambda: not is_alive(pids["a-1"]), "the end of a-1, which the plane does not know")
        assert is_alive(pids["a-2"])
        await node.close(2)

    asyncio.run(story())


def test_without_a_lease_everything_ends_and_nothing_is_started(state: Path) -> None:
    async def story() -> None:
        node = agent(state)
        with pytest.raises(PointsmanError, match="not open"):
            await node.reserve(1, "a-1")
        await node.open(1, (), None)
        await node.poll(1, now(), 0.5, None)
        await start(node, "a-1")
        started = (await node.poll(1, None, 0.5, 0)).reports[0][1]
        assert isinstance(started, InstanceStarted)
        await eventually(lambda: not is_alive(started.pid), "its end")
        while (answer := await node.poll(1, None, 0.5, 1)).problem != Reason("lease-ended"):
            await asyncio.sleep(0.01)
        ended = answer.reports[0][1]
        assert isinstance(ended, InstanceEnded)
        await node.poll(1, now(), LEASE_S, None)  # the plane is back
        await start(node, "a-1")
        assert isinstance((await report(node, answer.reports[-1][0]))[1], InstanceStarted)
        await node.close(1)

    asyncio.run(story())
