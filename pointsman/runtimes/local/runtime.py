"""The runtime of one machine: processes under a supervisor, state in a folder, this machine as the only worker."""

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pointsman.config.plan import PointsmanPlan
from pointsman.control.desired import Address
from pointsman.control.events import Adopted, ControllerEvent, Exited, WorkerSeen
from pointsman.engines import LaunchSpec
from pointsman.errors import NotStored, PointsmanError
from pointsman.http.pool import descriptors_left
from pointsman.reasons import Reason
from pointsman.replica.handles import GATEWAYS
from pointsman.runtimes.interface import LoadTable, ProcessOrder, Tell, Timer, Unsaved
from pointsman.runtimes.machine.detection import detect, unseen
from pointsman.runtimes.machine.detection.system import this_machine
from pointsman.runtimes.machine.gpu_usage import GpuDrivers, GpuUsage
from pointsman.runtimes.machine.launches import Launches
from pointsman.runtimes.machine.logs import find_log, tail
from pointsman.runtimes.machine.memory import MEMORY, SharedFolder, memory_folder, replace_text
from pointsman.runtimes.machine.processes import HOST, Processes
from pointsman.runtimes.machine.state_directory import (
    SECRET_FILE,
    SOCKET,
    AdminSocket,
    Lock,
    by_cause,
    check_state,
)
from pointsman.runtimes.machine.store import (
    FILE,
    MOVE_AWAY,
    SqliteDocuments,
    SqliteTargets,
    SqliteUsage,
    Store,
)
from pointsman.runtimes.machine.supervisor_link import SupervisorTerms
from pointsman.runtimes.probes import HttpProbes
from pointsman.runtimes.tasks import LoopClock, Tasks
from pointsman.types import Worker

# What replicas and their plane share on this machine: a secret, the socket of their gateway, and memory.


STORE_RETRY_S = 1.0
"""How often the plane tries to store pending changes again."""
PYTHON_PATH = "PYTHONPATH"
ORPHANS_STOP_GRACE_S = 5.0
"""Time from SIGTERM to SIGKILL, if no plane has come back."""
LOOKING_FILES = 32
"""Files that may be open at once during detection, mostly those of GPU drivers."""


class LocalReplicaAccess:
    """`ReplicaAccess` of the interface. The secret is kept, so that replicas of an earlier plane trust this one."""

    def __init__(self, state: Path, memory: Path = MEMORY) -> None:
        self.socket = state / SOCKET
        """Where the gateway answers calls of replicas."""
        self.secret = _secret(state / SECRET_FILE)
        self.memory = SharedFolder(memory_folder(state, memory))

    def introduce(self, launch: LaunchSpec, user_config: bytes) -> LaunchSpec:
        environment = {
            "POINTSMAN_SECRET": self.secret,
            "POINTSMAN_SOCKET": str(self.socket),
            "POINTSMAN_SHM": str(self.memory.path),
            "POINTSMAN_USER_CONFIG": user_config.decode(),
        }
        return msgspec.structs.replace(launch, env={**launch.env, **environment, **_python_path(launch.env)})

    def reach_at(self, gateways: Sequence[str]) -> None:
        replace_text(self.socket.with_name(GATEWAYS), "\n".join(gateways))


def _python_path(env: Mapping[str, str | None]) -> dict[str, str]:
    """The Python path, in which folders of the replica come before those of the plane."""
    own, ours = env.get(PYTHON_PATH), os.environ.get(PYTHON_PATH)
    return {PYTHON_PATH: os.pathsep.join([own, ours])} if own and ours else {}


def _secret(file: Path) -> str:
    """The secret of the state directory; a new one, readable by its owner only, if there is none."""
    try:
        with suppress(FileNotFoundError):
            known = file.read_bytes().strip()
            if known and (not known.isascii() or not known.decode("ascii").isprintable()):
                raise PointsmanError(f"{file} holds something else than a secret; move it away")
            if known:
                return known.decode("ascii")
        made = secrets.token_urlsafe(32)
        unfinished = file.with_suffix(".new")
        unfinished.unlink(missing_ok=True)
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(made)
        unfinished.replace(file)
    except OSError as error:
        raise PointsmanError(f"{file} cannot be read or made ({error.strerror}); {by_cause(error)}") from error
    return made


class LocalRuntime:
    """`Runtime` of the interface. One per state directory."""

    documents: SqliteDocuments
    targets: SqliteTargets
    usage: SqliteUsage
    replicas: LocalReplicaAccess
    probes: HttpProbes
    _lock: Lock
    _store: Store
    _writing: Timer
    _processes: Processes
    _launches: Launches

    def __init__(
        self,
        state: Path | None,
        *,
        orphan_grace_s: float = 5.0,
        scrape_interval_s: float = 0.5,
        look_at_machine: Callable[..., Worker] = detect,
        gpu_drivers: GpuDrivers | None = None,
        tasks: Tasks | None = None,
    ) -> None:
        """`state` is the folder; None for a folder that is removed at the end. `orphan_grace_s` is how long processes
        live on without a plane. `tasks` runs background tasks; if None, they run by themselves."""
        loop = asyncio.get_running_loop()
        self.clock = LoopClock(loop)
        self.tasks = tasks or Tasks(loop)
        self.gpus = GpuUsage(gpu_drivers)
        self._is_temporary = state is None
        self._state = Path(tempfile.mkdtemp(prefix="pointsman-")) if state is None else state.absolute()
        self.admin = AdminSocket(self._state / SOCKET)
        self._orphan_grace_s = orphan_grace_s
        self._scrape_interval_s = scrape_interval_s
        self._look_at_machine = look_at_machine
        self._machine = this_machine()
        self._labels: dict[str, str] = {}
        self._tell: Tell | None = None
        """None before processes are adopted."""
        self._blind: Reason | None = None
        """What could not be detected on this machine, and what to do about it; None if everything was detected."""

    async def open(self) -> None:
        check_state(self._state)
        self._lock = Lock(self._state)
        try:
            self._store = Store(self._state)
        except BaseException:
            self._lock.release()
            if self._is_temporary:
                shutil.rmtree(self._state, ignore_errors=True)
            raise
        self.documents, self.targets, self.usage = self._store.documents, self._store.targets, self._store.usage
        self._writing = self.tasks.every("store", STORE_RETRY_S, self._store.behind.flush)

    async def adopt(self, tell: Tell, load: LoadTable) -> Sequence[Adopted]:
        def told(event: ControllerEvent) -> None:
            if isinstance(event, Exited):
                self.probes.forget(event.instance_id)
            tell(event)

        self.replicas = LocalReplicaAccess(self._state)
        self.probes = HttpProbes(tell, load, self.clock, self.tasks, self._scrape_interval_s)
        self._launches = Launches(self._store.processes, told, self.tasks)
        terms = SupervisorTerms(self._orphan_grace_s, ORPHANS_STOP_GRACE_S)
        processes = Processes(self._state, self._launches.take_in, self.tasks, terms)
        running = await processes.open(self._launches.stored)
        try:
            adopted = self._launches.adopt(running)
        except msgspec.MsgspecError as error:
            raise PointsmanError(f"{self._state / FILE} cannot be used ({error}); {MOVE_AWAY}") from error
        if not adopted:
            self.replicas.memory.clear()
        self._processes, self._tell = processes, tell
        return adopted

    def launch(self, order: ProcessOrder) -> None:
        ports, name = self._processes.table.ports, order.instance_id
        try:
            start = self._launches.prepare(order, HOST, ports.take(name))
        except OSError as error:
            self._launches.failed(name, error)
            return
        if start is None:
            ports.release(name)
        else:
            self._processes.start(start)

    def stop(self, instance_id: str, *, kill: bool = False) -> None:
        self._processes.stop(instance_id, kill=kill)

    def address(self, instance_id: str) -> Address | None:
        return self._launches.address(instance_id)

    async def logs(self, instance_id: str, lines: int) -> str | None:
        file = find_log(self._state, instance_id)
        return None if file is None else tail(file, lines)

    def look_at_workers(self, plan: PointsmanPlan) -> None:
        self._labels = plan.worker_labels()
        if not descriptors_left(LOOKING_FILES):  # GPUs that cannot be seen now are not gone
            self._blind = Reason("machine-not-seen", {"cause": "files"})
            return
        try:
            worker = self._look_at_machine(
                [one.pid for one in self._launches.all() if one.pid is not None], labels=self._labels
            )
        except Exception as error:  # an error of a driver; without places, everything still runs
            self._blind = Reason("machine-not-detected", {"error": f"{type(error).__name__}: {error}"})
            return
        worker = msgspec.structs.replace(worker, price_per_gpu_hour=plan.worker_price())
        self._blind = unseen(worker)
        self.gpus.see(worker)
        if (
            worker.memory_bytes and self._tell is not None
        ):  # if the system does not report the memory, there are no places
            self._tell(WorkerSeen(worker))

    def problems(self) -> list[Reason]:
        if self._tell is None:
            return []
        own = [*self.probes.problems(), *self._launches.problems()]
        return [*own, *filter(None, [self._blind, self._processes.problem, self._store.problem])]

    def unsaved(self) -> Unsaved:
        return Unsaved(len(self._store.behind), self._store.behind.failures)

    def facts(self) -> dict[str, Any]:
        worker = {**msgspec.to_builtins(self._machine), "labels": self._labels}
        return {"state_dir": str(self._state), "pid": os.getpid(), "worker": worker}

    async def close(self) -> None:
        if self._tell is not None:
            self._tell = None
            self.probes.close()
            await self._processes.close()
            self._launches.adopt(())
            self.replicas.memory.close()
        self._writing.cancel()
        self._store.close()
        if self._store.problem:
            self.tasks.failed("store", NotStored(str(self._store.problem)))
        self._lock.release()
        if self._is_temporary:
            shutil.rmtree(self._state, ignore_errors=True)
