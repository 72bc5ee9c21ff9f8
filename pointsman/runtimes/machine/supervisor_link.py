"""The plane's side of the connection to its supervisor, and process groups without a supervisor.

A process is identified by pid and start time, so that no process of another program is ever signalled.
"""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

import msgspec

from pointsman.errors import PointsmanError
from pointsman.http.pool import descriptors_left, short_path
from pointsman.parameters import words_without_secrets
from pointsman.runtimes.machine.children import born

MARK = "POINTSMAN_INSTANCE"
"""An environment variable of every engine: its instance."""
VANISH_S = 5.0
"""Time limit for a killed process to vanish."""


class Member(NamedTuple):
    pid: int
    group: int
    session: int
    ticks: int
    """When the process started, in clock ticks since the machine was booted."""


async def clear(instance_id: str, pid: int, started: str) -> bool:
    """Kill what is left of the group of an instance that was started as `pid`. True if nothing is left."""
    waited_s = 0.0
    while waited_s < VANISH_S:
        with suppress(OSError):  # without file descriptors nothing can be read: an unreadable process counts as running
            left = _left(instance_id, pid, started)
            if not left:
                return True
            for one in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(one, signal.SIGKILL)
        await asyncio.sleep(0.01)
        waited_s += 0.01
    return False


def lives(pid: int, started: str) -> bool:
    """Whether the process that was started as `pid` at that time still runs."""
    if not started:
        return False
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)  # this sends nothing
        except ProcessLookupError:
            return False
    if not descriptors_left():
        return True  # an unreadable process counts as running
    if born(pid) != started:
        return False
    return not Path("/proc/self/stat").exists() or any(one.pid == pid for one in _living([str(pid)]))


def _left(instance_id: str, pid: int, started: str) -> list[int]:
    """The processes of the group of an instance; none if another program has the pid now."""
    if not started or pid <= 1:
        return []
    try:
        os.killpg(pid, 0)  # this sends nothing
    except (ProcessLookupError, PermissionError):
        return []
    if not descriptors_left():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not Path("/proc/self/stat").exists():
        return [pid] if born(pid) == started else []
    now = born(pid)
    if now not in ("", started):
        return []  # another program has the pid now
    boot, _, ticks = started.partition("/")
    if not ticks.isdecimal() or Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() != boot:
        return []  # from before the last boot
    members = [one for one in _living() if one.group == one.session == pid and one.ticks >= int(ticks)]
    # Without its leader, the group may be one of another program that had the pid in between.
    return [one.pid for one in members if now or _is_marked(one.pid, instance_id)]


def _living(numbers: Iterable[str] | None = None) -> Iterator[Member]:
    """All processes, or those of these pids, without zombies."""
    for number in (path.name for path in Path("/proc").iterdir()) if numbers is None else numbers:
        if number.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    yield Member(int(number), int(fields[2]), int(fields[3]), int(fields[19]))


def _is_marked(pid: int, instance_id: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{MARK}={instance_id}".encode() in environment


PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from pointsman.runtimes.machine.supervisor import main; "
    "main(*sys.argv[2:])"
)
"""The program of a supervisor. It can import this package and the standard library, and nothing else."""
PACKAGES = str(Path(__file__).parents[3])
SOCKET = "supervisor.sock"
LOG = "supervisor.log"
END_S = 20.0
"""Time limit for a supervisor to end before it is killed."""
ANSWER_S = 10.0
"""A supervisor that does not answer within this time is not used."""


class SupervisorTerms(NamedTuple):
    """The settings that a supervisor gets at the beginning of a connection."""

    grace_s: float
    """How long engines keep running without a plane. With a lease, the lease decides."""
    stop_grace_s: float
    """Time from SIGTERM to SIGKILL, if no plane has come back or the lease has ended."""
    leased: bool = False
    """Whether engines run while a lease is renewed, regardless of the connection."""


class EngineProcess(msgspec.Struct, frozen=True):
    """An engine process, and when its kernel started it."""

    id: str
    pid: int
    born: str
    note: str = ""
    """A note from the plane that started the process, for the next plane."""


class Greeting(msgspec.Struct, frozen=True, tag_field="say", tag="supervisor"):
    """The supervisor accepts the connection, or it is busy because another plane is connected."""

    pid: int
    busy: bool


class ProcessesRunning(msgspec.Struct, frozen=True, tag_field="say", tag="running"):
    instances: tuple[EngineProcess, ...]


class ProcessStarted(msgspec.Struct, frozen=True, tag_field="say", tag="started"):
    id: str
    pid: int
    born: str


class ProcessFailed(msgspec.Struct, frozen=True, tag_field="say", tag="failed"):
    id: str
    why: str
    errno: int = 0
    """Error number; 0 if the system did not refuse the start."""


class ProcessExited(msgspec.Struct, frozen=True, tag_field="say", tag="exited"):
    """A process and its whole group have ended."""

    id: str
    pid: int
    code: int | None = None
    signal: int | None = None


class Confused(msgspec.Struct, frozen=True, tag_field="say", tag="confused"):
    why: str


Report: TypeAlias = ProcessStarted | ProcessFailed | ProcessExited | Confused
_DECODER: msgspec.json.Decoder[Greeting | ProcessesRunning | Report] = msgspec.json.Decoder(
    Greeting | ProcessesRunning | Report
)


class SupervisorProcess:
    def __init__(self, child: subprocess.Popen[bytes] | None = None) -> None:
        """`child` is the process if this plane started it, else None."""
        self.pid, self.born = 0, ""
        self._child = child

    @property
    def is_child(self) -> bool:
        return self._child is not None

    @property
    def lives(self) -> bool:
        return lives(self.pid, self.born) if self._child is None else self._child.poll() is None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid if self._child is None else self._child.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Wait for the end of the supervisor, which follows shortly after it has hung up."""
        pause = 0.002
        while self.lives:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)


class SupervisorLink(asyncio.Protocol):
    def __init__(self, process: SupervisorProcess) -> None:
        self.process = process
        self.gone = asyncio.Event()
        """Set when the supervisor has hung up."""
        self._transport: asyncio.Transport | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._received = b""
        self._answers: asyncio.Queue[Greeting | ProcessesRunning | None] = asyncio.Queue()
        self._unread: list[Report] = []
        self._on_report: Callable[[Report], None] = self._unread.append
        self._on_lost: Callable[[], None] | None = None

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        log: Path,
        note: str = "",
        outlives_s: float = 0.0,
    ) -> None:
        """Start a process. The answer is `ProcessStarted` and later `ProcessExited`, or only `ProcessFailed`.
        `outlives_s`: how long the process may run after the end of the lease."""
        shown, more = " ".join(words_without_secrets(argv)), {"note": note, "outlives_s": outlives_s}
        self.ask(ask="start", id=name, argv=argv, env=env, cwd=cwd, log=str(log), shown=shown, **more)

    def signal(self, name: str, number: int) -> None:
        """Signal the whole process group of an instance."""
        self.ask(ask="signal", id=name, number=int(number))

    async def end(self, timeout_s: float = END_S) -> None:
        """Stop everything, and return when the supervisor is gone. It is killed if it takes longer than `timeout_s`."""
        self._on_lost = None
        self.ask(ask="end")
        try:
            async with asyncio.timeout(timeout_s):
                await self.gone.wait()
        except TimeoutError:  # the pid still belongs to the supervisor, because the connection is open
            self.process.kill()
            await self.gone.wait()
        await self.process.wait()

    def close(self) -> None:
        """Hang up. Engines keep running for the grace time, for the next plane."""
        self._on_lost = None
        if self._transport is not None:
            self._transport.close()

    def hang_up(self) -> None:
        """Close the connection as if the supervisor had done so."""
        if self._transport is not None:
            self._transport.abort()

    def ask(self, **message: Any) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(msgspec.json.encode(message) + b"\n")

    async def answer(self) -> Greeting | ProcessesRunning | None:
        """The supervisor's next answer; None if it has hung up, or does not answer in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                return await self._answers.get()
        return None

    def listen(self, on_report: Callable[[Report], None], on_lost: Callable[[], None]) -> None:
        """Call `on_report` with each report from now on, and `on_lost` when the supervisor hangs up unexpectedly."""
        self._on_report, self._on_lost = on_report, on_lost
        for report in self._unread:
            on_report(report)
        if self.gone.is_set():
            on_lost()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # not checked: transports of uvloop have another class

    def data_received(self, data: bytes) -> None:
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            try:
                message = _DECODER.decode(line)
            except msgspec.MsgspecError as error:
                self._on_report(Confused(f"{error}: {line[:200]!r}"))
                self.hang_up()  # a new connection begins with a list of what runs
                return
            if isinstance(message, Greeting | ProcessesRunning):
                self._answers.put_nowait(message)
            else:
                self._on_report(message)

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set()
        if self.process.is_child:  # if it is not reaped, it stays a zombie
            self._reaping = asyncio.get_running_loop().create_task(self.process.wait())
        self._answers.put_nowait(None)
        if self._on_lost is not None:
            self._on_lost()


async def open_supervisor(
    state: Path, terms: SupervisorTerms, before: SupervisorProcess | None = None
) -> tuple[SupervisorLink, list[EngineProcess]]:
    """Connect to the supervisor of a state directory, and start one if there is none. Also returns the processes that
    it runs. `before` is the supervisor to which the plane was connected last. The plane may have to reap it."""
    link = await _existing(state) or await _started(state)
    if before is not None and before.pid == link.process.pid:
        link.process = before
    link.process.born = born(link.process.pid)
    if not link.process.born:
        link.close()
        raise PointsmanError(
            f"the supervisor (pid {link.process.pid}) cannot be inspected; are there too many open files?"
        )
    link.ask(ask="hello", **terms._asdict())
    link.ask(ask="list")
    running = await link.answer()
    if not isinstance(running, ProcessesRunning):
        link.close()
        raise PointsmanError(f"the supervisor (pid {link.process.pid}) does not say what it runs; end it and try again")
    return link, list(running.instances)


async def _existing(state: Path) -> SupervisorLink | None:
    for _ in range(50):  # a supervisor may take a moment to notice that the previous plane is gone
        try:
            link = await _connected(state / SOCKET, SupervisorProcess())
        except OSError:
            return None
        greeting = await link.answer()
        if isinstance(greeting, Greeting) and not greeting.busy:
            link.process.pid = greeting.pid
            return link
        link.close()
        if greeting is None:  # it is ending
            return None
        await asyncio.sleep(0.02)
    raise PointsmanError(f"the supervisor in {state} talks to another plane; stop that one first")


async def _started(state: Path) -> SupervisorLink:
    path = state / SOCKET
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener, _log(path.with_name(LOG)) as log:
        mask = os.umask(0o177)
        try:
            with short_path(path) as short:
                listener.bind(short)
        finally:
            os.umask(mask)
        listener.listen(8)
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, PACKAGES, str(listener.fileno()), str(path)],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(listener.fileno(),),
            start_new_session=True,  # Ctrl-C at the terminal is for the plane only
        )
        link = await _connected(path, SupervisorProcess(child))  # the socket listens even before the supervisor runs
    greeting = await link.answer()
    if not isinstance(greeting, Greeting):
        link.process.kill()
        await link.process.wait()
        link.close()
        raise PointsmanError(f"the supervisor could not be started; see {path.with_name(LOG)}")
    link.process.pid = greeting.pid
    return link


def _log(file: Path) -> BinaryIO:
    """The file for the errors of a supervisor; /dev/null if the disk cannot be written."""
    try:
        return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
    except OSError:
        return open(os.devnull, "wb")  # noqa: PTH123


async def _connected(path: Path, process: SupervisorProcess) -> SupervisorLink:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        with short_path(path) as short:
            connection.connect(short)  # a unix socket connects at once, or not at all
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: SupervisorLink(process), sock=connection)
    except OSError:
        connection.close()
        raise
    return link
