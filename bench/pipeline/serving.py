"""A server, from its first correct response to the end of its last process."""

import os
import select
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import msgspec

from bench.gateway.cpu import cpu_ns, family, resident_mb
from bench.gateway.processes import Process, free_port
from bench.pipeline.request_client import check

START_S = 90.0
END_S, LAST_S = 30.0, 3.0
"""Maximum time for a server to end, and then for each of its processes."""
CALM_S, CALM_SHARE = 10.0, 0.25
"""Maximum time to wait until a new server uses less than this share of a core."""


class Launch(msgspec.Struct, frozen=True):
    """How to start a server, and where it answers."""

    argv: list[str]
    path: str
    env: Mapping[str, str] = {}


class Serving:
    """A running server."""

    def __init__(self, port: int, path: str, process: Process) -> None:
        self.port, self.path = port, path
        self.pid = process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.path}"

    def cpu_s(self) -> float:
        """Of all its processes so far."""
        return cpu_ns(family(self.pid)) / 1e9

    def resident_mb(self) -> float:
        """Of all its processes; shared memory counts for each."""
        return resident_mb(family(self.pid))

    def calm_down(self) -> float:
        """Wait until start-up work is done. Returns the share of a core that it uses while idle."""
        deadline = time.monotonic() + CALM_S
        while True:
            before = self.cpu_s()
            time.sleep(1.0)
            share = self.cpu_s() - before
            if share < CALM_SHARE or time.monotonic() > deadline:
                return share


class Server(ABC):
    """One way to serve an application."""

    name: ClassVar[str]

    @abstractmethod
    def missing(self) -> str:
        """Why it cannot be started and what to do about it; empty if it can."""

    @abstractmethod
    def launch(self, app: str, port: int, folder: Path) -> Launch:
        """Serve the application on `port` of the loopback interface; `folder` is for its files."""

    def version(self) -> str:
        """What was measured."""
        return ""

    @contextmanager
    def serving(self, app: str, folder: Path) -> Iterator[Serving]:
        """Raises RuntimeError if it never gives a right answer."""
        folder.mkdir()
        port = free_port()
        launch = self.launch(app, port, folder)
        cores = os.sched_getaffinity(0)
        process = Process(launch.argv, cores=cores, log=folder / "output.log", env=launch.env)
        try:
            wait_until_right(app, port, launch.path, process)
            yield Serving(port, launch.path, process)
        finally:
            end(process)


def wait_until_right(app: str, port: int, path: str, process: Process) -> None:
    """Until it gives the right answer; RuntimeError if it gives another, ends first or takes too long."""
    deadline = time.monotonic() + START_S
    failure = "it did not listen"
    while process.running and time.monotonic() < deadline:
        try:
            return check(app, port, path)
        except ConnectionRefusedError:
            pass
        except OSError as error:
            failure = str(error)
        time.sleep(0.1)
    raise RuntimeError(f"it does not serve: {failure if process.running else process.log_tail()}")


def end(process: Process) -> None:
    """Ends it and all that descended from it, in whatever group: by handles, which no later process can inherit."""
    handles = []
    for pid in family(process.pid):
        with suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    process.stop(END_S)
    for handle in handles:
        if not select.select([handle], [], [], LAST_S)[0]:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
