"""Each background task of a real plane with its gateway is killed: its work goes on, and `status` names it."""

import asyncio
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from pointsman.config.revision import ManifestText
from pointsman.control import events as control
from pointsman.gateway.embedded import Embedded
from pointsman.gateway.pipelines import results
from pointsman.gateway.records import GateRecord
from pointsman.routing.events import Arrived, TimerFired
from pointsman.runtimes.machine import processes
from pointsman.runtimes.tasks import KeptTask, RepeatedCall
from pointsman.types import RequestMetadata
from tests.runtimes.local.planes import LIFECYCLE, run, simulated
from tests.runtimes.local.processes import eventually

POLICY = """
calls = []

def hold(view):
    calls.append(1)
    return 1
"""


class Scene:
    """A plane with its gateway, in this process."""

    def __init__(self, embedded: Embedded, folder: Path) -> None:
        self.embedded, self.folder = embedded, folder
        self.queries = 0
        """To the Prometheus of the manifest."""

    @property
    def tasks(self) -> Any:
        return self.embedded.gateway.tasks

    @property
    def plane(self) -> Any:
        return self.embedded.plane

    def instances(self) -> dict[str, dict[str, Any]]:
        return {one["id"]: one for each in self.embedded.status()["deployments"] for one in each["instances"]}

    def ready(self) -> set[str]:
        return {name for name, one in self.instances().items() if one["phase"] == "ready"}

    def names(self, task: str) -> bool:
        """Whether the status names a background task."""
        found = self.embedded.status()["problems"]
        return any(one["code"] == "task-failed" and one["facts"]["task"] == task for one in found)

    async def answer_query(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.queries += 1
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"status": "success", "data": {"resultType": "scalar", "result": [1.5, "3"]}}'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()


@asynccontextmanager
async def scene(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """With everything that has background tasks."""
    monkeypatch.setattr(results, "SWEEP_S", 0.05)
    monkeypatch.setattr(results, "MAX_AGE_S", 0.0)
    monkeypatch.setitem(sys.modules, "counting_policy", None)  # so that it is forgotten afterwards
    del sys.modules["counting_policy"]
    (folder / "counting_policy.py").write_text(POLICY)
    (folder / "endpoints.yaml").write_text("[]\n")
    made = Scene(Embedded(folder / "state"), folder)
    prometheus = await asyncio.start_server(made.answer_query, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{prometheus.sockets[0].getsockname()[1]}"
    metrics = [{"name": "load", "url": url, "query": "up"}]
    scaling = {"max": 2, "interval": "100ms", "policy": "counting_policy:hold", "metrics": metrics}
    scheduling = {"config": {"featureGates": ["flowControl"], "flowControl": {"noEndpointRequestTTL": "100ms"}}}
    outside = f"\n  - name: outside\n    model: o\n    endpointsFile: {folder / 'endpoints.yaml'}\n{LIFECYCLE}"
    outside += f"    scheduling: {scheduling}\n"
    text = (
        "kind: Pointsman\ngateway: {listen: '127.0.0.1:0', limits: {headerTimeout: 100ms}}\ndeployments:"
        + simulated("m", 0).replace("    replicas: 0\n", "")
        + f"    scaling: {scaling}\n"
        + outside
    )
    try:
        await made.embedded.start(ManifestText(text, str(folder), "test.yaml"))
        await eventually(lambda: made.ready() == {"m-1"}, "m-1 ready")
        yield made
    finally:
        made.embedded.ask_to_stop()
        made.embedded.ask_to_stop()
        await made.embedded.stop()
        prometheus.close()
        await prometheus.wait_closed()
    assert made.tasks.alive == set()


# What is kept: the whole list


async def times_clients_out(scene: Scene) -> None:
    host, _, port = scene.embedded.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1")
    async with asyncio.timeout(20):
        assert b" 408 " in await reader.read()
    writer.close()


async def reads_endpoints_files(scene: Scene) -> None:
    name = f"here-{len(scene.instances())}"
    listed = scene.folder / "endpoints.yaml"
    listed.write_text(f"- {{url: 'http://127.0.0.1:9', name: {name}}}\n")
    await eventually(lambda: name in scene.instances(), "the new endpoint")
    listed.write_text("[]\n")
    await eventually(lambda: name not in scene.instances(), "no endpoint")


async def calls_policies(scene: Scene) -> None:
    calls = sys.modules["counting_policy"].calls
    known = len(calls)
    await eventually(lambda: len(calls) > known + 1, "calls of the policy")


async def reads_metrics(scene: Scene) -> None:
    known = scene.queries
    await eventually(lambda: scene.queries > known + 1, "queries")


async def removes_shared_memory(scene: Scene) -> None:
    left = scene.plane.runtime.replicas.memory.path / "left-behind"
    left.write_bytes(b"x")
    await eventually(lambda: not left.exists(), "an old file is removed")


async def stores_what_waits(scene: Scene) -> None:
    runtime = scene.plane.runtime
    other = sqlite3.connect(scene.folder / "state" / "pointsman.sqlite", isolation_level=None)
    other.execute("begin immediate")
    runtime.targets.save_scaling({"x": "1"})
    assert runtime.unsaved().changes == 1
    other.execute("rollback")
    await eventually(lambda: runtime.unsaved().changes == 0, "everything is stored")
    assert other.execute("select state from scaling where name = 'x'").fetchone() == ("1",)
    other.close()


async def collects_records(scene: Scene) -> None:
    history = scene.embedded.gateway.history
    history.fresh.append(GateRecord("r", "m", "/v1/completions", "red", 0.0, 429, "x", "too many"))
    await eventually(lambda: not history.fresh, "it is collected")


async def measures_the_loop(scene: Scene) -> None:
    delay = scene.embedded.gateway.turns.delay
    known = sum(delay.counts)
    await eventually(lambda: sum(delay.counts) > known, "the loop is measured")


async def hears_instances(scene: Scene) -> None:
    upstream = scene.embedded.gateway.upstream
    lanes = scene.embedded.gateway.traffic.all_lanes()
    [pool] = [upstream.pool_of(one) for lane in lanes for one in lane.dispatcher.fleet.instances()]
    pool.is_heard = True
    await eventually(lambda: not pool.is_heard, "it is noted that something came")


KEPT: dict[str, Callable[[Scene], Awaitable[None]]] = {
    "gateway timeouts": times_clients_out,
    "plane watch": reads_endpoints_files,
    "scaling policies": calls_policies,
    "metrics of m": reads_metrics,
    "shared memory sweep": removes_shared_memory,
    "store": stores_what_waits,
    "request records": collects_records,
    "loop beat": measures_the_loop,
    "silent instances": hears_instances,
}
"""Every task that lives as long as the plane, and what shows that it works."""


def break_once(task: KeptTask | RepeatedCall, how: str) -> None:
    """Let it fail now, or at its next turn; after that it works as before."""
    if isinstance(task, RepeatedCall):
        before = task.call

        def call() -> None:
            task.call = before
            raise asyncio.CancelledError if how == "cancelled" else ValueError("broken")

        task.call = call
        return
    if how == "raised":
        whole = task.work

        async def work() -> None:
            task.work = whole
            raise ValueError("broken")

        task.work = work
    assert task.task is not None
    task.task.cancel()


@pytest.mark.parametrize("how", ["raised", "cancelled"])
def test_each_background_task_goes_on_after_it_has_failed(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with scene(tmp_path, monkeypatch) as made:
            assert {one.name for one in made.tasks.alive} == KEPT.keys(), "a new task needs a line in KEPT"
            for task in list(made.tasks.alive):
                await KEPT[task.name](made)
                break_once(task, how)
                await eventually(lambda name=task.name: made.names(name), f"{task.name} in the status")  # type: ignore[misc]
                await KEPT[task.name](made)
            page = made.embedded.gateway.metrics.text(made.embedded.gateway)
            for name in KEPT:
                assert f'pointsman_background_failures_total{{task="{name}"}}' in page

    run(story())


# What reports by itself: timers of state machines, reports of the supervisor, listeners, commands

Break: TypeAlias = Callable[[Scene, pytest.MonkeyPatch], Awaitable[None]]


def fails_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, matches: Callable[..., bool]) -> list[int]:
    """The first matching call of a method raises. Returns a list that grows by then."""
    before = getattr(owner, name)
    failed: list[int] = []

    def call(*args: Any, **settings: Any) -> Any:
        if not failed and matches(*args):
            failed.append(1)
            raise ValueError("broken")
        return before(*args, **settings)

    monkeypatch.setattr(owner, name, call)
    return failed


async def comes_back(scene: Scene) -> None:
    """The engine is killed, and another takes its place."""
    pid = scene.instances()["m-1"]["process"]
    os.kill(int(pid), signal.SIGKILL)
    await eventually(lambda: "m-1" in scene.ready() and scene.instances()["m-1"]["process"] != pid, "m-1 again")


def kinds(kind: type) -> Callable[..., bool]:
    return lambda event, *_: isinstance(event, kind)


@pytest.mark.parametrize("event", [control.ControllerTimer, control.Exited], ids=lambda one: one.__name__)
def test_the_controller_goes_on_after_an_event_has_raised(
    event: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with scene(tmp_path, monkeypatch) as made:
            failed = fails_once(monkeypatch, made.plane.control.controller, "handle", kinds(event))
            await comes_back(made)
            assert failed
            assert made.names("controller")

    run(story())


@pytest.mark.parametrize("command", ["launch", "probe", "stop"])
def test_the_controller_hears_of_commands_that_raise(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait for ever for what comes of them."""

    async def story() -> None:
        async with scene(tmp_path, monkeypatch) as made:
            pid = made.instances()["m-1"]["process"]
            failed = fails_once(monkeypatch, made.plane.instances, command, lambda *_: True)
            if command == "launch":
                await comes_back(made)
            elif command == "probe":
                await eventually(lambda: failed, "a failure")
                probed = fails_once(monkeypatch, made.plane.instances, "probe", lambda *_: True)
                await eventually(lambda: probed, "the next probe")
            else:
                made.plane.control.drain("m-1")
                await eventually(lambda: made.ready() == {"m-2"}, "m-2 in its place")
                await eventually(lambda: "m-1" not in made.instances(), "m-1 gone")
                assert not Path(f"/proc/{pid}").exists()
            assert failed
            assert made.names("controller")

    run(story())


def test_the_timer_of_a_queue_goes_on_after_it_has_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with scene(tmp_path, monkeypatch) as made:
            lane = made.embedded.gateway.traffic.lanes["outside"]
            fired = lambda _, event, *__: isinstance(event, TimerFired)  # noqa: E731
            failed = fails_once(monkeypatch, type(lane.dispatcher), "handle", fired)
            # No instance serves it; as far as the lane knows one may come, so it is refused by the timer.
            monkeypatch.setattr(made.embedded.gateway.traffic.hooks, "unavailability", None)
            refused: list[Any] = []
            monkeypatch.setattr(made.embedded.gateway.upstream, "refuse", lambda _, command: refused.append(command))
            lane.tell(Arrived((RequestMetadata("r", model_name="o"),)))
            await eventually(lambda: refused, "a refusal")
            assert failed
            assert made.names("queue of outside")

    run(story())


def test_a_report_that_cannot_be_handled_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with scene(tmp_path, monkeypatch) as made:
            failed = fails_once(monkeypatch, made.plane.runtime._processes, "_take_in", lambda *_: True)
            await comes_back(made)
            assert failed
            assert made.names("supervisor reports")

    run(story())


def test_a_line_that_cannot_be_read_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with scene(tmp_path, monkeypatch) as made:
            link = made.plane.runtime._processes.supervisor
            link.data_received(b'{"say": "nonsense"}\n')
            assert any(one["code"] == "supervisor-confused" for one in made.embedded.status()["problems"])
            await eventually(lambda: made.plane.runtime._processes.supervisor not in (None, link), "another link")
            assert made.embedded.status()["problems"] == []
            await comes_back(made)

    run(story())


@pytest.mark.parametrize("function", ["open_supervisor", "clear"])
def test_the_supervisor_is_replaced_even_if_that_fails_at_first(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with scene(tmp_path, monkeypatch) as made:
            pid = made.instances()["m-1"]["process"]
            failed = fails_once(monkeypatch, processes, function, lambda *_: True)
            os.kill(made.plane.runtime._processes.supervisor.process.pid, signal.SIGKILL)
            await eventually(lambda: "m-1" in made.ready() and made.instances()["m-1"]["process"] != pid, "m-1 again")
            assert failed
            assert made.names("supervisor replacement")

    run(story())


def test_a_process_is_stopped_while_its_supervisor_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with scene(tmp_path, monkeypatch) as made:
            made.plane.runtime._processes.supervisor.hang_up()
            await eventually(lambda: made.plane.runtime._processes.supervisor is None, "no link")
            made.plane.runtime.stop("m-1", kill=True)
            pid = int(made.instances()["m-1"]["process"])
            await eventually(lambda: made.instances()["m-1"]["process"] not in (None, str(pid)), "another process")
            assert not Path(f"/proc/{pid}").exists()

    run(story())


def test_a_listener_that_raises_does_not_affect_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with scene(tmp_path, monkeypatch) as made:
            heard: list[int] = []
            made.plane.listeners += [lambda: [][0], lambda: heard.append(1)]
            made.plane.control.drain("m-1")
            await eventually(lambda: heard, "a change of the status")
            assert made.names("status listeners")

    run(story())
