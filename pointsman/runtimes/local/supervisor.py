"""The parent of all engine processes of a plane. It outlives the plane, and takes them along if nobody comes back.

A program of its own (`python -I -S supervisor.py LISTENER_FD SOCKET_PATH`), in one file, because it runs without the
package: standard library only, one thread, no decisions. Enters: JSON lines over a unix socket, from one plane at a
time. Leaves: JSON lines about processes. The one rule: no engine outlives the supervisor, and the supervisor survives
whatever a plane sends.

    asks    hello{grace_s, stop_grace_s}  start{id, argv, env, cwd, log}  signal{id, number}  list{}  end{}
    says    supervisor{pid, busy}  running{instances: [{id, pid, born}]}  started{id, pid, born}  failed{id, why}
            exited{id, pid, code | signal}  confused{why}

Each engine has a session and a process group of its own; signals go to the whole group, and when its leader exits, so
must the rest. `born` tells a process from a later one of the same number.
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

GRACE_S = 5.0
"""How long engines live on without a plane, unless the plane says otherwise."""
STOP_GRACE_S = 5.0
"""From SIGTERM to SIGKILL when nobody came back."""
LONGEST_S = 1e6
FIRST_VISIT_S = 10.0
"""Whoever started the supervisor connects within this."""
GROUP_GRACE_S = 2.0
"""A killed process may take this long to vanish; what hangs in the kernel for longer is not waited for."""
LOG_BYTES = 8 * 1024 * 1024
"""Half of what a log may take: at this size it becomes `.1`, and the `.1` before it goes."""
LINE_BYTES = 8 * 1024 * 1024
PIECE = 64 * 1024
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Log:
    """What a process writes, appended to a file of bounded size. A full disk loses lines, never the process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = None
        self._size = 0
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
        """One line of ours between those of the process."""
        words = " ".join(text.split())
        self.write(f"[pointsman] {time.strftime('%Y-%m-%d %H:%M:%S')} {words}\n".encode(errors="replace"))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._size = os.fstat(self._file).st_size


class Child:
    """One engine process and its group."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], output: int, log: Log) -> None:
        self.name = name
        self.process = process
        self.pid = process.pid
        self.born = born(process.pid)
        self.output: int | None = output
        self.log = log
        self.end: dict[str, int] | None = None
        """How its leader ended; None: it runs."""
        self.gone_by = 0.0
        """The rest of its group is not waited for beyond this."""


class Supervisor:
    """Accepts a plane, starts and signals what it asks for, and reports what became of it."""

    def __init__(self, listener: socket.socket, path: str) -> None:
        self._listener = listener
        self._path = Path(path)
        self._socket = self._path.stat().st_ino
        self._children: dict[str, Child] = {}
        self._plane: socket.socket | None = None
        self._heard, self._unsaid = b"", b""
        self._grace_s, self._stop_grace_s = GRACE_S, STOP_GRACE_S
        self._alone_until: float | None = time.monotonic() + FIRST_VISIT_S
        """None: a plane is connected."""
        self._ends_by: float | None = None
        """Everything was told to end, and is killed at this time; None: not yet."""
        self._asks: dict[str, Callable[[dict[str, Any]], None]] = {
            "hello": self._hello,
            "start": self._start,
            "signal": self._signal,
            "list": self._list,
            "end": lambda _: self._end(),
        }
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, lambda _: self._accept())
        self._woken, waker = socket.socketpair()
        self._woken.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.detach(), warn_on_full_buffer=False)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda _: self._woken.recv(PIECE))
        self._told_to_end = False

    def run(self) -> None:
        """Until it was told to end or was left alone, and nothing runs any more."""
        while self._ends_by is None or self._children:
            ready = self._selector.select(self._patience())
            # A new plane comes after the end of the old one has been noticed.
            ready.sort(key=lambda pair: pair[0].fileobj is self._listener)
            for key, events in ready:
                if key.fd in self._selector.get_map():
                    key.data(events)
            self._reap()
            self._keep_time()
        _sweep()
        if self._plane is not None:
            self._plane.setblocking(True)
            self._plane.settimeout(1.0)
            with suppress(OSError):
                self._plane.sendall(self._unsaid)

    def end_soon(self) -> None:
        """Safe to call from a signal handler."""
        self._told_to_end = True

    # Time

    def _patience(self) -> float | None:
        times = [self._ends_by if self._ends_by is not None else self._alone_until]
        times += [child.gone_by for child in self._children.values() if child.end is not None]
        known = [at for at in times if at is not None]
        if not known:
            return None
        waiting_for_groups = any(child.end is not None for child in self._children.values())
        return max(0.0, min(min(known) - time.monotonic(), 0.02 if waiting_for_groups else 3600.0))

    def _keep_time(self) -> None:
        now = time.monotonic()
        if self._ends_by is not None:
            if now >= self._ends_by:
                self._signal_all(signal.SIGKILL)
                self._ends_by = now + GROUP_GRACE_S
        elif self._told_to_end or (self._alone_until is not None and now >= self._alone_until):
            self._end()

    def _end(self) -> None:
        """Take leave: nobody can connect any more, and everything is told to stop."""
        if self._ends_by is not None:
            return
        self._ends_by = time.monotonic() + self._stop_grace_s
        with suppress(OSError):
            if self._path.stat().st_ino == self._socket:  # else somebody has taken our place
                self._path.unlink()  # before closing: whoever finds the path finds somebody there
        self._selector.unregister(self._listener)
        self._listener.close()
        self._signal_all(signal.SIGTERM)

    # The plane

    def _accept(self) -> None:
        try:
            plane, _ = self._listener.accept()
        except OSError:
            return
        if self._plane is not None:
            with suppress(OSError):
                plane.sendall(_line({"say": "supervisor", "pid": os.getpid(), "busy": True}))
            plane.close()
            return
        plane.setblocking(False)
        self._plane, self._heard, self._unsaid = plane, b"", b""
        self._alone_until = None
        self._selector.register(plane, selectors.EVENT_READ, self._talk)
        self._say({"say": "supervisor", "pid": os.getpid(), "busy": False})

    def _talk(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if events & selectors.EVENT_READ:
            self._listen()

    def _listen(self) -> None:
        assert self._plane is not None
        try:
            data = self._plane.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self._heard = (self._heard + data).split(b"\n")
        if not data or len(self._heard) > LINE_BYTES:
            self._part()
        for line in lines:
            self._obey(line)

    def _obey(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            self._asks[message["ask"]](message)
        except Exception as error:  # whatever a plane sends, the supervisor lives
            self._say({"say": "confused", "why": f"{type(error).__name__}: {error}: {line[:200]!r}"})

    def _part(self) -> None:
        """The plane is gone. Engines run on for a while, for its successor."""
        if self._plane is not None:
            self._selector.unregister(self._plane)
            self._plane.close()
            self._plane, self._unsaid = None, b""
            self._alone_until = time.monotonic() + (self._grace_s if self._children else 0.0)

    def _say(self, message: dict[str, Any]) -> None:
        if self._plane is not None:
            self._unsaid += _line(message)
            self._flush()
        if len(self._unsaid) > LINE_BYTES:  # it only talks, and never listens
            self._part()

    def _flush(self) -> None:
        assert self._plane is not None
        try:
            self._unsaid = self._unsaid[self._plane.send(self._unsaid) :]
        except BlockingIOError:
            pass
        except OSError:  # it is gone: reading will say so
            self._unsaid = b""
        writing = selectors.EVENT_WRITE if self._unsaid else 0
        self._selector.modify(self._plane, selectors.EVENT_READ | writing, self._talk)

    # What it asks

    def _hello(self, message: dict[str, Any]) -> None:
        grace_s, stop_grace_s = float(message["grace_s"]), float(message["stop_grace_s"])
        if not (0.0 <= grace_s <= LONGEST_S and 0.0 <= stop_grace_s <= LONGEST_S):
            raise ValueError("these are no times to wait")
        self._grace_s, self._stop_grace_s = grace_s, stop_grace_s

    def _list(self, message: dict[str, Any]) -> None:
        running = [
            {"id": child.name, "pid": child.pid, "born": child.born}
            for child in self._children.values()
            if child.end is None
        ]
        self._say({"say": "running", "instances": running})

    def _start(self, message: dict[str, Any]) -> None:
        name = str(message["id"])
        try:
            if name in self._children:
                raise ValueError("it is running already")
            if self._ends_by is not None:
                raise ValueError("everything is being stopped")
            child = self._spawn(name, message)
        except Exception as error:  # whatever the reason, whoever asked must hear it
            self._say({"say": "failed", "id": name, "why": _reason(error)})
            return
        self._say({"say": "started", "id": name, "pid": child.pid, "born": child.born})

    def _spawn(self, name: str, message: dict[str, Any]) -> Child:
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
        child = Child(name, process, read, log)
        self._children[name] = child  # from here on its end will be noticed
        log.note(f"started as process {child.pid}: {' '.join(argv)}")
        os.set_blocking(read, False)
        self._selector.register(read, selectors.EVENT_READ, lambda _: self._copy_output(child))
        return child

    def _signal(self, message: dict[str, Any]) -> None:
        child = self._children.get(str(message["id"]))
        if child is not None and child.end is None:  # else it has ended meanwhile, which was reported
            _signal_group(child.pid, int(message["number"]))

    def _signal_all(self, number: int) -> None:
        for child in self._children.values():
            if child.end is None:
                _signal_group(child.pid, number)

    # Children

    def _copy_output(self, child: Child) -> bool:
        """One piece; whether there may be more."""
        if child.output is None:
            return False
        try:
            data = os.read(child.output, PIECE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            child.log.write(data)
            return True
        self._close_output(child)
        return False

    def _close_output(self, child: Child) -> None:
        if child.output is not None:
            self._selector.unregister(child.output)
            os.close(child.output)
            child.output = None

    def _reap(self) -> None:
        by_pid = {child.pid: child for child in self._children.values() if child.end is None}
        while (ended := _next_ended(by_pid)) is not None:
            child = by_pid.pop(ended[0], None)
            if child is not None:
                child.process.returncode = code = os.waitstatus_to_exitcode(ended[1])
                child.end = {"code": code} if code >= 0 else {"signal": -code}
                child.gone_by = time.monotonic() + GROUP_GRACE_S
        for child in [child for child in self._children.values() if child.end is not None]:
            if _is_empty(child.pid) or time.monotonic() >= child.gone_by:
                self._bury(child)

    def _bury(self, child: Child) -> None:
        assert child.end is not None
        for _ in range(64):  # the last words; whoever escaped its group may have more to say, without end
            if not self._copy_output(child):
                break
        self._close_output(child)
        how = ", ".join(f"{kind} {number}" for kind, number in child.end.items())
        child.log.note(f"process {child.pid} ended: {how}")
        child.log.close()
        del self._children[child.name]
        self._say({"say": "exited", "id": child.name, "pid": child.pid, **child.end})
        if not self._children and self._alone_until is not None:
            self._alone_until = time.monotonic()


def born(pid: int) -> str:
    """When a process was started, as its kernel says; empty: there is none. Differs between processes of one number."""
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
    """(pid, wait status) of a child that has ended, now reaped; of orphans that fell to us too. None: no more."""
    try:
        if not hasattr(os, "waitid"):
            pid, status = os.waitpid(-1, os.WNOHANG)
            return (pid, status) if pid else None
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        if found.si_pid in leaders:
            _signal_group(found.si_pid, signal.SIGKILL)  # before its number is free for others
        return os.waitpid(found.si_pid, 0)
    except ChildProcessError:
        return None


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
        if number == signal.SIGTERM:
            os.killpg(pid, signal.SIGCONT)  # what is stopped cannot hear


def _is_empty(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _sweep() -> None:
    """Kill whoever left its group and lost its parents: they are our children now, where the system does that."""
    deadline = time.monotonic() + GROUP_GRACE_S
    while time.monotonic() < deadline:
        while _next_ended(()) is not None:
            pass
        try:
            strangers = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
        except OSError:
            return
        if not strangers:
            return
        for pid in map(int, strangers):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with(supervisor: int) -> Callable[[], None]:
    """What a child does before it becomes the engine: it dies if the supervisor does."""

    def prepare() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before we could say so
            os._exit(1)

    return prepare


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def main(listener: str, path: str) -> None:
    """Keep until the end. Signals are only noted: handlers, unlike SIG_IGN, are not passed on to engines."""
    os.umask(0o077)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = Supervisor(socket.socket(fileno=int(listener)), path)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: supervisor.end_soon())
    supervisor.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
