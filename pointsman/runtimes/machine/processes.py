"""The engine processes of one worker, on the worker's side: started, stopped, watched and reaped through a supervisor.

Enters: processes to start, and signals, from the plane's side (`launches.py`). Leaves: reports of starts and ends, as
plain data that may cross a network. The one rule: the end of every process is reported, even if the supervisor or the
plane dies. The supervisor keeps a note about each process. The next plane adopts processes by these notes, and needs
its store only for processes that have lost their supervisor. An unknown process without a readable note is killed.
"""

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from pointsman.errors import PointsmanError
from pointsman.http.pool import SHORTAGES
from pointsman.reasons import Reason
from pointsman.runtimes.interface import BackgroundTasks, Timer
from pointsman.runtimes.machine import supervisor_link
from pointsman.runtimes.machine.children import now
from pointsman.runtimes.machine.logs import FOLDER, MAX_LINES, last_line, log_file, prune, written
from pointsman.runtimes.machine.store import StoredProcess
from pointsman.runtimes.machine.supervisor_link import (
    MARK,
    EngineProcess,
    Report,
    SupervisorLink,
    SupervisorProcess,
    SupervisorTerms,
    clear,
    open_supervisor,
)

HOST = "127.0.0.1"
LEASE_RETRY_S = 0.1
"""How often a worker without a lease checks whether it has one again."""
RETRY_S = 1.0
"""Pause after a failed start of the supervisor."""
UNSTARTED = {**SHORTAGES, errno.EADDRINUSE: "ports", errno.EADDRNOTAVAIL: "ports"}
"""By error number: what the plane or the supervisor lacks if a process cannot be started."""
LOST = "its supervisor died, and took it along"
SILENT_SIGNALS = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT})
"""Signals from outside. The last line of the log does not explain an end by these signals."""


class ProcessStart(msgspec.Struct, frozen=True):
    """A process to start."""

    process: StoredProcess
    argv: tuple[str, ...]
    env: dict[str, str | None]
    """Changes to the environment of the worker; None removes a variable."""
    folder: str
    """The working directory, if it exists on the worker."""
    outlives_s: float = 0.0
    """How long the process may keep running after the end of the lease of its worker."""


class InstanceStarted(msgspec.Struct, frozen=True, tag=True):
    """The process of an instance runs."""

    id: str
    pid: int
    born: str
    folder: str = ""
    """The folder in which the process runs, if that is not the requested folder."""


class InstanceEnded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The process of an instance has ended, or was not started."""

    id: str
    why: str
    errno: int = 0
    """The system's error number for the failed start; 0 if the system did not refuse the start."""
    code: int = 0
    """Its exit code."""
    lines: tuple[str, ...] = ()
    """The last lines of the process's log, if the process has failed."""
    port_is_free: bool = True
    folder: str = ""
    """The folder in which the process was meant to run, if that is not the requested folder."""


WorkerReport: TypeAlias = InstanceStarted | InstanceEnded


class Ports:
    """Free ports, a different one for each instance.

    If another program takes a port before the instance listens there, the instance ends, and gets another port.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self._taken: dict[str, int] = {}

    def take(self, instance_id: str) -> int:
        """A new port for an instance."""
        taken = set(self._taken.values())
        probes: list[socket.socket] = []
        try:
            while True:
                probe = socket.socket()
                probes.append(probe)  # kept open, so that the system returns another port each time
                probe.bind((self.host, 0))
                port = int(probe.getsockname()[1])
                if port not in taken:
                    self._taken[instance_id] = port
                    return port
        finally:
            for probe in probes:
                probe.close()

    def keep(self, instance_id: str, port: int) -> None:
        self._taken[instance_id] = port

    def release(self, instance_id: str) -> None:
        self._taken.pop(instance_id, None)

    def is_free(self, port: int) -> bool:
        with suppress(OSError), socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((self.host, port))
            return True
        return False


class WorkerTable:
    """Processes that were started or are about to be, and are not known to have ended; with their ports and logs."""

    def __init__(self, state: Path, host: str) -> None:
        self.ports = Ports(host)
        self.known: dict[str, StoredProcess] = {}
        self.folders: dict[str, str] = {}
        """The folders in which processes run whose own folder does not exist on this worker."""
        self.state = state

    def add(self, process: StoredProcess) -> None:
        self.known[process.id] = process
        self.ports.keep(process.id, process.port)

    def started(self, process: EngineProcess) -> StoredProcess | None:
        """Record that a process runs, and as which pid. Returns None if the process is unknown."""
        known = self.known.get(process.id)
        if known is not None:
            known = msgspec.structs.replace(known, pid=process.pid, born=process.born)
            self.add(known)
        return known

    def remove(self, instance_id: str) -> StoredProcess | None:
        """Remove a process that has ended. Returns None if the process is unknown."""
        self.ports.release(instance_id)
        self.folders.pop(instance_id, None)
        return self.known.pop(instance_id, None)

    def end_of(self, report: supervisor_link.ProcessExited) -> InstanceEnded:
        """The end of a process, with what its adapter needs to decide whether another try may succeed."""
        log, known = log_file(self.state, report.id), self.known.get(report.id)
        end = InstanceEnded(id=report.id, why=_exit_reason(report, log), code=report.code or 0)
        if not report.code or known is None:
            return end
        lines = tuple(written(log, MAX_LINES, MAX_LINES))
        return msgspec.structs.replace(end, lines=lines, port_is_free=self.ports.is_free(known.port))


class Processes:
    def __init__(
        self,
        state: Path,
        report: Callable[[WorkerReport], None],
        tasks: BackgroundTasks,
        terms: SupervisorTerms,
        host: str = HOST,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """`state` is a folder on the worker. `host` is where the processes of the worker listen. `environment` is their
        environment before changes."""
        self.table = WorkerTable(state, host)
        self.problem: Reason | None = None
        """Why there is no supervisor; None if there is one."""
        self._state = state
        self._report = report
        self._tasks = tasks
        self._terms = terms
        self._environment = environment
        self.supervisor: SupervisorLink | None = None
        """None while there is no supervisor."""
        self.renewal: dict[str, Any] = {}
        """The last renewal of the lease, for the next supervisor; empty if there is no lease."""
        self._known_supervisor: SupervisorProcess | None = None
        """The last known supervisor process."""
        self._is_lost = False
        """Whether the supervisor has hung up, and its processes have not been accounted for."""
        self._held: dict[str, Callable[[SupervisorLink], None]] = {}
        """Launches that wait for a supervisor, or for the end of an unknown process of the same name."""
        self._strangers: dict[str, int] = {}
        """Unknown processes, by name, which are being killed."""
        self._signals: dict[str, signal.Signals] = {}
        """The last signal for each process while there is no supervisor to pass it on."""
        self._replacing: Timer | None = None

    async def open(self, known: Iterable[StoredProcess]) -> list[StoredProcess]:
        """Find or start the supervisor. Returns the processes of an earlier plane that still run; all others ended."""
        for process in known:
            self.table.add(process)
        with suppress(OSError):  # without this folder there are no logs, which `prune` and the supervisor tolerate
            (self._state / FOLDER).mkdir(mode=0o700, exist_ok=True)
        prune(self._state, self.table.known)
        try:
            _, ended = await self._connect(is_first=True)
        except OSError as error:
            why = f"{error.strerror or error}: {error.filename or self._state}"
            raise PointsmanError(f"no supervisor can be started ({why}); choose another --state") from error
        for process in ended:
            self.table.remove(process.id)
        return sorted(self.table.known.values(), key=lambda one: one.id)

    def start(self, start: ProcessStart) -> None:
        """Start a process. Reports `InstanceStarted` and later `InstanceEnded`, or only `InstanceEnded`."""
        process = start.process
        self.table.add(process)
        note = msgspec.json.encode(process).decode()
        env = _environment(self._environment, start.env) | {MARK: process.id}
        folder = start.folder
        if not Path(folder).is_dir():
            folder = self.table.folders[process.id] = str(self._state)
        log = log_file(self._state, process.id)
        self._held[process.id] = lambda link: link.start(
            process.id, start.argv, env, folder, log, note, start.outlives_s
        )
        self._start_held()

    def stop(self, instance_id: str, *, kill: bool) -> None:
        """Signal the whole process group. A launch that waits for a supervisor is dropped."""
        number = signal.SIGKILL if kill else signal.SIGTERM
        if self._held.pop(instance_id, None) is not None:
            self._ended(InstanceEnded(id=instance_id, why="it was stopped before it was started"))
        elif instance_id not in self.table.known:
            self._report(InstanceEnded(id=instance_id, why="it has no process"))
        elif self.supervisor is not None:
            self.supervisor.signal(instance_id, number)
        else:
            self._signals[instance_id] = number

    async def close(self) -> None:
        """End all remaining processes, and the supervisor."""
        if self._replacing is not None:
            self._replacing.cancel()
        if self.supervisor is not None:
            supervisor, self.supervisor = self.supervisor, None
            await supervisor.end()
        for process in list(self.table.known.values()):
            await _clear(process)
            self.table.remove(process.id)

    # The supervisor

    async def _connect(self, *, is_first: bool = False) -> tuple[list[StoredProcess], list[StoredProcess]]:
        """Connect to a supervisor. Returns the processes that run and had no pid yet, and the processes that do not
        run. With `is_first`, the notes of the supervisor are newer than the table."""
        supervisor, running = await open_supervisor(self._state, self._terms, before=self._known_supervisor)
        self._known_supervisor = supervisor.process
        for noted in filter(None, map(_noted, running)) if is_first else ():
            self.table.add(noted)
        by_name = {one.id: one for one in running}
        found, ended = [], []
        for known in list(self.table.known.values()):
            process = by_name.get(known.id)
            if process is not None and known.pid in (None, process.pid):
                started = self.table.started(process)
                found += [started] if known.pid is None and started is not None else []
            elif known.id not in self._held:
                await _clear(known)
                ended.append(known)
        pids = {process.id: process.pid for process in self.table.known.values()}
        self._strangers = {one.id: one.pid for one in running if pids.get(one.id) != one.pid}
        for stranger in self._strangers:
            supervisor.signal(stranger, signal.SIGKILL)
        signals, self._signals = self._signals, {}
        for instance_id, number in signals.items():
            supervisor.signal(instance_id, number)
        if self.renewal:
            supervisor.ask(**self.renewal)
        self.supervisor = supervisor
        self.problem = None
        supervisor.listen(self._reported, self._lost)
        return found, ended

    def _lost(self) -> None:
        if self.supervisor is not None:
            self.supervisor, self._is_lost = None, True
            self.problem = Reason("supervisor-gone")
            if self._replacing is not None:
                self._replacing.cancel()
            self._replacing = self._tasks.complete("supervisor replacement", self._replace)

    async def _replace(self) -> None:
        """Connect again. If the old supervisor is dead, its processes are too. If it only hung up, nothing is lost."""
        if self._is_lost and self._known_supervisor is not None and await _has_ended(self._known_supervisor):
            for process in [one for one in self.table.known.values() if one.id not in self._held]:
                await _clear(process)
                self._ended(InstanceEnded(id=process.id, why=LOST))
        self._is_lost = False
        while self.supervisor is None:
            if self._terms.leased and self.renewal.get("stamp", 0.0) + self.renewal.get("lease_s", 0.0) < now():
                self.problem = Reason("lease-ended")
                await asyncio.sleep(LEASE_RETRY_S)  # another supervisor would end at once
                continue
            try:
                found, ended = await self._connect()
            except (PointsmanError, OSError) as error:
                self.problem = Reason("no-supervisor", {"error": str(error)})
                await asyncio.sleep(RETRY_S)
                continue
            for process in found:
                self._report(InstanceStarted(process.id, process.pid or 0, process.born))
            for process in ended:
                self._ended(InstanceEnded(id=process.id, why=LOST))
        self._start_held()

    def _start_held(self) -> None:
        if self.supervisor is not None:
            for instance_id in [one for one in self._held if one not in self._strangers]:
                self._held.pop(instance_id)(self.supervisor)

    def _reported(self, report: Report) -> None:
        try:
            self._take_in(report)
        except Exception as error:  # a bug in Pointsman: connect again, and compare what runs with the table
            self._tasks.failed("supervisor reports", error)
            if self.supervisor is not None:
                self.supervisor.hang_up()

    def _take_in(self, report: Report) -> None:
        match report:
            case supervisor_link.ProcessStarted():
                if self.table.started(EngineProcess(report.id, report.pid, report.born)) is not None:
                    folder = self.table.folders.get(report.id, "")
                    self._report(InstanceStarted(report.id, report.pid, report.born, folder))
            case supervisor_link.ProcessFailed():
                folder = self.table.folders.get(report.id, "")
                self._ended(InstanceEnded(id=report.id, why=report.why, errno=report.errno, folder=folder))
            case supervisor_link.ProcessExited() if self._strangers.get(report.id) == report.pid:
                del self._strangers[report.id]
                self._start_held()
            case supervisor_link.ProcessExited():
                self._ended(self.table.end_of(report))
            case supervisor_link.Confused():
                self.problem = Reason("supervisor-confused", {"why": report.why})

    def _ended(self, end: InstanceEnded) -> None:
        self._signals.pop(end.id, None)
        if self.table.remove(end.id) is not None:
            self._report(end)


def _noted(process: EngineProcess) -> StoredProcess | None:
    """The facts that the plane noted about a process when it started it; None if they are unreadable."""
    try:
        noted = msgspec.json.decode(process.note, type=StoredProcess)
    except msgspec.MsgspecError:
        return None
    return msgspec.structs.replace(noted, pid=process.pid, born=process.born) if noted.id == process.id else None


async def _clear(process: StoredProcess) -> None:
    """Kill the rest of the group of a process that has lost its supervisor."""
    if process.pid is not None:
        await clear(process.id, process.pid, process.born)


def _exit_reason(report: supervisor_link.ProcessExited, log: Path) -> str:
    line = last_line(log)
    if report.signal is None:
        return f"exit code {report.code}: {line}" if line else f"exit code {report.code}"
    try:
        name = signal.Signals(report.signal).name
    except ValueError:
        name = f"signal {report.signal}"
    return f"killed by {name}: {line}" if line and report.signal not in SILENT_SIGNALS else f"killed by {name}"


async def _has_ended(supervisor: SupervisorProcess) -> bool:
    """Whether a supervisor ends within 0.1 s of hanging up."""
    for _ in range(20):
        if not supervisor.lives:
            return True
        await asyncio.sleep(0.005)
    return False


def _environment(ours: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """An environment with an engine's additions; None removes a variable."""
    merged = {"PYTHONUNBUFFERED": "1", **ours, **changes}  # so that a Python engine's last output is in the log
    return {name: value for name, value in merged.items() if value is not None}
