"""A real plane: `pointsman up` in a subprocess. Its processes are found by a variable in their environment."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from pointsman.cli.client import Client, NoPlane, PlaneSilent
from pointsman.cli.display import deployments_of
from pointsman.errors import PointsmanError

MARK = "POINTSMAN_LIVE"
TIMEOUT_S = 60.0
"""Far longer than any step takes."""
SUPERVISOR = "machine.supervisor"
"""Part of a supervisor's command line."""


class LivePlane:
    """A state directory and the plane that may run there."""

    def __init__(
        self,
        folder: Path,
        *,
        launcher: str = "pointsman.cli.main",
        open_files: int | None = None,
        patience_s: float = TIMEOUT_S,
    ) -> None:
        """`launcher`: the module that runs `pointsman up`. `open_files`: hard limit of open files of the plane.
        `patience_s`: how long to wait for what is due."""
        self._patience_s = patience_s
        self.program = [sys.executable, "-m", launcher]
        """The program that runs commands."""
        self._open_files = open_files
        self.folder = folder
        """Holds the manifests; working directory of the plane."""
        self.move(folder / "state")
        self._mark = uuid4().hex
        self.environment = {MARK: self._mark, "NO_COLOR": "1"}
        """Added to our own for every process of the plane."""
        self.flags: list[str] = []
        """Options of `pointsman up`."""
        self._process: subprocess.Popen[bytes] | None = None

    # Lifecycle

    def up(self, manifest: str | None = None, *, wait: bool = True, timeout_s: float | None = None) -> float:
        """Start the plane, with the last applied manifest if None. Seconds until every instance was ready."""
        began = time.monotonic()
        file = [] if manifest is None else [str(self.write(manifest))]
        command = [*self.program, "up", *file, *self.flags, "--state", str(self.state)]
        if self._open_files is not None:
            command = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(self._open_files), *command]
        with (self.folder / "up.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        if wait:
            self.until(self.is_settled, "all instances ready", timeout_s)
        else:
            self.until(self.is_reachable, "plane reachable", timeout_s)
        return time.monotonic() - began

    def move(self, state: Path) -> None:
        """Use this directory for the state from now on."""
        self.state, self.admin = state, Client(state)

    def write(self, manifest: str, name: str = "manifest.yaml") -> Path:
        file = self.folder / name
        file.write_text(manifest, encoding="utf-8")
        return file

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the plane was not started"
        return self._process

    def kill(self) -> None:
        """SIGKILL to the plane, not to its supervisor or engines."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM to the plane. Its exit code."""
        self.process.terminate()
        return self.process.wait(self._patience_s)

    def close(self) -> None:
        """Stop the plane. Raises AssertionError if it leaves a process behind."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._patience_s)
        deadline = time.monotonic() + 10.0
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        assert left == {}, f"processes were left behind: {left}; log of the plane:\n{self.log_tail()}"

    # Status

    def status(self) -> dict[str, Any]:
        """The data of `pointsman status`."""
        status: dict[str, Any] = self.admin.get("status")
        return status

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return str(self.status()["url"])

    def instances(self, deployment: str = "") -> dict[str, dict[str, Any]]:
        """Status of each instance, by id; of all deployments if empty."""
        return {
            instance["id"]: instance
            for one in self.status()["deployments"]
            if deployment in ("", one["name"])
            for instance in one["instances"]
        }

    def pids(self, deployment: str = "") -> dict[str, int]:
        """Process ids of ready engines, by instance id."""
        return {
            name: int(one["process"] or 0)
            for name, one in self.instances(deployment).items()
            if one["phase"] == "ready"
        }

    def is_settled(self) -> bool:
        """Whether every deployment has exactly its target instances, all ready."""
        if self.process.poll() is not None:
            raise AssertionError(f"the plane exited with {self.process.returncode}:\n{self.log_tail()}")
        try:
            return all(one.settled for one in deployments_of(self.status()))
        except (NoPlane, PlaneSilent):
            return False

    def is_reachable(self) -> bool:
        """Whether its admin API answers."""
        return self.admin.is_there()

    def processes(self) -> dict[int, str]:
        """Command lines of the plane's live processes (itself, supervisor, engines), by pid."""
        setting = f"{MARK}={self._mark}".encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                if setting in (folder / "environ").read_bytes().split(b"\0"):
                    state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]
                    if state not in (b"Z", b"X"):
                        found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def supervisors(self) -> list[int]:
        """Process ids of its supervisors; there should be one."""
        return [pid for pid, command in self.processes().items() if SUPERVISOR in command]

    def log(self) -> str:
        """The plane's output."""
        return (self.folder / "up.log").read_text(encoding="utf-8", errors="replace")

    def log_tail(self) -> str:
        return self.log()[-4000:]

    def until(self, condition: Callable[[], object], what: str, timeout_s: float | None = None) -> None:
        """Wait for a condition. Raises AssertionError after `timeout_s`; None: after the patience for this plane."""
        timeout_s = self._patience_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                log = f"log of the plane:\n{self.log_tail()}"
                raise AssertionError(f"not within {timeout_s:g} s: {what}; seen: {self._seen()}; {log}")
            time.sleep(0.02)

    def _seen(self) -> str:
        """What every instance does, for a failure."""
        try:
            return "; ".join(
                f"{name}: {one['phase']}, pid {one['process']}, {one['place'] or 'no place'}, {one['reason']}"
                for name, one in self.instances().items()
            )
        except PointsmanError as error:
            return f"no status ({error})"

    # Commands

    def pointsman(self, command: str, *args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a `pointsman` command against this plane."""
        argv = [sys.executable, "-m", "pointsman.cli.main", command, *map(str, args)]
        if "--url" not in args:
            argv += ["--state", str(self.state)]
        environment = {**os.environ, **self.environment, **env}
        return subprocess.run(
            argv,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * self._patience_s,
        )
