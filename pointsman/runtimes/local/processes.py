"""The engine processes of a plane: started, signalled, adopted and mourned, through the supervisor and with the store.

Enters: launches and signals. Leaves: `Launched`, `LaunchFailed` and `Exited`. The one rule: what the store does not
know does not run, and what it knows has an end that is reported, whoever dies: engine, supervisor or plane.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from pointsman.control.desired import Address
from pointsman.control.events import Adopted, ControllerEvent, Exited, Launched, LaunchFailed
from pointsman.engines import LaunchSpec
from pointsman.errors import PointsmanError
from pointsman.placement.asks import Place
from pointsman.runtimes.local import supervisor_link as keeping
from pointsman.runtimes.local.logs import FOLDER, last_words, log_file, prune
from pointsman.runtimes.local.store import Store, StoredInstance
from pointsman.runtimes.local.supervisor_link import MARK, EngineProcess, Report, SupervisorLink, clear

# Free ports for instances: no two of ours get the same one.


class Ports:
    """Hands out ports that nobody listens on, and remembers to whom.

    Somebody else may take a port before its instance listens: then the instance ends, and its next start gets another.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._taken: dict[str, int] = {}

    def take(self, instance_id: str) -> int:
        """A port for an instance, instead of the one that it had."""
        taken = set(self._taken.values())
        probes: list[socket.socket] = []
        try:
            while True:
                probe = socket.socket()
                probes.append(probe)  # held until one is found, so that the system offers another each time
                probe.bind((self._host, 0))
                port = int(probe.getsockname()[1])
                if port not in taken:
                    self._taken[instance_id] = port
                    return port
        finally:
            for probe in probes:
                probe.close()

    def keep(self, instance_id: str, port: int) -> None:
        """An instance has this one already."""
        self._taken[instance_id] = port

    def release(self, instance_id: str) -> None:
        """Its process has ended."""
        self._taken.pop(instance_id, None)


HOST = "127.0.0.1"
ORPHANS_STOP_GRACE_S = 5.0
"""From SIGTERM to SIGKILL when no plane has come back."""
RETRY_S = 1.0
"""After a supervisor could not be started."""
LOST = "its supervisor died, and took it along"
UNREMARKABLE = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT})
"""Who ends by these has not said why."""


class Processes:
    """All processes of the instances that this plane runs."""

    def __init__(
        self, state: Path, store: Store, tell: Callable[[ControllerEvent], None], *, orphan_grace_s: float
    ) -> None:
        self._state = state
        self._store = store
        self._tell = tell
        self._grace_s = orphan_grace_s
        self._ports = Ports(HOST)
        self._known: dict[str, StoredInstance] = {}
        """Started or about to be, and not known to have ended; the same as in the store."""
        self._supervisor: SupervisorLink | None = None
        self._held: dict[str, Callable[[SupervisorLink], None]] = {}
        """Launches that wait for a supervisor, or for a stranger of the same name to end."""
        self._strangers: dict[str, int] = {}
        """Processes that the store does not know, by name: they are being killed."""
        self._replacing: asyncio.Task[None] | None = None
        self.problem = ""
        """Why there is no supervisor; empty: there is one."""

    async def open(self) -> list[Adopted]:
        """Find or start the supervisor. What still runs from an earlier plane; what should not is ended first."""
        (self._state / FOLDER).mkdir(exist_ok=True)
        self._known = {instance.id: instance for instance in self._store.instances()}
        prune(self._state, self._known)
        _, ended = await self._connect()
        for instance in ended:
            self._forget(instance.id)
        adopted = []
        for known in self._known.values():
            self._ports.keep(known.id, known.port)
            place = msgspec.json.decode(known.place, type=Place) if known.place else None
            adopted.append(
                Adopted(known.id, known.deployment, known.recipe, known.host, known.port, known.pid or 0, place)
            )
        return adopted

    def launch(
        self,
        instance_id: str,
        deployment: str,
        recipe: str,
        cwd: str,
        how: Callable[[str, int], LaunchSpec],
        place: Place | None = None,
    ) -> None:
        """Start a process on a free port; `how(host, port)` says how."""
        try:
            port = self._ports.take(instance_id)
            launch = how(HOST, port)
        except Exception as error:  # an adapter of the user's own; or no port is left
            self._ports.release(instance_id)
            self._tell(LaunchFailed(instance_id, f"{type(error).__name__}: {error}"))
            return
        where = "" if place is None else msgspec.json.encode(place).decode()
        instance = StoredInstance(instance_id, deployment, recipe, HOST, port, place=where)
        self._known[instance_id] = instance
        self._store.save(instance)  # before it is there: who is killed in between leaves no process that nobody knows
        env = _environment(os.environ, launch.env) | {MARK: instance_id}
        log = log_file(self._state, instance_id)

        def start(supervisor: SupervisorLink) -> None:
            supervisor.start(instance_id, launch.argv, env, cwd if Path(cwd).is_dir() else str(self._state), log)

        self._held[instance_id] = start
        self._start_held()

    def signal(self, instance_id: str, number: signal.Signals) -> None:
        """To its whole group. One that waits for a supervisor is never started."""
        if self._held.pop(instance_id, None) is not None:
            self._ended(instance_id, "it was stopped before it was started")
        elif self._supervisor is not None:
            self._supervisor.signal(instance_id, number)

    def address(self, instance_id: str) -> Address | None:
        """Where an instance listens; None: it has no process."""
        known = self._known.get(instance_id)
        return None if known is None else Address(known.host, known.port, False)

    async def close(self) -> None:
        """End whatever is left, and the supervisor."""
        if self._replacing is not None:
            self._replacing.cancel()
        if self._supervisor is not None:
            supervisor, self._supervisor = self._supervisor, None
            await supervisor.end()
        for instance in list(self._known.values()):
            if instance.pid is not None:
                await clear(instance.id, instance.pid, instance.born)
            self._forget(instance.id)

    # The supervisor

    async def _connect(self) -> tuple[list[StoredInstance], list[StoredInstance]]:
        """Connect to a supervisor; return the processes that run but were unknown, and those known that do not run."""
        supervisor, running = await SupervisorLink.open(
            self._state, grace_s=self._grace_s, stop_grace_s=ORPHANS_STOP_GRACE_S
        )
        found, ended = [], []
        for instance in list(self._known.values()):
            process = next((one for one in running if one.id == instance.id), None)
            if process is not None and instance.pid in (None, process.pid):
                self._note(process)
                found += [self._known[process.id]] if instance.pid is None else []
            elif instance.id not in self._held:
                if instance.pid is not None:
                    await clear(instance.id, instance.pid, instance.born)
                ended.append(instance)
        known = {instance.id: instance.pid for instance in self._known.values()}
        self._strangers = {one.id: one.pid for one in running if known.get(one.id) != one.pid}
        for stranger in self._strangers:
            supervisor.signal(stranger, signal.SIGKILL)
        self._supervisor = supervisor
        self.problem = ""
        supervisor.listen(self._hear, self._lost)
        return found, ended

    def _lost(self) -> None:
        old, self._supervisor = self._supervisor, None
        self.problem = "the supervisor of the engine processes is gone; another is being started"
        if old is not None:
            self._replacing = asyncio.get_running_loop().create_task(self._replace(old))

    async def _replace(self, old: SupervisorLink) -> None:
        """If the old one is dead, so is whatever it kept; it may also only have hung up, and then nothing is lost."""
        if await _has_ended(old):
            for instance in [one for one in self._known.values() if one.id not in self._held]:
                if instance.pid is not None:
                    await clear(instance.id, instance.pid, instance.born)
                self._ended(instance.id, LOST)
        while True:
            try:
                found, ended = await self._connect()
                break
            except (PointsmanError, OSError) as error:
                self.problem = f"no supervisor can be started: {error}"
                await asyncio.sleep(RETRY_S)
        for instance in found:
            self._tell(Launched(instance.id, instance.pid or 0, instance.host, instance.port))
        for instance in ended:
            self._ended(instance.id, LOST)
        self._start_held()

    def _start_held(self) -> None:
        if self._supervisor is not None:
            for instance_id in [one for one in self._held if one not in self._strangers]:
                self._held.pop(instance_id)(self._supervisor)

    def _hear(self, report: Report) -> None:
        match report:
            case keeping.ProcessStarted():
                self._note(EngineProcess(report.id, report.pid, report.born))
                known = self._known.get(report.id)
                if known is not None:
                    self._tell(Launched(known.id, report.pid, known.host, known.port))
            case keeping.ProcessFailed():
                self._ended(report.id, report.why)
            case keeping.ProcessExited() if self._strangers.get(report.id) == report.pid:
                del self._strangers[report.id]
                self._start_held()
            case keeping.ProcessExited():
                self._ended(report.id, self._end_in_words(report))
            case keeping.Confused():
                self.problem = f"the supervisor did not understand: {report.why}"

    def _note(self, process: EngineProcess) -> None:
        known = self._known.get(process.id)
        if known is not None:
            known = self._known[process.id] = msgspec.structs.replace(known, pid=process.pid, born=process.born)
            self._store.save(known)

    def _ended(self, instance_id: str, why: str) -> None:
        known = self._known.get(instance_id)
        if known is not None:
            self._forget(instance_id)
            self._tell(LaunchFailed(instance_id, why) if known.pid is None else Exited(instance_id, why))

    def _forget(self, instance_id: str) -> None:
        self._known.pop(instance_id, None)
        self._ports.release(instance_id)
        self._store.forget(instance_id)

    def _end_in_words(self, report: keeping.ProcessExited) -> str:
        words = last_words(log_file(self._state, report.id))
        if report.signal is None:
            return f"exit code {report.code}: {words}" if words else f"exit code {report.code}"
        try:
            name = signal.Signals(report.signal).name
        except ValueError:
            name = f"signal {report.signal}"
        remarkable = words and report.signal not in UNREMARKABLE
        return f"killed by {name}: {words}" if remarkable else f"killed by {name}"


async def _has_ended(supervisor: SupervisorLink) -> bool:
    """Whether it has, a moment after it has hung up."""
    for _ in range(20):
        if not supervisor.lives:
            return True
        await asyncio.sleep(0.005)
    return False


def _environment(ours: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Ours, with what an engine adds and without what it takes out."""
    merged = {"PYTHONUNBUFFERED": "1", **ours, **changes}  # what Python prints last is in the log, however it ends
    return {name: value for name, value in merged.items() if value is not None}
