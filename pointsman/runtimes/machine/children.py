"""The children of a supervisor: started, signalled with their whole group, watched and reaped; and their output.

Enters: what to run, and signals. Leaves: children that have ended, with their groups. The one rule: the group of a
child is gone before its end is reported. Like `supervisor.py`, it uses the standard library alone.
"""

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

GROUP_GRACE_S = 2.0
"""Time limit for a killed process to vanish. A process that hangs in the kernel is not awaited any longer."""
LOG_BYTES = 8 * 1024 * 1024
"""Half of the maximum size of a log: at this size it is renamed to `.1`, replacing the previous `.1`."""
PIECE = 64 * 1024
LAST_PIECES = 64
"""Maximum number of pieces of output to read from a child that has ended. A process that left the child's group may
write without end."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TIMER_ABSTIME = 1
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""This clock continues while the machine is suspended, and is the same for all its processes."""


def now() -> float:
    return time.clock_gettime(CLOCK)


class Log:
    """The output of a process, appended to a file of bounded size. A full disk loses lines, never the process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._size = 0
        self._file: int | None = None
        with suppress(OSError):
            self._open()

    def write(self, data: bytes) -> None:
        with suppress(OSError):
            if self._size + len(data) > LOG_BYTES:
                self.close()
                Path(self._path).replace(f"{self._path}.1")
            if self._file is None:
                self._open()
            if self._file is not None:
                self._size += os.write(self._file, data)

    def note(self, text: str) -> None:
        line = f"[pointsman] {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(text.split())}\n"
        self.write(line.encode(errors="replace"))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._size = os.fstat(self._file).st_size


class Child:
    def __init__(
        self, name: str, message: dict[str, Any], process: subprocess.Popen[bytes], output: int, log: Log
    ) -> None:
        """`message` is the request to start the child."""
        self.name = name
        self.note = str(message.get("note", ""))
        self.outlives_s = float(message.get("outlives_s", 0.0))
        """How long it may keep running after the end of the lease."""
        self.process = process
        self.log = log
        self.pid, self.born = process.pid, born(process.pid)
        self.output: int | None = output
        self.end: dict[str, int] | None = None
        """How the leader of the child's group ended; None while it runs."""
        self.gone_by = 0.0
        """When to stop waiting for the rest of its group."""


class Children:
    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.by_name: dict[str, Child] = {}
        self._selector = selector

    def spawn(self, name: str, message: dict[str, Any]) -> Child:
        argv = [str(word) for word in message["argv"]]
        log = Log(str(message["log"]))
        read, write = os.pipe()
        try:
            process = subprocess.Popen(
                argv,
                cwd=message.get("cwd") or None,
                env={str(key): str(value) for key, value in message["env"].items()},
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )
        except BaseException:
            os.close(read)
            log.close()
            raise
        finally:
            os.close(write)
        # from here on, its end is noticed
        child = self.by_name[name] = Child(name, message, process, read, log)
        log.note(f"started as process {child.pid}: {message.get('shown', argv[0])}")
        os.set_blocking(read, False)
        self._selector.register(read, selectors.EVENT_READ, lambda _: self._copy_output(child))
        return child

    def running(self) -> list[Child]:
        """Children whose leaders have not ended."""
        return [child for child in self.by_name.values() if child.end is None]

    def leased(self) -> list[Child]:
        """Running children that end with the lease."""
        return [child for child in self.running() if not child.outlives_s]

    def signal(self, children: Iterable[Child], number: int) -> None:
        """Signal the whole group of each child."""
        for child in children:
            _signal_group(child.pid, number)

    def signal_one(self, name: str, number: int) -> None:
        """Signal one child, unless its leader has ended and this was reported."""
        self.signal([child for child in self.running() if child.name == name], number)

    def next_deadline(self) -> float | None:
        """When waiting for a group ends; None if no group is awaited."""
        return min((child.gone_by for child in self.by_name.values() if child.end is not None), default=None)

    def reap(self) -> list[Child]:
        """Record ended leaders. Returns the children that are gone together with their groups."""
        running = {child.pid: child for child in self.running()}
        while (ended := _next_ended(running)) is not None:
            pid, status = ended
            child = running.pop(pid, None)
            if child is not None:
                code = os.waitstatus_to_exitcode(status)
                child.process.returncode = code
                child.end = {"code": code} if code >= 0 else {"signal": -code}
                child.gone_by = now() + GROUP_GRACE_S
        at = now()
        ended_leaders = [child for child in self.by_name.values() if child.end is not None]
        gone = [child for child in ended_leaders if _is_empty(child.pid) or at >= child.gone_by]
        for child in gone:
            self._close(child)
        return gone

    def _close(self, child: Child) -> None:
        for _ in range(LAST_PIECES):
            if not self._copy_output(child):
                break
        self._close_output(child)
        how = ", ".join(f"{kind} {number}" for kind, number in (child.end or {}).items())
        child.log.note(f"process {child.pid} ended: {how}")
        child.log.close()
        del self.by_name[child.name]

    def _copy_output(self, child: Child) -> bool:
        """Copy one piece of output. Returns whether there may be more output."""
        try:
            data = b"" if child.output is None else os.read(child.output, PIECE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close_output(child)
            return False
        child.log.write(data)
        return True

    def _close_output(self, child: Child) -> None:
        if child.output is not None:
            self._selector.unregister(child.output)
            os.close(child.output)
            child.output = None


def born(pid: int) -> str:
    """When the kernel started a process; empty if there is no process. Distinguishes processes with the same pid."""
    if Path("/proc/self/stat").exists():
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return ""
        return f"{boot}/{stat.rpartition(b')')[2].split()[19].decode()}"
    asked = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def _next_ended(leaders: Container[int]) -> tuple[int, int] | None:
    """Reap a child or an orphan that has ended. Returns its pid and wait status, or None if there are no more."""
    try:
        if not hasattr(os, "waitid"):
            pid, status = os.waitpid(-1, os.WNOHANG)
            return (pid, status) if pid else None
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        if found.si_pid in leaders:
            _signal_group(found.si_pid, signal.SIGKILL)  # before other processes can get its pid
        return os.waitpid(found.si_pid, 0)
    except ChildProcessError:
        return None


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
        if number == signal.SIGTERM:
            os.killpg(pid, signal.SIGCONT)  # a stopped process does not receive SIGTERM


def _is_empty(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def kill_orphans() -> None:
    """Kill processes that left their group and whose parents are gone: on Linux they are children of the supervisor."""
    deadline = now() + GROUP_GRACE_S
    while now() < deadline:
        while _next_ended(()) is not None:
            pass
        orphans = _own_children()
        if not orphans:
            return
        for pid in orphans:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _own_children() -> list[int]:
    """Pids of own children; empty if the system does not report them."""
    try:
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(pid) for pid in listed.split()]


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class SignalEvent(ctypes.Structure):
    """`struct sigevent` of the C library."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 48),
    )


class KillTimer:
    """A time at which the kernel kills this process, even while it is frozen; its children die with it.

    Linux only: elsewhere it does nothing, and the death of a parent does nothing to its children.
    """

    def __init__(self) -> None:
        """Raises `OSError` if the kernel has no such timers."""
        self._at: float | None = None
        self._timer, self._library = ctypes.c_void_p(), _timer_library()
        if self._library is not None:
            event = SignalEvent(number=signal.SIGKILL)
            self._check(self._library.timer_create(CLOCK, ctypes.byref(event), ctypes.byref(self._timer)))

    def set(self, at: float | None) -> None:
        """Set the time on the clock of `now` at which to kill; None for never. Raises `OSError`."""
        if at != self._at and self._library is not None:
            seconds = 0.0 if at is None else max(at, 1e-3)
            # struct itimerspec: no interval, then the time, of which zero means never
            when = (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9))
            self._check(self._library.timer_settime(self._timer, TIMER_ABSTIME, ctypes.byref(when), None))
        self._at = at

    def _check(self, result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), f"no timer of the kernel: {os.strerror(ctypes.get_errno())}")


def _timer_library() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    return library if hasattr(library, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)  # an old glibc


def _die_with(supervisor: int) -> Callable[[], None]:
    """A function to run in a child before it becomes the engine. It makes the child die with the supervisor."""

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # the supervisor died before the line above
            os._exit(1)

    return prepare


def reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
