"""One node of the cluster, on its own side: an actor that is pinned to it, and uses the supervisor of its engines.

Enters: calls of the plane, each with the plane's epoch. Leaves: reports, which the plane fetches by long polls. The one
rule: the actor holds nothing that must survive it. Engines are children of the supervisor, which runs in a session of
its own. It ends them when the lease is over, even if actor and raylet are gone.
"""

import asyncio
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from pointsman.errors import PointsmanError
from pointsman.reasons import Reason
from pointsman.replica.handles import GATEWAYS
from pointsman.runtimes.interface import Timer
from pointsman.runtimes.machine.children import now
from pointsman.runtimes.machine.detection import detect
from pointsman.runtimes.machine.gpu_usage import GpuDrivers, GpuUsage
from pointsman.runtimes.machine.logs import find_log, tail
from pointsman.runtimes.machine.memory import SWEEP_S, NodeMemory, replace_text
from pointsman.runtimes.machine.processes import Processes, ProcessStart, WorkerReport
from pointsman.runtimes.machine.store import StoredProcess
from pointsman.runtimes.machine.supervisor_link import SupervisorTerms
from pointsman.runtimes.tasks import Tasks
from pointsman.types import Gpu, Worker

POLL_S = 0.3
"""How long a poll waits for a report. The lease is renewed about as often."""
RAYLET_WATCH_S = 0.05
OURS = ("RAY_", "PYTHONBREAKPOINT")
"""Environment variables of the raylet that engines do not get."""


class OlderPlane(PointsmanError):
    """A newer plane is in charge of this node."""


class NodeAnswer(msgspec.Struct, frozen=True):
    """The answer to a poll."""

    stamp: float
    """The node's clock."""
    reports: tuple[tuple[int, WorkerReport], ...]
    """Numbered reports, oldest first. They are repeated until a later poll confirms them."""
    problem: Reason | None = None
    busy: Mapping[int, float] = {}
    """The share in use of the GPUs that the poll has asked for."""
    failures: Mapping[str, tuple[int, str]] = {}
    """How often background tasks of the node have failed, and the last error of each."""


class NodeOpened(msgspec.Struct, frozen=True):
    running: tuple[StoredProcess, ...]
    worker: Worker
    """The node as detected on the node itself; its GPUs are those that drivers report."""
    python: str
    pid: int
    failures: Mapping[str, tuple[int, str]] = {}
    """Failures of background tasks under earlier planes."""


class NodeAgent:
    """The actor of a node. The plane creates it once per node; later planes find it by its name."""

    def __init__(
        self, name: str, folder: str, host: str, stop_grace_s: float, drivers: GpuDrivers | None = None
    ) -> None:
        """`folder` is for socket and logs. `host` is where engines listen. `drivers` are those of GPUs (default: the
        installed drivers)."""
        self._name, self._folder, self._host = name, Path(folder).expanduser(), host
        self._gateway = self._folder / "gateway"
        """A file with the address of the plane, for gateways and replicas."""
        self._calls = ""
        self._memory: NodeMemory | None = None
        self._gpus = GpuUsage(drivers)
        self._stop_grace_s = stop_grace_s
        self._epoch = 0
        self._processes: Processes | None = None
        self._tasks: Tasks | None = None
        """Made by the first plane."""
        self._sweeping: Timer | None = None
        self._opening = asyncio.Lock()
        self._reports: list[tuple[int, WorkerReport]] = []
        self._count = 0
        self._came = asyncio.Event()

    async def open(
        self,
        epoch: int,
        known: Sequence[StoredProcess],
        keep: Collection[str] | None,
        gateway: str = "",
        secret: str = "",
    ) -> NodeOpened:
        """Begin to serve a plane. `known`: what should run here, according to the plane's store. Processes that are
        not in `keep` are killed; if it is None, a plane that has just started adopts all processes. `gateway`: where
        replicas reach the plane. `secret`: the secret of its replicas."""
        self._check(epoch)
        failures = {} if self._tasks is None else self._tasks.reasons()
        async with self._opening:
            if self._tasks is None:
                self._tasks = Tasks(asyncio.get_running_loop())
                self._tasks.keep("raylet watch", _end_with_raylet)
            if self._processes is None:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                tasks, terms = self._tasks, SupervisorTerms(0.0, self._stop_grace_s, leased=True)
                processes = Processes(self._folder, self._report, tasks, terms, self._host, _environment())
                await processes.open(known)
                self._memory = NodeMemory(self._folder, self._name, self._host)
                await self._memory.open(is_used=bool(processes.table.known))
                self._sweeping = tasks.every("shared memory sweep", SWEEP_S, self._memory.sweep)
                self._processes = processes
        processes = self._ready(epoch)
        replace_text(self._gateway, gateway)
        assert self._memory is not None, "it was opened with the processes"
        self._memory.secret = secret.encode()
        self._reports.clear()
        there = tuple(one for one in processes.table.known.values() if keep is None or one.id in keep)
        for one in [one for one in processes.table.known if keep is not None and one not in keep]:
            processes.stop(one, kill=True)
        return NodeOpened(there, await self.look(epoch), sys.executable, os.getpid(), failures)

    async def poll(
        self,
        epoch: int,
        stamp: float | None,
        lease_s: float,
        after: int | None,
        gpus: Sequence[Gpu] = (),
        calls: str | None = None,
    ) -> NodeAnswer:
        """Renew the lease and fetch reports. `stamp` is from an earlier answer. `after` is the last report that has
        arrived; with None, only the lease is renewed. `gpus` are those whose use is wanted. `calls` are the addresses
        at which gateways take calls from replicas, one per line; None if they have not changed."""
        processes = self._ready(epoch)
        if calls is not None and calls != self._calls:
            replace_text(self._folder / GATEWAYS, calls)
            self._calls = calls
        assert self._tasks is not None, "they were made before the processes"
        if stamp is not None:
            processes.renewal = {"ask": "renew", "epoch": epoch, "stamp": stamp, "lease_s": lease_s}
            if processes.supervisor is not None:
                processes.supervisor.ask(**processes.renewal)
        if after is not None:
            self._reports = [one for one in self._reports if one[0] > after]
            if not self._reports:
                self._came.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._came.wait(), POLL_S)
        busy = await self._gpus.measured(gpus) if gpus else {}
        self._check(epoch)
        reports, failures = tuple(self._reports) if after is not None else (), self._tasks.reasons()
        return NodeAnswer(now(), reports, processes.problem, busy, failures)

    async def reserve(self, epoch: int, instance_id: str) -> int:
        """A port for an instance."""
        return self._ready(epoch).table.ports.take(instance_id)

    async def start(self, epoch: int, start: ProcessStart, python: str) -> None:
        """Start a process. `python` is the interpreter of the plane. This node's interpreter replaces it."""
        argv = (sys.executable, *start.argv[1:]) if start.argv[0] == python else start.argv
        processes = self._ready(epoch)
        assert self._memory is not None, "it was opened with the processes"
        env = {**start.env, "POINTSMAN_GATEWAY": str(self._gateway), "POINTSMAN_HOST": self._host}
        env |= self._memory.environment
        processes.start(msgspec.structs.replace(start, argv=argv, env=env))

    async def stop(self, epoch: int, instance_id: str, kill: bool) -> None:
        self._ready(epoch).stop(instance_id, kill=kill)

    async def logs(self, epoch: int, instance_id: str, lines: int) -> str | None:
        file = find_log(self._folder, instance_id)
        return None if file is None else tail(file, lines)

    async def look(self, epoch: int) -> Worker:
        """Measure again the resources of this machine, and what other programs use of them."""
        pids = [one.pid for one in self._ready(epoch).table.known.values() if one.pid is not None]
        return await asyncio.to_thread(detect, pids, environ=_environment())

    async def close(self, epoch: int) -> None:
        """End everything."""
        self._check(epoch)
        if self._processes is not None:
            await self._processes.close()
            self._processes = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._sweeping is not None:
            self._sweeping.cancel()

    def _check(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise OlderPlane(f"a newer plane (epoch {self._epoch}) is in charge of {self._name}")
        self._epoch = epoch

    def _ready(self, epoch: int) -> Processes:
        self._check(epoch)
        if self._processes is None:
            raise PointsmanError(f"{self._name} is not open")
        return self._processes

    def _report(self, report: WorkerReport) -> None:
        self._count += 1
        self._reports.append((self._count, report))
        self._came.set()


async def _end_with_raylet() -> None:
    """Exit when the raylet is gone: Ray may leave its actors running. Engines end with their lease."""
    raylet = int(os.environ.get("RAY_RAYLET_PID", "0"))
    while not raylet or os.getppid() == raylet:
        await asyncio.sleep(RAYLET_WATCH_S)
    os._exit(1)


def _environment() -> dict[str, str]:
    """The environment in which the node was started: Ray changes that of its actors."""
    variables = dict(os.environ)
    with suppress(OSError, UnicodeDecodeError):
        raylet = Path(f"/proc/{os.environ.get('RAY_RAYLET_PID', '')}/environ").read_bytes().decode()
        variables = dict(line.split("=", 1) for line in raylet.split("\0") if "=" in line)
    return {name: value for name, value in variables.items() if not name.startswith(OURS)}
