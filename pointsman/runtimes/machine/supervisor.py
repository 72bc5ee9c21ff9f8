"""The parent of all engine processes of a plane. It outlives the plane, and ends them if no other plane connects.

A program of its own (`python -I -S supervisor.py LISTENER_FD SOCKET_PATH`), in one file, because it runs without the
package: standard library only, one thread, no decisions. Enters: JSON lines over a unix socket, from one plane at a
time. Leaves: JSON lines about processes. The one rule: no engine outlives the supervisor, and no message from a plane
ends the supervisor.

    asks    hello{grace_s, stop_grace_s, leased}  start{id, argv, env, cwd, log, shown}  signal{id, number}  list{}
            renew{epoch, stamp, lease_s}  end{}; each may have the epoch of its plane
    says    supervisor{pid, busy}  running{instances: [{id, pid, born}]}  started{id, pid, born}  failed{id, why, errno}
            exited{id, pid, code | signal}  confused{why}

Each engine has a process group of its own. Signals go to the whole group; when its leader exits, the rest is killed.
`born` tells a process from a later one of the same pid. With a lease (a plane on another machine), engines run only
while it is renewed, whatever the connection does.
"""

import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path
from typing import Any

GRACE_S = STOP_GRACE_S = 5.0
"""How long engines live on without a plane, and from SIGTERM to SIGKILL then, unless the plane says otherwise."""
MAX_GRACE_S = 1e6
FIRST_VISIT_S = 10.0
"""The plane that started the supervisor connects within this."""
GROUP_GRACE_S = 2.0
"""How long a killed process may take to vanish. One that hangs in the kernel is not waited for any longer."""
LOG_BYTES = 8 * 1024 * 1024
"""Half of what a log may take: at this size it is renamed to `.1`, in place of the `.1` before it."""
LINE_BYTES = 8 * 1024 * 1024
PIECE = 64 * 1024
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""It runs on while the machine is suspended, and is the same for all its processes."""


def now() -> float:
    return time.clock_gettime(CLOCK)


class EngineLease:
    """The right to run engines, until a time of this machine's clock."""

    def __init__(self, at: float) -> None:
        self.ends, self.is_granted = at + FIRST_VISIT_S, False

    def renew(self, stamp: float, lease_s: float, at: float) -> float:
        """`stamp`: a time of this clock that the plane has heard, so that a late delivery extends nothing. Its end."""
        if not (stamp <= at and 0.0 < lease_s <= MAX_GRACE_S):
            raise ValueError(f"no lease from {stamp} on for {lease_s} s: it is {at}")
        self.ends, self.is_granted = max(self.ends if self.is_granted else 0.0, stamp + lease_s), True
        return self.ends

    def holds(self, at: float) -> bool:
        """Whether something may be started."""
        return self.is_granted and at < self.ends


class Log:
    """The output of a process, appended to a file of bounded size. A full disk loses lines, never the process."""

    def __init__(self, path: str) -> None:
        self._path, self._size = path, 0
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
    def __init__(self, name: str, note: str, process: subprocess.Popen[bytes], output: int, log: Log) -> None:
        self.name, self.note, self.process, self.log = name, note, process, log
        self.pid, self.born = process.pid, born(process.pid)
        self.output: int | None = output
        self.end: dict[str, int] | None = None
        """How its leader ended; None while it runs."""
        self.gone_by = 0.0
        """The rest of its group is not waited for beyond this time."""


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
        # From here on its end is noticed.
        child = self.by_name[name] = Child(name, str(message.get("note", "")), process, read, log)
        log.note(f"started as process {child.pid}: {message.get('shown', argv[0])}")
        os.set_blocking(read, False)
        self._selector.register(read, selectors.EVENT_READ, lambda _: self._copy_output(child))
        return child

    def signal(self, number: int, name: str | None = None) -> None:
        """Signal the whole group of one of them, unless its leader has ended, which was reported; None: of all."""
        for child in self.by_name.values():
            if name in (None, child.name) and child.end is None:
                _signal_group(child.pid, number)

    def next_deadline(self) -> float | None:
        """When the next group is given up; None if none is waited for."""
        return min((child.gone_by for child in self.by_name.values() if child.end is not None), default=None)

    def reap(self) -> list[Child]:
        """Take note of leaders that have ended. Returns the children that are gone with their groups."""
        running = {child.pid: child for child in self.by_name.values() if child.end is None}
        while (ended := _next_ended(running)) is not None:
            if (child := running.pop(ended[0], None)) is not None:
                child.process.returncode = code = os.waitstatus_to_exitcode(ended[1])
                child.end = {"code": code} if code >= 0 else {"signal": -code}
                child.gone_by = now() + GROUP_GRACE_S
        at = now()
        gone = [one for one in self.by_name.values() if one.end and (_is_empty(one.pid) or at >= one.gone_by)]
        for child in gone:
            self._close(child)
        return gone

    def _close(self, child: Child) -> None:
        # The last output; a process that left the group may write without end.
        all(self._copy_output(child) for _ in range(64))
        self._close_output(child)
        how = ", ".join(f"{kind} {number}" for kind, number in (child.end or {}).items())
        child.log.note(f"process {child.pid} ended: {how}")
        child.log.close()
        del self.by_name[child.name]

    def _copy_output(self, child: Child) -> bool:
        """Copy one piece. Whether there may be more."""
        try:
            data = b"" if child.output is None else os.read(child.output, PIECE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        child.log.write(data) if data else self._close_output(child)
        return bool(data)

    def _close_output(self, child: Child) -> None:
        if child.output is not None:
            self._selector.unregister(child.output)
            os.close(child.output)
            child.output = None


class PlaneConnection:
    def __init__(
        self, selector: selectors.BaseSelector, obey: Callable[[bytes], None], disconnected: Callable[[], None]
    ) -> None:
        """`obey` is called with each line. `disconnected` is called when the plane is gone."""
        self._selector, self._obey, self._disconnected = selector, obey, disconnected
        self._plane: socket.socket | None = None
        self._received, self._unsent = b"", b""

    def accept(self, listener: socket.socket) -> bool:
        """Accept a plane. False if it could not be, or if another is connected: then it is told so."""
        greeting = {"say": "supervisor", "pid": os.getpid(), "busy": False}
        try:
            plane, _ = listener.accept()
        except OSError:
            return False
        if self._plane is not None:
            with suppress(OSError):
                plane.sendall(json.dumps(greeting | {"busy": True}).encode() + b"\n")
            plane.close()
            return False
        plane.setblocking(False)
        self._plane, self._received, self._unsent = plane, b"", b""
        self._selector.register(plane, selectors.EVENT_READ, self._ready)
        self.say(greeting)
        return True

    def say(self, message: dict[str, Any]) -> None:
        if self._plane is not None:
            self._unsent += json.dumps(message).encode() + b"\n"
            self._flush()
        if len(self._unsent) > LINE_BYTES:  # the plane does not read
            self._disconnect()

    def finish(self) -> None:
        """Send what is left, and wait at most 1 s for that."""
        if self._plane is not None:
            self._plane.setblocking(True)
            self._plane.settimeout(1.0)
            with suppress(OSError):
                self._plane.sendall(self._unsent)

    def _ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if events & selectors.EVENT_READ:
            self._receive()

    def _receive(self) -> None:
        assert self._plane is not None
        try:
            data = self._plane.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self._received = (self._received + data).split(b"\n")
        if not data or len(self._received) > LINE_BYTES:
            self._disconnect()
        for line in lines:
            self._obey(line)

    def _flush(self) -> None:
        assert self._plane is not None
        try:
            self._unsent = self._unsent[self._plane.send(self._unsent) :]
        except OSError as error:
            if not isinstance(error, BlockingIOError):  # it is gone, which the next read notices
                self._unsent = b""
        writing = selectors.EVENT_WRITE if self._unsent else 0
        self._selector.modify(self._plane, selectors.EVENT_READ | writing, self._ready)

    def _disconnect(self) -> None:
        if self._plane is not None:
            self._selector.unregister(self._plane)
            self._plane.close()
            self._plane, self._unsent = None, b""
            self._disconnected()


class Supervisor:
    """Starts and signals what a plane asks for, and reports what becomes of it."""

    def __init__(self, listener: socket.socket, path: str) -> None:
        self._listener, self._path = listener, Path(path)
        self._inode = self._path.stat().st_ino
        self._grace_s, self._stop_grace_s = GRACE_S, STOP_GRACE_S
        self._connected_until: float | None = now() + FIRST_VISIT_S
        """With the grace time; None while a plane is connected."""
        self._lease: EngineLease | None = None
        self._epoch = 0
        """Of the newest plane: an older one has nothing to say any more."""
        self._ends_by: float | None = None
        """When everything is killed; None until it is told to end."""
        self.told_to_end = False
        """Safe to set in a signal handler."""
        self._asks: dict[str, Callable[[dict[str, Any]], object]] = {
            "hello": self._hello,
            "start": self._start,
            "signal": lambda message: self._children.signal(int(message["number"]), str(message["id"])),
            "list": self._list,
            "renew": lambda message: self._lease and self._lease.renew(message["stamp"], message["lease_s"], now()),
            "end": lambda _: self._end(),
        }
        self._selector = selectors.DefaultSelector()
        self._children = Children(self._selector)
        self._plane = PlaneConnection(self._selector, self._obey, self._disconnected)
        self._selector.register(listener, selectors.EVENT_READ, lambda _: self._accept())
        self._woken, waker = socket.socketpair()
        for end in (self._woken, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.detach(), warn_on_full_buffer=False)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda _: self._woken.recv(PIECE))

    def run(self) -> None:
        """Run until it is told to end or left alone, and nothing runs any more."""
        while self._ends_by is None or self._children.by_name:
            ready = self._selector.select(self._timeout())
            # A new plane comes after the end of the old one has been noticed.
            ready.sort(key=lambda pair: pair[0].fileobj is self._listener)
            for key, events in ready:
                if key.fd in self._selector.get_map():
                    key.data(events)
            for child in self._children.reap():
                self._plane.say({"say": "exited", "id": child.name, "pid": child.pid, **(child.end or {})})
                if not self._children.by_name and self._connected_until is not None:
                    self._connected_until = now()
            self._check_deadlines()
        _kill_orphans()
        self._plane.finish()

    @property
    def _alone_until(self) -> float | None:
        return self._connected_until if self._lease is None else self._lease.ends

    def _timeout(self) -> float | None:
        groups = self._children.next_deadline()
        known = [at for at in (self._ends_by or self._alone_until, groups) if at is not None]
        return max(0.0, min(min(known) - now(), 3600.0 if groups is None else 0.02)) if known else None

    def _check_deadlines(self) -> None:
        at = now()
        if self._ends_by is not None:
            if at >= self._ends_by:
                self._children.signal(signal.SIGKILL)
                self._ends_by = at + GROUP_GRACE_S
        elif self.told_to_end or (self._alone_until is not None and at >= self._alone_until):
            self._end()

    def _accept(self) -> None:
        if self._plane.accept(self._listener):
            self._connected_until = None

    def _disconnected(self) -> None:
        """Engines run on for a while, for the next plane."""
        self._connected_until = now() + (self._grace_s if self._children.by_name else 0.0)

    def _obey(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            if message.get("epoch", self._epoch) < self._epoch:
                raise ValueError(f"a newer plane (epoch {self._epoch}) is in charge")
            self._epoch = message.get("epoch", self._epoch)
            self._asks[message["ask"]](message)
        except Exception as error:  # no message may end the supervisor
            self._plane.say({"say": "confused", "why": f"{type(error).__name__}: {error}"})

    def _hello(self, message: dict[str, Any]) -> None:
        times = float(message["grace_s"]), float(message["stop_grace_s"])
        if not all(0.0 <= one <= MAX_GRACE_S for one in times):
            raise ValueError(f"grace_s and stop_grace_s must be between 0 and {MAX_GRACE_S:.0f}")
        self._grace_s, self._stop_grace_s = times
        if message.get("leased") and self._lease is None:
            self._lease = EngineLease(now())

    def _list(self, message: dict[str, Any]) -> None:
        children = [child for child in self._children.by_name.values() if child.end is None]
        running = [{"id": one.name, "pid": one.pid, "born": one.born, "note": one.note} for one in children]
        self._plane.say({"say": "running", "instances": running})

    def _start(self, message: dict[str, Any]) -> None:
        name = str(message["id"])
        try:
            if name in self._children.by_name:
                raise ValueError("it is running already")
            if self._ends_by is not None:
                raise ValueError("everything is being stopped")
            if self._lease is not None and not self._lease.holds(now()):
                raise ValueError("no lease was granted, or it has ended")
            child = self._children.spawn(name, message)
        except Exception as error:  # each start is answered
            number = (isinstance(error, OSError) and error.errno) or 0
            self._plane.say({"say": "failed", "id": name, "why": _reason(error), "errno": number})
            return
        self._plane.say({"say": "started", "id": name, "pid": child.pid, "born": child.born})

    def _end(self) -> None:
        """Accept no more planes, and stop everything."""
        if self._ends_by is not None:
            return
        self._ends_by = now() + self._stop_grace_s
        with suppress(OSError):  # before closing: a path that exists leads to a listener
            if self._path.stat().st_ino == self._inode:  # else another supervisor listens here
                self._path.unlink()
        self._selector.unregister(self._listener)
        self._listener.close()
        self._children.signal(signal.SIGTERM)


def born(pid: int) -> str:
    """When the kernel started a process; empty if there is none. Differs between processes of one pid."""
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
    """Reap a child that has ended, or an orphan: its pid and wait status. None if there are no more."""
    try:
        if not hasattr(os, "waitid"):
            pid, status = os.waitpid(-1, os.WNOHANG)
            return (pid, status) if pid else None
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        if found.si_pid in leaders:
            _signal_group(found.si_pid, signal.SIGKILL)  # before its pid is free for others
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


def _kill_orphans() -> None:
    """Kill processes that left their group and lost their parents: on Linux they are children of the supervisor."""
    deadline, orphans = now() + GROUP_GRACE_S, ["first look"]
    while orphans and now() < deadline:
        while _next_ended(()) is not None:
            pass
        orphans = []
        with suppress(OSError):
            orphans = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
        for pid in map(int, orphans):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01 if orphans else 0.0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with(supervisor: int) -> Callable[[], None]:
    """Run in a child before it becomes the engine: it dies with the supervisor."""

    def prepare() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before the line above
            os._exit(1)

    return prepare


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def main(listener: str, path: str) -> None:
    """Run until the end. Signals get handlers, because engines would inherit SIG_IGN."""
    os.umask(0o077)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = Supervisor(socket.socket(fileno=int(listener)), path)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: setattr(supervisor, "told_to_end", True))
    supervisor.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
