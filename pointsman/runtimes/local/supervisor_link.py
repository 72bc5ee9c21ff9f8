"""Process groups that lost their supervisor, known by pid and start time: nobody else's process is ever signalled."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec

from pointsman.errors import PointsmanError
from pointsman.http.pool import short_path
from pointsman.runtimes.local import supervisor as supervisor
from pointsman.runtimes.local.supervisor import born

MARK = "POINTSMAN_INSTANCE"
"""In the environment of every engine: the instance that it is."""
PATIENCE_S = 5.0
"""A killed process may take this long to vanish."""


class Member(NamedTuple):
    """A living process of a group."""

    pid: int
    group: int
    session: int
    ticks: int
    """Its start, since the start of the machine."""


async def clear(instance_id: str, pid: int, started: str) -> bool:
    """Kill what is left of the group of an instance that was started as `pid`. Whether nothing is left."""
    waited_s = 0.0
    while waited_s < PATIENCE_S:
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
    """Whether the process that was started as `pid` then still runs."""
    if not started or born(pid) != started:
        return False
    return not Path("/proc/self/stat").exists() or any(one.pid == pid for one in _living([str(pid)]))


def _left(instance_id: str, pid: int, started: str) -> list[int]:
    """Living processes of its group, if it is still its group."""
    if not started or pid <= 1:
        return []
    try:
        os.killpg(pid, 0)  # asks only
    except (ProcessLookupError, PermissionError):
        return []
    if not Path("/proc/self/stat").exists():
        return [pid] if born(pid) == started else []
    now = born(pid)
    if now not in ("", started):
        return []  # somebody else has the number now
    boot, _, ticks = started.partition("/")
    if not ticks.isdecimal() or Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() != boot:
        return []  # of another life of this machine
    members = [one for one in _living() if one.group == one.session == pid and one.ticks >= int(ticks)]
    # While its leader is there the group is ours. Without, the number may have been given away and orphaned again.
    return [one.pid for one in members if now or _is_marked(one.pid, instance_id)]


def _living(numbers: Iterable[str] | None = None) -> Iterator[Member]:
    """All processes, or those of these numbers, that are not dead and only waiting to be reaped."""
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


# The plane's end of the line to its supervisor: connects to the one that lives, or starts one; then asks and hears.


SOCKET = "supervisor.sock"
END_S = 20.0
ANSWER_S = 10.0
"""A supervisor that does not answer within this is not used."""


class EngineProcess(msgspec.Struct, frozen=True):
    """An engine process, and when its kernel started it."""

    id: str
    pid: int
    born: str


class Greeting(msgspec.Struct, frozen=True, tag_field="say", tag="supervisor"):
    """The supervisor is there; busy: for somebody else."""

    pid: int
    busy: bool


class ProcessesRunning(msgspec.Struct, frozen=True, tag_field="say", tag="running"):
    """Everything that runs."""

    instances: tuple[EngineProcess, ...]


class ProcessStarted(msgspec.Struct, frozen=True, tag_field="say", tag="started"):
    """A process was started."""

    id: str
    pid: int
    born: str


class ProcessFailed(msgspec.Struct, frozen=True, tag_field="say", tag="failed"):
    """A process could not be started."""

    id: str
    why: str


class ProcessExited(msgspec.Struct, frozen=True, tag_field="say", tag="exited"):
    """A process has ended, and so has its group."""

    id: str
    pid: int
    code: int | None = None
    signal: int | None = None


class Confused(msgspec.Struct, frozen=True, tag_field="say", tag="confused"):
    """The supervisor did not understand."""

    why: str


Report: TypeAlias = ProcessStarted | ProcessFailed | ProcessExited | Confused
_SAID: msgspec.json.Decoder[Greeting | ProcessesRunning | Report] = msgspec.json.Decoder(
    Greeting | ProcessesRunning | Report
)


class SupervisorLink(asyncio.Protocol):
    """A conversation with a supervisor."""

    def __init__(self, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid, self.born = 0, ""
        self.gone = asyncio.Event()
        """The supervisor has hung up."""
        self._child = child
        """The supervisor, if this plane started it."""
        self._transport: asyncio.Transport | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._heard = b""
        self._answers: asyncio.Queue[Greeting | ProcessesRunning | None] = asyncio.Queue()
        self._unheard: list[Report] = []
        self._on_report: Callable[[Report], None] = self._unheard.append
        self._on_lost: Callable[[], None] | None = None

    @classmethod
    async def open(
        cls, state: Path, *, grace_s: float, stop_grace_s: float
    ) -> tuple["SupervisorLink", list[EngineProcess]]:
        """Connect to the supervisor of a state directory, starting one if there is none. Also returns what it runs."""
        link = await cls._existing(state) or await cls._started(state)
        link.born = supervisor.born(link.pid)
        link._ask(ask="hello", grace_s=grace_s, stop_grace_s=stop_grace_s)
        link._ask(ask="list")
        running = await link._answer()
        if not isinstance(running, ProcessesRunning):
            link.close()
            raise PointsmanError(f"the supervisor (pid {link.pid}) does not say what it runs; end it and try again")
        return link, list(running.instances)

    @classmethod
    async def _existing(cls, state: Path) -> "SupervisorLink | None":
        for _ in range(50):  # it may take a moment to notice that the plane before us is gone
            try:
                link = await cls._connected(state / SOCKET, None)
            except OSError:
                return None
            greeting = await link._answer()
            if isinstance(greeting, Greeting) and not greeting.busy:
                link.pid = greeting.pid
                return link
            link.close()
            if greeting is None:  # it is leaving
                return None
            await asyncio.sleep(0.02)
        raise PointsmanError(f"the supervisor in {state} talks to another plane; stop that one first")

    @classmethod
    async def _started(cls, state: Path) -> "SupervisorLink":
        path = state / SOCKET
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener, path.with_name("supervisor.log").open("wb") as log:
            mask = os.umask(0o177)
            try:
                with short_path(path) as short:
                    listener.bind(short)
            finally:
                os.umask(mask)
            listener.listen(8)
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, str(listener.fileno()), str(path)],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(listener.fileno(),),
                start_new_session=True,  # Ctrl-C at the terminal is the plane's business
            )
            link = await cls._connected(path, child)  # it is listening: we did that for it
        greeting = await link._answer()
        if not isinstance(greeting, Greeting):
            child.kill()
            await link.wait()
            link.close()
            raise PointsmanError(f"the supervisor could not be started; see {path.with_name('supervisor.log')}")
        link.pid = greeting.pid
        return link

    @classmethod
    async def _connected(cls, path: Path, child: subprocess.Popen[bytes] | None) -> "SupervisorLink":
        line = socket.socket(socket.AF_UNIX)
        try:
            line.setblocking(False)
            with short_path(path) as short:
                line.connect(short)  # a unix socket connects at once, or not at all
            _, link = await asyncio.get_running_loop().create_unix_connection(lambda: cls(child), sock=line)
        except OSError:
            line.close()
            raise
        return link

    # Asking

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, log: Path) -> None:
        """Answered by `ProcessStarted` or `ProcessFailed`, and in the first case some day by `ProcessExited`."""
        self._ask(ask="start", id=name, argv=argv, env=env, cwd=cwd, log=str(log))

    def signal(self, name: str, number: int) -> None:
        """To the whole process group of an instance."""
        self._ask(ask="signal", id=name, number=int(number))

    async def end(self, timeout_s: float = END_S) -> None:
        """Everything is stopped; the supervisor is gone when this returns. One that takes longer is killed."""
        self._on_lost = None
        self._ask(ask="end")
        try:
            async with asyncio.timeout(timeout_s):
                await self.gone.wait()
        except TimeoutError:  # it hangs; it cannot be anybody else, as it still holds the line
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            await self.gone.wait()
        await self.wait()

    def close(self) -> None:
        """Hang up. Engines live on for the grace time, for the next plane."""
        self._on_lost = None
        if self._transport is not None:
            self._transport.close()

    def _ask(self, **message: Any) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(msgspec.json.encode(message) + b"\n")

    # Hearing

    def listen(self, on_report: Callable[[Report], None], on_lost: Callable[[], None]) -> None:
        """From now on tell these what happens, and that the supervisor went away unasked."""
        self._on_report, self._on_lost = on_report, on_lost
        for report in self._unheard:
            on_report(report)
        if self.gone.is_set():
            on_lost()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # not a check: transports of other loops only act like one

    def data_received(self, data: bytes) -> None:
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            said = _SAID.decode(line)
            if isinstance(said, Greeting | ProcessesRunning):
                self._answers.put_nowait(said)
            else:
                self._on_report(said)

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set()
        if self._child is not None:  # else it would stay behind as a zombie
            self._reaping = asyncio.get_running_loop().create_task(self.wait())
        self._answers.put_nowait(None)
        if self._on_lost is not None:
            self._on_lost()

    async def _answer(self) -> Greeting | ProcessesRunning | None:
        """None: it has hung up, or says nothing."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                return await self._answers.get()
        return None

    async def wait(self) -> None:
        """Wait for the end of the supervisor, which comes a moment after it has hung up."""
        pause = 0.002
        while self.lives:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    @property
    def lives(self) -> bool:
        """Whether there is a supervisor, listening or not."""
        return lives(self.pid, self.born) if self._child is None else self._child.poll() is None
