"""The engine processes of a plane, on the plane's side: orders become starts, and reports of workers become events.

Enters: orders, and reports of `processes.py`. Leaves: `Launched`, `LaunchFailed` and `Exited`. The one rule: a process
is in the table, and so in the store, before it is started. If the store cannot be written, the process is started
anyway, because recovery matters more.
"""

import errno
import os
from collections.abc import Iterable

import msgspec

from pointsman.control.desired import Address
from pointsman.control.events import Adopted, Exited, Launched, LaunchFailed
from pointsman.engines import ProcessEnd
from pointsman.http.pool import local_cause
from pointsman.placement.asks import Place
from pointsman.reasons import Reason
from pointsman.runtimes.interface import BackgroundTasks, CannotStart, ProcessOrder, Tell
from pointsman.runtimes.machine.processes import (
    UNSTARTED,
    InstanceEnded,
    InstanceStarted,
    ProcessStart,
    WorkerReport,
)
from pointsman.runtimes.machine.store import SqliteProcesses, StoredProcess

UNRUNNABLE = frozenset({
    errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.E2BIG
})  # fmt: skip
"""Errors that show that a program can never run in its present form."""


class Launches:
    """Processes that were started or are about to be, and are not known to have ended. The store follows this table."""

    def __init__(self, store: SqliteProcesses, tell: Tell, tasks: BackgroundTasks) -> None:
        self.stored = tuple(store.found)
        """The processes that an earlier plane has left in the store."""
        self._store = store
        self._tell = tell
        self._tasks = tasks
        self._known = {process.id: process for process in store.found}
        self._given: dict[str, tuple[ProcessOrder, str]] = {}
        """Orders of this plane with their programs; an order tells whether another try may succeed."""
        self._astray: dict[str, tuple[str, str]] = {}
        """The folder that an instance's worker lacks, and the folder in which it runs instead, by instance."""

    def all(self) -> list[StoredProcess]:
        return list(self._known.values())

    def address(self, instance_id: str) -> Address | None:
        known = self._known.get(instance_id)
        return Address(known.host, known.port, False) if known is not None else None

    def adopt(self, running: Iterable[StoredProcess]) -> list[Adopted]:
        """Take over the processes that run, and no others. Raises `msgspec.MsgspecError` if the place of a process
        cannot be read."""
        there = {process.id: process for process in running}
        for name in [name for name in self._known if name not in there]:
            self._remove(name)
        for process in there.values():
            self._add(process)
        return [_adopted(process) for process in there.values()]

    def prepare(self, order: ProcessOrder, host: str, port: int, worker: str = "") -> ProcessStart | None:
        """The process that a worker must start at a port that it chose. None if that fails, which is reported."""
        name = order.instance_id
        try:
            launch = order.launch(host, port)
        except Exception as error:  # a user's own adapter
            self.failed(name, error)
            return None
        place = "" if order.place is None else msgspec.json.encode(order.place).decode()
        process = StoredProcess(name, order.deployment, order.recipe, host, port, place=place, worker=worker)
        # Stored before the start: a plane that is killed in between leaves no process that is not in the store.
        self._add(process)
        self._given[name] = order, launch.argv[0]
        return ProcessStart(process, tuple(launch.argv), dict(launch.env), order.folder)

    def failed(self, instance_id: str, error: Exception) -> None:
        """Report that nothing was started, because of this error of the runtime or of an adapter."""
        if isinstance(error, CannotStart):
            self._tell(LaunchFailed(instance_id, str(error), final=error.reason))
        else:
            cause = local_cause(error, UNSTARTED)
            self._tell(LaunchFailed(instance_id, f"{type(error).__name__}: {error}", cause))

    def take_in(self, report: WorkerReport) -> None:
        known = self._known.get(report.id)
        if known is None:
            if isinstance(report, InstanceEnded):
                self._tell(Exited(report.id, report.why))
            return
        order, program = self._given.get(report.id, (None, ""))
        if report.folder and order is not None:
            self._astray[report.id] = order.folder, report.folder
        if isinstance(report, InstanceStarted):
            self._add(msgspec.structs.replace(known, pid=report.pid, born=report.born))
            self._tell(Launched(known.id, str(report.pid), known.host, known.port))
            return
        final = None if order is None else self._why_final(report, order, program)
        self._remove(report.id)
        failed = LaunchFailed(report.id, report.why, UNSTARTED.get(report.errno, ""), final)
        self._tell(failed if known.pid is None else Exited(report.id, report.why, final))

    def problems(self) -> list[Reason]:
        """Problems of instances that do not run in the folder of their manifest."""
        by_folder = {folder: (name, used) for name, (folder, used) in self._astray.items()}
        facts = [{"folder": folder, "instance": name, "used": used} for folder, (name, used) in by_folder.items()]
        return [Reason("no-folder", one) for one in facts]

    def _why_final(self, end: InstanceEnded, order: ProcessOrder, program: str) -> Reason | None:
        """Why no further start can succeed after this end; None if a further start may succeed."""
        if end.errno in UNRUNNABLE:
            folder = f"{end.folder}, as there is no {order.folder}" if end.folder else ""
            facts = {"program": program, "why": os.strerror(end.errno), "folder": folder, "remedy": order.remedy}
            return Reason("no-program", facts)
        if not end.code:
            return None
        try:
            return order.why_final(ProcessEnd(end.code, list(end.lines), end.port_is_free))
        except Exception as error:  # a user's own adapter
            self._tasks.failed("engine adapters", error)
            return None

    def _add(self, process: StoredProcess) -> None:
        if process != self._known.get(process.id):
            self._known[process.id] = process
            self._store.save(process)

    def _remove(self, instance_id: str) -> None:
        self._known.pop(instance_id, None)
        self._given.pop(instance_id, None)
        self._astray.pop(instance_id, None)
        self._store.forget(instance_id)


def _adopted(process: StoredProcess) -> Adopted:
    place = msgspec.json.decode(process.place, type=Place) if process.place else None
    at = (process.host, process.port, str(process.pid or 0))
    return Adopted(process.id, process.deployment, process.recipe, *at, place)
