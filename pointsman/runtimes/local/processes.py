"""The engine processes of a plane: started, stopped, adopted and reaped through the supervisor, known to the store.

Enters: orders. Leaves: `Launched`, `LaunchFailed` and `Exited`. The one rule: every process has an end that is told,
whatever dies: engine, supervisor or plane.

The table of this plane knows every process. So does the store, unless it cannot be written: a process is stored before
it is started, and if that fails it is started all the same, because repair matters more. So does the supervisor, which
keeps what the table knows as a note: the next plane adopts by these notes, and needs the store only for processes that
have lost their supervisor. A process without a readable note that the store does not know is killed.
"""

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from pointsman.control.desired import Address
from pointsman.control.events import Adopted, Exited, Launched, LaunchFailed
from pointsman.engines import ProcessEnd
from pointsman.errors import PointsmanError, shown
from pointsman.http.pool import SHORTAGES, local_cause
from pointsman.placement.asks import Place
from pointsman.reasons import Reason
from pointsman.runtimes.interface import BackgroundTasks, CannotStart, ProcessOrder, Tell, Timer
from pointsman.runtimes.local import supervisor_link
from pointsman.runtimes.local.store import FILE, MOVE_AWAY, SqliteProcesses, StoredProcess
from pointsman.runtimes.local.supervisor_link import (
    MARK,
    EngineProcess,
    Report,
    SupervisorLink,
    SupervisorProcess,
    clear,
    open_supervisor,
)

# The logs of engines, as the supervisor writes them: a file per instance, and the older half of it as `.1`.


FOLDER = "logs"
OURS = "[pointsman] "
"""Prefix of the supervisor's own lines."""
PIECE = 64 * 1024
MAX_REASON = 300
"""Characters of a last line that is quoted."""
MAX_LINES = 2000
"""Lines of a process that has not started that its adapter looks at: the usage of a server may be long."""
MAX_LOGS = 100
"""Of instances that are gone; older ones are removed."""


def log_file(state: Path, instance_id: str) -> Path:
    if "/" in instance_id or "\0" in instance_id or instance_id.startswith("."):
        raise PointsmanError(f'"{shown(instance_id)}" is not the name of an instance')
    return state / FOLDER / f"{instance_id}.log"


def tail(file: Path, lines: int) -> str:
    """The last lines of a log, across its two files; empty if there is none."""
    text = _end_of(file, lines)
    missing = lines - len(text)
    if missing > 0:
        text = _end_of(file.with_name(f"{file.name}.1"), missing) + text
    return "".join(f"{line}\n" for line in text)


def written(file: Path, lines: int = 1, among: int = 50) -> list[str]:
    """The last lines that a process wrote since it was last started, without empty ones."""
    found: list[str] = []
    for line in reversed(_end_of(file, among)):
        if line.startswith(OURS):
            if " started as process " in line:
                break
        elif line.strip():
            text = line.strip()
            found.append(text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}...")
            if len(found) == lines:
                break
    return found[::-1]


def last_line(file: Path) -> str:
    """The last line that a process wrote since it was last started; empty if it wrote none."""
    return next(iter(written(file)), "")


def prune(state: Path, known: Container[str]) -> None:
    """Remove the oldest logs of instances that are not `known`, as far as the disk lets them be removed."""
    logs: list[tuple[float, Path]] = []
    with suppress(OSError):
        found = [file for file in (state / FOLDER).glob("*.log") if file.stem not in known]
        logs = [(file.stat().st_mtime, file) for file in found]
    for _, file in sorted(logs, reverse=True)[MAX_LOGS:]:
        with suppress(OSError):
            file.with_name(f"{file.name}.1").unlink(missing_ok=True)
            file.unlink(missing_ok=True)


def _end_of(file: Path, lines: int) -> list[str]:
    if lines <= 0:
        return []
    try:
        with file.open("rb") as log:
            offset = log.seek(0, os.SEEK_END)
            found = b""
            while offset and found.count(b"\n") <= lines:
                size = min(PIECE, offset)
                offset -= size
                log.seek(offset)
                found = log.read(size) + found
    except OSError:
        return []
    # Not splitlines: progress bars write \r and other separators within a line.
    return found.decode("utf-8", "replace").removesuffix("\n").split("\n")[-lines:] if found else []


HOST = "127.0.0.1"
ORPHANS_STOP_GRACE_S = 5.0
"""From SIGTERM to SIGKILL when no plane has come back."""
RETRY_S = 1.0
"""After a supervisor could not be started."""
UNSTARTED = {**SHORTAGES, errno.EADDRINUSE: "ports", errno.EADDRNOTAVAIL: "ports"}
"""What the plane or the supervisor is short of when a process cannot be started, by error."""
UNRUNNABLE = frozenset({
    errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.E2BIG
})  # fmt: skip
"""Errors of programs that can never be run as they are."""
LOST = "its supervisor died, and took it along"
SILENT_SIGNALS = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT})
"""Signals from outside: the last line of the log does not explain them."""


class Ports:
    """Free ports, a different one for each instance.

    Another program may take a port before its instance listens: then the instance ends, and gets another port.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._taken: dict[str, int] = {}

    def take(self, instance_id: str) -> int:
        """A port for an instance, in place of the one that it had."""
        taken = set(self._taken.values())
        probes: list[socket.socket] = []
        try:
            while True:
                probe = socket.socket()
                probes.append(probe)  # kept open, so that the system offers another each time
                probe.bind((self._host, 0))
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


class ProcessTable:
    """Processes that were started or are about to be, and are not known to have ended. The store follows."""

    def __init__(self, store: SqliteProcesses) -> None:
        self.ports = Ports(HOST)
        self._store = store
        self._known = {process.id: process for process in store.found}
        for process in self._known.values():
            self.ports.keep(process.id, process.port)

    def all(self) -> list[StoredProcess]:
        return list(self._known.values())

    def address(self, instance_id: str) -> Address | None:
        known = self._known.get(instance_id)
        return None if known is None else Address(known.host, known.port, False)

    def add(self, process: StoredProcess) -> None:
        if self._known.get(process.id) != process:
            self._known[process.id] = process
            self.ports.keep(process.id, process.port)
            self._store.save(process)

    def started(self, process: EngineProcess) -> StoredProcess | None:
        """The process runs as this pid; None if it is unknown."""
        known = self._known.get(process.id)
        if known is not None:
            known = msgspec.structs.replace(known, pid=process.pid, born=process.born)
            self.add(known)
        return known

    def remove(self, instance_id: str) -> StoredProcess | None:
        """The process has ended. None if it is unknown."""
        self.ports.release(instance_id)
        self._store.forget(instance_id)
        return self._known.pop(instance_id, None)


class Orders:
    """The orders of processes that this plane has started or is about to: they know whether another try may help."""

    def __init__(self, state: Path, tasks: BackgroundTasks) -> None:
        self._state, self._tasks = state, tasks
        self.given: dict[str, tuple[ProcessOrder, str, int]] = {}
        """With program and port."""

    def folder(self, order: ProcessOrder) -> str:
        """Where its process runs: in the folder of the manifest, if this machine has it."""
        return order.folder if Path(order.folder).is_dir() else str(self._state)

    def problems(self) -> list[str]:
        """Of instances that do not run in the folder of their manifest."""
        folders = {order.folder: (name, self.folder(order)) for name, (order, _, _) in self.given.items()}
        astray = {folder: there for folder, there in folders.items() if folder != there[1]}
        facts = [{"folder": folder, "instance": name, "used": used} for folder, (name, used) in astray.items()]
        return [str(Reason("no-folder", one)) for one in facts]

    def unrunnable(self, report: supervisor_link.ProcessFailed) -> Reason | None:
        """Why a program can never be run; None if it may be."""
        if report.id not in self.given or report.errno not in UNRUNNABLE:
            return None
        order, program, _ = self.given[report.id]
        folder = self.folder(order)
        folder = "" if folder == order.folder else f"{folder}, as there is no {order.folder}"
        facts = {"program": program, "why": os.strerror(report.errno), "folder": folder, "remedy": order.remedy}
        return Reason("no-program", facts)

    def why_final(self, report: supervisor_link.ProcessExited, log: Path) -> Reason | None:
        """Why no further start can succeed after this end; None if one may."""
        if report.id not in self.given or not report.code:
            return None
        order, _, port = self.given[report.id]
        try:
            return order.why_final(ProcessEnd(report.code, written(log, MAX_LINES, MAX_LINES), _is_free(port)))
        except Exception as error:  # an adapter of the user's own
            self._tasks.failed("engine adapters", error)
            return None


def _is_free(port: int) -> bool:
    with suppress(OSError), socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind((HOST, port))
        return True
    return False


class Processes:
    def __init__(
        self, state: Path, store: SqliteProcesses, tell: Tell, tasks: BackgroundTasks, *, orphan_grace_s: float
    ) -> None:
        self.table = ProcessTable(store)
        self.problem = ""
        """Why there is no supervisor; empty if there is one."""
        self._state = state
        self._tell = tell
        self._tasks = tasks
        self._grace_s = orphan_grace_s
        self._supervisor: SupervisorLink | None = None
        self._known_supervisor: SupervisorProcess | None = None
        """The last that was there."""
        self._is_lost = False
        """It has hung up, and its processes are not accounted for."""
        self._held: dict[str, Callable[[SupervisorLink], None]] = {}
        """Launches that wait for a supervisor, or for a stranger of the same name to end."""
        self._strangers: dict[str, int] = {}
        """Processes that the store does not know, by name: they are being killed."""
        self._signals: dict[str, signal.Signals] = {}
        """The last signal of each process, while there is no supervisor to pass it on."""
        self._replacing: Timer | None = None
        self.orders = Orders(state, tasks)

    async def open(self) -> list[Adopted]:
        """Find or start the supervisor. Returns what still runs from an earlier plane."""
        with suppress(OSError):  # without it there are no logs, which `prune` and the supervisor take
            (self._state / FOLDER).mkdir(mode=0o700, exist_ok=True)
        prune(self._state, {process.id for process in self.table.all()})
        try:
            _, ended = await self._connect(is_first=True)
        except OSError as error:
            why = f"{error.strerror or error}: {error.filename or self._state}"
            raise PointsmanError(f"no supervisor can be started ({why}); choose another --state") from error
        for process in ended:
            self.table.remove(process.id)
        try:
            return [_adopted(process) for process in self.table.all()]
        except msgspec.MsgspecError as error:
            raise PointsmanError(f"{self._state / FILE} cannot be used ({error}); {MOVE_AWAY}") from error

    def launch(self, order: ProcessOrder) -> None:
        name = order.instance_id
        try:
            port = self.table.ports.take(name)
            launch = order.launch(HOST, port)
        except CannotStart as error:
            self.table.ports.release(name)
            self._tell(LaunchFailed(name, str(error), final=error.reason))
            return
        except Exception as error:  # an adapter of the user's own; or no port is left
            self.table.ports.release(name)
            self._tell(LaunchFailed(name, f"{type(error).__name__}: {error}", local_cause(error, UNSTARTED)))
            return
        place = "" if order.place is None else msgspec.json.encode(order.place).decode()
        process = StoredProcess(name, order.deployment, order.recipe, HOST, port, place=place)
        note = msgspec.json.encode(process).decode()
        # Before it is started: a plane that is killed in between leaves no process that the store does not know.
        self.table.add(process)
        self.orders.given[name] = order, launch.argv[0], port
        env = _environment(os.environ, launch.env) | {MARK: name}
        folder = self.orders.folder(order)
        log = log_file(self._state, name)
        self._held[name] = lambda supervisor: supervisor.start(name, launch.argv, env, folder, log, note)
        self._start_held()

    def stop(self, instance_id: str, *, kill: bool) -> None:
        """Signal the whole process group. A launch that waits for a supervisor is dropped."""
        number = signal.SIGKILL if kill else signal.SIGTERM
        if self._held.pop(instance_id, None) is not None:
            self._ended(instance_id, "it was stopped before it was started")
        elif self.table.address(instance_id) is None:
            self._tell(Exited(instance_id, "it has no process"))
        elif self._supervisor is not None:
            self._supervisor.signal(instance_id, number)
        else:
            self._signals[instance_id] = number

    async def close(self) -> None:
        """End whatever is left, and the supervisor."""
        if self._replacing is not None:
            self._replacing.cancel()
        if self._supervisor is not None:
            supervisor, self._supervisor = self._supervisor, None
            await supervisor.end()
        for process in self.table.all():
            await _clear(process)
            self.table.remove(process.id)

    # The supervisor

    async def _connect(self, *, is_first: bool = False) -> tuple[list[StoredProcess], list[StoredProcess]]:
        """Connect to a supervisor. Returns processes that run and had no pid yet, and those that do not run.
        `is_first`: its notes are newer than the table, which comes from the store."""
        supervisor, running = await open_supervisor(
            self._state, grace_s=self._grace_s, stop_grace_s=ORPHANS_STOP_GRACE_S, before=self._known_supervisor
        )
        self._known_supervisor = supervisor.process
        for noted in filter(None, map(_noted, running)) if is_first else ():
            self.table.add(noted)
        by_name = {one.id: one for one in running}
        found, ended = [], []
        for known in self.table.all():
            process = by_name.get(known.id)
            if process is not None and known.pid in (None, process.pid):
                started = self.table.started(process)
                found += [started] if known.pid is None and started is not None else []
            elif known.id not in self._held:
                await _clear(known)
                ended.append(known)
        pids = {process.id: process.pid for process in self.table.all()}
        self._strangers = {one.id: one.pid for one in running if pids.get(one.id) != one.pid}
        for stranger in self._strangers:
            supervisor.signal(stranger, signal.SIGKILL)
        signals, self._signals = self._signals, {}
        for instance_id, number in signals.items():
            supervisor.signal(instance_id, number)
        self._supervisor = supervisor
        self.problem = ""
        supervisor.listen(self._reported, self._lost)
        return found, ended

    def _lost(self) -> None:
        if self._supervisor is not None:
            self._supervisor, self._is_lost = None, True
            self.problem = "the supervisor of the engine processes is gone; another is being started"
            if self._replacing is not None:
                self._replacing.cancel()
            self._replacing = self._tasks.complete("supervisor replacement", self._replace)

    async def _replace(self) -> None:
        """If the old one is dead, so are its processes. If it only hung up, nothing is lost."""
        if self._is_lost and self._known_supervisor is not None and await _has_ended(self._known_supervisor):
            for process in [one for one in self.table.all() if one.id not in self._held]:
                await _clear(process)
                self._ended(process.id, LOST)
        self._is_lost = False
        while self._supervisor is None:
            try:
                found, ended = await self._connect()
            except (PointsmanError, OSError) as error:
                self.problem = f"no supervisor can be started: {error}"
                await asyncio.sleep(RETRY_S)
                continue
            for process in found:
                self._tell(Launched(process.id, str(process.pid or 0), process.host, process.port))
            for process in ended:
                self._ended(process.id, LOST)
        self._start_held()

    def _start_held(self) -> None:
        if self._supervisor is not None:
            for instance_id in [one for one in self._held if one not in self._strangers]:
                self._held.pop(instance_id)(self._supervisor)

    def _reported(self, report: Report) -> None:
        try:
            self._take_in(report)
        except Exception as error:  # a defect of ours: connect again, and compare what runs with what is known
            self._tasks.failed("supervisor reports", error)
            if self._supervisor is not None:
                self._supervisor.hang_up()

    def _take_in(self, report: Report) -> None:
        match report:
            case supervisor_link.ProcessStarted():
                known = self.table.started(EngineProcess(report.id, report.pid, report.born))
                if known is not None:
                    self._tell(Launched(known.id, str(report.pid), known.host, known.port))
            case supervisor_link.ProcessFailed():
                self._ended(report.id, report.why, UNSTARTED.get(report.errno, ""), self.orders.unrunnable(report))
            case supervisor_link.ProcessExited() if self._strangers.get(report.id) == report.pid:
                del self._strangers[report.id]
                self._start_held()
            case supervisor_link.ProcessExited():
                log = log_file(self._state, report.id)
                self._ended(report.id, _exit_reason(report, log), final=self.orders.why_final(report, log))
            case supervisor_link.Confused():
                self.problem = f"the plane and its supervisor did not understand each other: {report.why}"

    def _ended(self, instance_id: str, why: str, local: str = "", final: Reason | None = None) -> None:
        known = self.table.remove(instance_id)
        self._signals.pop(instance_id, None)
        self.orders.given.pop(instance_id, None)
        if known is not None:
            failed = LaunchFailed(instance_id, why, local, final)
            self._tell(failed if known.pid is None else Exited(instance_id, why, final))


def _adopted(process: StoredProcess) -> Adopted:
    return Adopted(
        process.id,
        process.deployment,
        process.recipe,
        process.host,
        process.port,
        str(process.pid or 0),
        msgspec.json.decode(process.place, type=Place) if process.place else None,
    )


def _noted(process: EngineProcess) -> StoredProcess | None:
    """What the plane that started a process knew of it; None if that is unreadable."""
    try:
        noted = msgspec.json.decode(process.note, type=StoredProcess)
    except msgspec.MsgspecError:
        return None
    return msgspec.structs.replace(noted, pid=process.pid, born=process.born) if noted.id == process.id else None


async def _clear(process: StoredProcess) -> None:
    """Kill what is left of the group of a process that has lost its supervisor."""
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
    """Whether it ends within 0.1 s of hanging up."""
    for _ in range(20):
        if not supervisor.lives:
            return True
        await asyncio.sleep(0.005)
    return False


def _environment(ours: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of the plane with an engine's additions; None removes a variable."""
    merged = {"PYTHONUNBUFFERED": "1", **ours, **changes}  # so that a Python engine's last output is in the log
    return {name: value for name, value in merged.items() if value is not None}
