"""The parent of all engine processes of a plane. It outlives the plane, and ends them if no other plane connects.

A separate program with one thread, which makes no decisions. It and `children.py` use only the standard library, so it
needs no other packages. Enters: JSON lines over a unix socket, from one plane at a time. Leaves: JSON lines about
processes. The one rule: no engine outlives the supervisor, and no message from a plane ends the supervisor.

    asks    hello{grace_s, stop_grace_s, leased}  start{id, argv, env, cwd, log, shown, outlives_s}  signal{id, number}
            list{}  renew{epoch, stamp, lease_s}  end{}; each may have the epoch of its plane
    says    supervisor{pid, busy}  running{instances: [{id, pid, born}]}  started{id, pid, born}  failed{id, why, errno}
            exited{id, pid, code | signal}  confused{why}

Each engine has its own process group. Signals go to the whole group. When its leader exits, the rest is killed.
`born` distinguishes a process from a later one of the same pid. With a lease (a plane on another machine), engines run
only while it is renewed, regardless of the connection. A process with `outlives_s`, such as a gateway, owns nothing
that others could own too. It keeps running for this time after the lease.
"""

import json
import os
import selectors
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pointsman.runtimes.machine.children import (
    GROUP_GRACE_S,
    PIECE,
    PR_SET_CHILD_SUBREAPER,
    Children,
    KillTimer,
    kill_orphans,
    now,
    prctl,
    reason,
)

GRACE_S = STOP_GRACE_S = 5.0
"""Default times: how long engines keep running without a plane, and how long they then have from SIGTERM to SIGKILL."""
MAX_GRACE_S = 1e6
FIRST_VISIT_S = 10.0
"""The plane that started the supervisor must connect within this time."""
LINE_BYTES = 8 * 1024 * 1024
MAX_WAIT_S = 3600.0
GROUP_LOOK_S = 0.02
"""Interval between checks of the group of a leader that has ended."""
LATE_S = 0.25
"""How late the supervisor may kill the processes of a lease before the kernel kills the supervisor. A plane allows for
more than this time (`MARGIN_S` of `runtimes/ray/leases.py`)."""


class EngineLease:
    """The right to run engines, until a time of this machine's clock."""

    def __init__(self, at: float) -> None:
        self.ends = at + FIRST_VISIT_S
        self.is_granted = False

    def renew(self, stamp: float, lease_s: float, at: float) -> float:
        """Renew the lease, and return its end. `stamp` is a time of this clock that the plane has received: the lease
        is counted from there, so a late delivery does not extend it."""
        if not (stamp <= at and 0.0 < lease_s <= MAX_GRACE_S):
            raise ValueError(f"no lease from {stamp} on for {lease_s} s: it is {at}")
        ends = stamp + lease_s
        self.ends = max(self.ends, ends) if self.is_granted else ends
        self.is_granted = True
        return self.ends

    def holds(self, at: float) -> bool:
        """Whether a process may be started."""
        return self.is_granted and at < self.ends


class LeasedChildren:
    """Ends the children under a lease when the lease is over. Without a lease it does nothing.

    If the supervisor is frozen or waits too long for a core, the kernel kills the supervisor and its children.
    """

    def __init__(self, children: Children) -> None:
        self.lease: EngineLease | None = None
        self._children = children
        self._killed_at: float | None = None
        """When the remaining children of an ended lease are killed; None if no children are left."""
        self._switch: KillTimer | None = None
        """None without a lease, or if the kernel refused the timer. If refused, nothing is started."""

    def begin(self) -> None:
        """Let engines run only under a lease."""
        if self.lease is None:
            self.lease = EngineLease(now())
            self._switch = KillTimer()

    def renew(self, message: dict[str, Any], stop_grace_s: float) -> None:
        if self.lease is not None:
            self.lease.renew(message["stamp"], message["lease_s"], now())
            self._set_switch(stop_grace_s)

    def check_start(self, stop_grace_s: float) -> None:
        """Raise `ValueError` if nothing may be started now."""
        if self._killed_at is not None:
            raise ValueError("what ran under the lease before is being stopped")
        if self.lease is not None and not self.lease.holds(now()):
            raise ValueError("no lease was granted, or it has ended")
        self._set_switch(stop_grace_s, starts=True)

    def _set_switch(self, stop_grace_s: float, *, starts: bool = False) -> None:
        if self.lease is None or self._killed_at is not None:
            return
        if self._switch is None:
            raise ValueError("the kernel has no timer that ends what runs when the lease is over")
        needed = starts or bool(self._children.leased())
        self._switch.set(self.lease.ends + stop_grace_s + LATE_S if needed else None)

    def deadline(self) -> float | None:
        """When `check` must be called; None if no call is needed."""
        if self._killed_at is not None or self.lease is None:
            return self._killed_at
        return self.lease.ends if self._children.leased() else None

    def check(self, at: float, stop_grace_s: float) -> None:
        """End the children that may no longer run. A new lease does not save them: the plane may rely on their end."""
        leased = self._children.leased()
        if not leased or self.lease is None:
            self._killed_at = None
            self._set_switch(stop_grace_s)
        elif self._killed_at is None:
            if at >= self.lease.ends:
                self._killed_at = self.lease.ends + stop_grace_s
                self._children.signal(leased, signal.SIGTERM)
        elif at >= self._killed_at:
            self._killed_at = at + GROUP_GRACE_S
            self._children.signal(leased, signal.SIGKILL)
            if self._switch is not None:
                self._switch.set(None)  # the kernel could not do more


class PlaneConnection:
    def __init__(
        self, selector: selectors.BaseSelector, obey: Callable[[bytes], None], disconnected: Callable[[], None]
    ) -> None:
        """`obey` is called with each line. `disconnected` is called when the plane is gone."""
        self._selector, self._obey, self._disconnected = selector, obey, disconnected
        self._plane: socket.socket | None = None
        self._received = b""
        self._unsent = b""

    def accept(self, listener: socket.socket) -> bool:
        """Accept a plane. Returns False if that failed. If another plane is connected, answers so and returns False."""
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
        """Send the remaining output, for at most 1 s."""
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
            sent = self._plane.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # the plane is gone, which the next read reports
            sent = len(self._unsent)
        self._unsent = self._unsent[sent:]
        writing = selectors.EVENT_WRITE if self._unsent else 0
        self._selector.modify(self._plane, selectors.EVENT_READ | writing, self._ready)

    def _disconnect(self) -> None:
        if self._plane is not None:
            self._selector.unregister(self._plane)
            self._plane.close()
            self._plane, self._unsent = None, b""
            self._disconnected()


class Supervisor:
    """Starts and signals processes for a plane, and reports how they end."""

    def __init__(self, listener: socket.socket, path: str) -> None:
        self._listener, self._path = listener, Path(path)
        self._inode = self._path.stat().st_ino
        self._grace_s, self._stop_grace_s = GRACE_S, STOP_GRACE_S
        self._connected_until: float | None = now() + FIRST_VISIT_S
        """End of the grace time; None while a plane is connected."""
        self._epoch = 0
        """Epoch of the newest plane; messages of older planes are ignored."""
        self._ends_by: float | None = None
        """When everything is killed; None until the supervisor is told to end."""
        self.told_to_end = False
        """Safe to set in a signal handler."""
        self._selector = selectors.DefaultSelector()
        self._children = Children(self._selector)
        self._leased = LeasedChildren(self._children)
        self._asks: dict[str, Callable[[dict[str, Any]], object]] = {
            "hello": self._hello,
            "start": self._start,
            "signal": lambda message: self._children.signal_one(str(message["id"]), int(message["number"])),
            "list": self._list,
            "renew": lambda message: self._leased.renew(message, self._stop_grace_s),
            "end": lambda _: self._end(),
        }
        self._plane = PlaneConnection(self._selector, self._obey, self._disconnected)
        self._selector.register(listener, selectors.EVENT_READ, lambda _: self._accept())
        self._woken, waker = socket.socketpair()
        for end in (self._woken, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.detach(), warn_on_full_buffer=False)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda _: self._woken.recv(PIECE))

    def run(self) -> None:
        """Run until the supervisor is told to end or left without a plane, and no process is left."""
        while self._ends_by is None or self._children.by_name:
            ready = self._selector.select(self._timeout())
            # The end of the old plane must be noticed before a new plane is accepted.
            ready.sort(key=lambda pair: pair[0].fileobj is self._listener)
            for key, events in ready:
                if key.fd in self._selector.get_map():
                    key.data(events)
            for child in self._children.reap():
                self._plane.say({"say": "exited", "id": child.name, "pid": child.pid, **(child.end or {})})
                if not self._children.by_name and self._connected_until is not None:
                    self._connected_until = now()
            self._check_deadlines()
        kill_orphans()
        self._plane.finish()

    @property
    def _alone_until(self) -> float | None:
        """When everything is stopped; None while a plane is connected."""
        if self._leased.lease is None:
            return self._connected_until
        return self._leased.lease.ends + max((child.outlives_s for child in self._children.running()), default=0.0)

    def _timeout(self) -> float | None:
        """Seconds until the next action; None if no action is due."""
        groups = self._children.next_deadline()
        deadlines = [self._alone_until, self._leased.deadline()] if self._ends_by is None else [self._ends_by]
        known: list[float] = [at for at in (*deadlines, groups) if at is not None]
        if not known:
            return None
        longest_s = MAX_WAIT_S if groups is None else GROUP_LOOK_S
        return max(0.0, min(min(known) - now(), longest_s))

    def _check_deadlines(self) -> None:
        at, alone_until = now(), self._alone_until
        if self._ends_by is not None:
            if at >= self._ends_by:
                self._children.signal(self._children.running(), signal.SIGKILL)
                self._ends_by = at + GROUP_GRACE_S
        elif self.told_to_end or (alone_until is not None and at >= alone_until):
            self._end()
        else:
            self._leased.check(at, self._stop_grace_s)

    def _accept(self) -> None:
        if self._plane.accept(self._listener):
            self._connected_until = None

    def _disconnected(self) -> None:
        """Leave engines running for a time, for the next plane."""
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
        if message.get("leased"):
            self._leased.begin()

    def _list(self, message: dict[str, Any]) -> None:
        running = [
            {"id": child.name, "pid": child.pid, "born": child.born, "note": child.note}
            for child in self._children.running()
        ]
        self._plane.say({"say": "running", "instances": running})

    def _start(self, message: dict[str, Any]) -> None:
        name = str(message["id"])
        try:
            if name in self._children.by_name:
                raise ValueError("it is running already")
            if self._ends_by is not None:
                raise ValueError("everything is being stopped")
            self._leased.check_start(self._stop_grace_s)
            child = self._children.spawn(name, message)
        except Exception as error:  # each start gets an answer
            number = error.errno if isinstance(error, OSError) else None
            self._plane.say({"say": "failed", "id": name, "why": reason(error), "errno": number or 0})
            return
        self._plane.say({"say": "started", "id": name, "pid": child.pid, "born": child.born})

    def _end(self) -> None:
        """Accept no more planes, and stop everything."""
        if self._ends_by is not None:
            return
        self._ends_by = now() + self._stop_grace_s
        with suppress(OSError):  # before the socket is closed, because an existing path must lead to a listener
            if self._path.stat().st_ino == self._inode:  # otherwise another supervisor listens here
                self._path.unlink()
        self._selector.unregister(self._listener)
        self._listener.close()
        self._children.signal(self._children.running(), signal.SIGTERM)


def main(listener: str, path: str) -> None:
    """Run until the end. Signals have handlers and are not ignored, because engines would inherit SIG_IGN."""
    os.umask(0o077)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = Supervisor(socket.socket(fileno=int(listener)), path)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: setattr(supervisor, "told_to_end", True))
    supervisor.run()
