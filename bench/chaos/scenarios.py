"""The scenarios: each injects one fault into a plane under load, and says what that may do to requests.

Enters: a running plane. Leaves: `problems`, what the plane did not do about the fault. The one rule: faults are real (a
mounted disk that is full, signals, sockets, answers of a server); nothing of the plane is replaced by a fake.
"""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

from bench.chaos.clients import Sample, Verdict
from bench.chaos.disks import SmallDisk, allow_writes, can_mount, forbid_writes
from bench.chaos.faults import GARBAGE, HUNG, KILLED, FaultInjector, inject_fault
from bench.chaos.planes import LivePlane

RECOVERY_S = 30.0
"""Far longer than any repair takes."""
SUPERVISOR_GRACE_S = 4.0
"""A supervisor waits longer than this for a new plane."""
BEFORE = 0.2
"""Share of the time before the fault."""
KEY = "chaos"
"""The API key of the clients, where one is needed."""


class Settings(NamedTuple):
    """The options of the command line."""

    seconds: float = 5.0
    """Duration of each scenario."""
    seed: int = 1
    every_s: float = 1.0
    """Time between two faults of the scenario `instances`."""
    instances: int = 4
    clients: int = 12
    engine: str = "simulated"
    weights: str = ""
    """GGUF file for llama.cpp."""
    policy: str = ""
    """Scheduling policy; the default profile if empty."""

    @property
    def is_simulated(self) -> bool:
        return self.engine == "simulated"


class Scenario(ABC):
    """One fault, injected under load."""

    name: ClassVar[str]
    what: ClassVar[str]
    """The fault, for the table of the command line."""
    allowed: ClassVar[frozenset[Verdict]] = frozenset({Verdict.INTERRUPTED})
    """How requests may end, besides being served."""
    min_served: ClassVar[float] = 0.0
    """Minimum share of the requests to be served."""
    key: ClassVar[str] = ""
    managed: ClassVar[int] = 0
    """Change of the number of instances that the plane starts."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.problems: list[str] = []
        self.gateway: dict[str, Any] = {}
        """Settings that are added to the section `gateway` of the manifest."""
        self.endpoints: list[dict[str, Any]] = []

    def unavailable(self) -> str:
        """Why it cannot run here; empty if it can."""
        return ""

    def open(self, folder: Path, stack: ExitStack) -> LivePlane:
        """Prepare everything, and return the plane, which is not started yet."""
        plane = LivePlane(folder)
        stack.callback(plane.close)
        return plane

    def run(self, plane: LivePlane) -> None:
        """Inject the fault; takes `settings.seconds`, or longer if a repair takes longer."""
        began = time.monotonic()
        time.sleep(BEFORE * self.settings.seconds)
        self.strike(plane)
        time.sleep(max(began + self.settings.seconds - time.monotonic(), 0.0))

    @abstractmethod
    def strike(self, plane: LivePlane) -> None:
        """Inject the fault once into a plane under load; return when it is over, or when it continues by itself."""

    def end(self, plane: LivePlane) -> None:
        """End the fault, after the load."""

    def was_cut(self, sample: Sample) -> bool:
        """Whether the fault itself ended the connection of a request, so that the client knows of the failure."""
        return False

    @property
    def counts_survive(self) -> bool:
        """Whether the last plane has counted all requests."""
        return True

    def expect(self, plane: LivePlane, condition: Callable[[], object], what: str) -> None:
        """Wait until the plane has reacted to the fault."""
        try:
            plane.until(condition, what, RECOVERY_S)
        except AssertionError:
            self.problems.append(f"it did not happen within {RECOVERY_S:g} s: {what}")


# Instances


class FaultyInstances(Scenario):
    name = "instances"
    what = "random instances are killed, stopped, or send garbage; one is always healthy"

    def run(self, plane: LivePlane) -> None:
        self.strike(plane)  # from the beginning to the end

    def strike(self, plane: LivePlane) -> None:
        kinds = [KILLED, HUNG, GARBAGE] if self.settings.is_simulated else [KILLED, HUNG]
        FaultInjector(plane, self.settings.seed, kinds).run(self.settings.seconds, self.settings.every_s)


class FaultyEngine(Scenario):
    """One engine stays faulty. It is a server that the plane did not start, so the plane cannot replace it."""

    managed = -1
    fault: ClassVar[Mapping[str, Any]]

    def unavailable(self) -> str:
        return "" if self.settings.is_simulated else "needs simulated engines"

    def open(self, folder: Path, stack: ExitStack) -> LivePlane:
        plane = super().open(folder, stack)
        command = [sys.executable, "-m", "pointsman.simulator", "--model", "m", "--max-num-seqs", "8"]
        command += ["--tokens-per-second", "50", "--first-token-ms", "40"]
        engine = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(engine.terminate)
        assert engine.stdout is not None
        self._url = engine.stdout.readline().split()[-1]
        self.endpoints = [{"name": "faulty", "url": self._url, "engine": "simulated"}]
        return plane

    def strike(self, plane: LivePlane) -> None:
        inject_fault(self._url, self.fault)

    def end(self, plane: LivePlane) -> None:
        inject_fault(self._url, None)


class Overloaded(FaultyEngine):
    name = "429"
    what = "one engine answers every request with 429"
    allowed = frozenset({Verdict.REFUSED})
    min_served = 0.99
    fault: ClassVar[Mapping[str, Any]] = {"fault": "status", "status": 429}


class OverloadedForATime(Overloaded):
    name = "429-retry-after"
    what = "one engine answers every request with 429 and Retry-After: 2"
    fault: ClassVar[Mapping[str, Any]] = {"fault": "status", "status": 429, "retryAfter": 2}


class WrongKey(Overloaded):
    name = "401"
    what = "one engine answers every request with 401"
    fault: ClassVar[Mapping[str, Any]] = {"fault": "status", "status": 401}


class WrongModel(WrongKey):
    name = "404"
    what = "one engine answers every request with 404"
    fault: ClassVar[Mapping[str, Any]] = {"fault": "status", "status": 404}


class WrongVersion(WrongKey):
    name = "400"
    what = "one engine answers every request with 400"
    fault: ClassVar[Mapping[str, Any]] = {"fault": "status", "status": 400}


class Dripping(FaultyEngine):
    name = "drip"
    what = "one engine sends a byte every 300 ms, and never completes an event"
    fault: ClassVar[Mapping[str, Any]] = {"fault": "drip", "delayMs": 300, "afterTokens": 4}

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.gateway = {"upstream": {"firstTokenTimeout": "1s", "stallTimeout": "1s"}}


# The machine


class FullDisk(Scenario):
    name = "full-disk"
    what = "the disk of the state directory is full while an engine is killed; later there is space again"

    def open(self, folder: Path, stack: ExitStack) -> LivePlane:
        self._disk: SmallDisk | None = None
        if can_mount():
            self._disk = SmallDisk(folder / "state")
            stack.callback(self._disk.close)
        return super().open(folder, stack)

    def strike(self, plane: LivePlane) -> None:
        self._problems_before = plane.status()["problems"]
        if self._disk is None:  # no file can grow, as on a full disk
            forbid_writes(plane.process.pid)
        else:
            self._disk.fill()
        before = plane.pids()
        victim = min(before)
        os.kill(before[victim], signal.SIGKILL)
        self.expect(
            plane, lambda: plane.pids().get(victim, before[victim]) != before[victim], "a new process for the engine"
        )
        self.expect(plane, lambda: plane.status()["problems"] != self._problems_before, "status names the problem")
        if self._disk is None:
            allow_writes(plane.process.pid)
        else:
            self._disk.free()

    def end(self, plane: LivePlane) -> None:
        self.expect(plane, lambda: plane.status()["problems"] == self._problems_before, "the problem is gone")


class FewDescriptors(Scenario):
    name = "descriptors"
    what = "strangers without a key open more connections than the plane may have files open (256)"
    allowed = frozenset()
    min_served = 1.0
    key = KEY
    open_files = 256

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._strangers: list[socket.socket] = []
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        self.gateway = {"tenants": [{"name": "load"}], "keys": [{"tenant": "load", "sha256": digest}]}

    def open(self, folder: Path, stack: ExitStack) -> LivePlane:
        plane = LivePlane(folder, open_files=self.open_files)
        stack.callback(plane.close)
        stack.callback(self._close_all)
        return plane

    def strike(self, plane: LivePlane) -> None:
        self._before = plane.pids()
        where = urlsplit(plane.url)
        for _ in range(self.open_files + 50):
            try:
                self._strangers.append(socket.create_connection((where.hostname, where.port or 80), 2.0))
            except OSError:  # refused, or not accepted: the plane may do that to strangers
                continue

    def end(self, plane: LivePlane) -> None:
        if plane.pids() != self._before:
            self.problems.append(f"engines were replaced: {self._before} before, {plane.pids()} after")
        self._close_all()

    def _close_all(self) -> None:
        for stranger in self._strangers:
            stranger.close()
        self._strangers.clear()


# The plane itself


class DeadTasks(Scenario):
    name = "tasks"
    what = "every background task of the plane fails, twice; then an engine is stopped"

    def open(self, folder: Path, stack: ExitStack) -> LivePlane:
        plane = LivePlane(folder, launcher="bench.chaos.launcher")
        stack.callback(plane.close)
        return plane

    def strike(self, plane: LivePlane) -> None:
        for _ in range(2):
            plane.process.send_signal(signal.SIGUSR1)
            time.sleep(BEFORE * self.settings.seconds)
        before = plane.pids()
        victim = min(before)
        os.kill(before[victim], signal.SIGSTOP)  # only tasks can find it and replace it
        self.expect(
            plane, lambda: plane.pids().get(victim, before[victim]) != before[victim], "a stopped engine is replaced"
        )

    def end(self, plane: LivePlane) -> None:
        killed = {line.partition("killed ")[2] for line in plane.log().splitlines() if line.startswith("killed ")}
        shown = {one["facts"]["task"] for one in plane.status()["problems"] if one["code"] == "task-failed"}
        if not killed:
            self.problems.append("no background task was killed")
        self.problems += [f'status does not name the task "{task}"' for task in sorted(killed - shown)]


class KilledPlane(Scenario):
    name = "plane"
    what = "the plane is killed, and started again with the same state"
    allowed = frozenset({Verdict.UNREACHABLE})

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        with socket.socket() as taken:  # clients come back to the same port
            taken.bind(("127.0.0.1", 0))
            self.gateway = {"listen": "127.0.0.1:{1}".format(*taken.getsockname())}
        self._killed_at = float("inf")

    def strike(self, plane: LivePlane) -> None:
        before = plane.pids()
        plane.kill()
        self._killed_at = time.monotonic()
        up_s = plane.up()
        if plane.pids() != before and up_s < SUPERVISOR_GRACE_S:
            self.problems.append("the engines were not adopted")

    def was_cut(self, sample: Sample) -> bool:
        return sample.verdict is Verdict.LOST and sample.began <= self._killed_at

    @property
    def counts_survive(self) -> bool:
        return False


class KilledGateways(Scenario):
    name = "gateways"
    what = "of two gateway processes, one is killed, then the other at the same time as an engine"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        with socket.socket() as taken:  # both listen on the same port
            taken.bind(("127.0.0.1", 0))
            self.gateway = {"listen": "127.0.0.1:{1}".format(*taken.getsockname()), "processes": 2}
        self._ends: list[tuple[float, float]] = []
        """From when to when each of them ended."""

    def strike(self, plane: LivePlane) -> None:
        self._kill(plane, "gateway-1")
        self.expect(plane, lambda: self._are_up(plane), "another gateway-1")
        time.sleep(BEFORE * self.settings.seconds)
        before = plane.pids()
        victim = min(before)
        os.kill(before[victim], signal.SIGKILL)
        self._kill(plane, "gateway-2")
        self.expect(plane, lambda: self._are_up(plane), "another gateway-2")
        self.expect(
            plane, lambda: plane.pids().get(victim, before[victim]) != before[victim], "a new process for the engine"
        )

    def end(self, plane: LivePlane) -> None:
        restarts = {one["name"]: one["restarts"] for one in plane.status()["gateways"]}
        if restarts != {"gateway-1": 1, "gateway-2": 1}:
            self.problems.append(f"gateways were restarted more or less than once: {restarts}")

    def was_cut(self, sample: Sample) -> bool:
        """Among its connections, or those that waited to be accepted."""
        is_end = sample.verdict in (Verdict.LOST, Verdict.UNREACHABLE)
        return is_end and any(sample.began <= until and since <= sample.ended for since, until in self._ends)

    @property
    def counts_survive(self) -> bool:
        return False

    def _are_up(self, plane: LivePlane) -> bool:
        return all(one["connected"] and one["url"] for one in plane.status()["gateways"])

    def _kill(self, plane: LivePlane, name: str) -> None:
        [pid] = [one["pid"] for one in plane.status()["gateways"] if one["name"] == name]
        since = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.expect(plane, lambda: not Path(f"/proc/{pid}").exists(), f"the end of {name}")
        self._ends.append((since, time.monotonic()))


class KilledSupervisor(Scenario):
    name = "supervisor"
    what = "the supervisor is killed, and all engines with it"
    allowed = frozenset({Verdict.INTERRUPTED, Verdict.REFUSED})

    def strike(self, plane: LivePlane) -> None:
        [supervisor] = plane.supervisors()
        os.kill(supervisor, signal.SIGKILL)
        self.expect(plane, lambda: plane.supervisors() not in ([], [supervisor]), "a new supervisor")


KINDS: Sequence[type[Scenario]] = (
    FaultyInstances,
    Overloaded,
    OverloadedForATime,
    WrongKey,
    WrongModel,
    WrongVersion,
    Dripping,
    FullDisk,
    FewDescriptors,
    DeadTasks,
    KilledPlane,
    KilledGateways,
    KilledSupervisor,
)
SCENARIOS = {kind.name: kind for kind in KINDS}
