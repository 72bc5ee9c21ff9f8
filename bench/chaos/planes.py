"""A real plane: `pointsman up` in a process of its own. Whatever it starts carries its mark, and is found by it."""

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

MARK = "POINTSMAN_LIVE"
PATIENCE_S = 60.0
"""Far more than anything takes; who waits this long has failed."""
SUPERVISOR = "local/supervisor.py"
"""In the command line of a supervisor."""


class LivePlane:
    """One state directory, and the plane that runs there, if one does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Where manifests are, and where the plane is started."""
        self.state = folder / "state"
        self.admin = Client(self.state)
        self._mark = uuid4().hex
        self.environment = {MARK: self._mark, "NO_COLOR": "1"}
        """Of every process of it, beside our own."""
        self._process: subprocess.Popen[bytes] | None = None

    # Its life

    def up(self, manifest: str | None = None, *, wait: bool = True) -> float:
        """Start it; None: with what last ran here. Seconds until every instance was ready."""
        began = time.monotonic()
        command = [sys.executable, "-m", "pointsman.cli.main", "up", "--state", str(self.state)]
        if manifest is not None:
            command.insert(4, str(self.write(manifest)))
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
            self.until(self.is_settled, "everything ready")
        else:
            self.until(self.is_there, "somebody to ask")
        return time.monotonic() - began

    def write(self, manifest: str, name: str = "manifest.yaml") -> Path:
        """A manifest as a file."""
        file = self.folder / name
        file.write_text(manifest, encoding="utf-8")
        return file

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """Of the plane itself."""
        assert self._process is not None, "it was not started"
        return self._process

    def kill(self) -> None:
        """kill -9 of the plane alone."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM. Its exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End it. Raises AssertionError if any process of it is left behind."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE_S)
        deadline = time.monotonic() + 10.0
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        assert left == {}, f"processes were left behind: {left}; the plane said:\n{self.said()}"

    # Looking

    def status(self) -> dict[str, Any]:
        """As `pointsman status` has it."""
        told: dict[str, Any] = self.admin.get("status")
        return told

    @property
    def url(self) -> str:
        """Where requests go."""
        return str(self.status()["url"])

    def instances(self, deployment: str = "") -> dict[str, dict[str, Any]]:
        """What is known of each."""
        return {
            instance["id"]: instance
            for one in self.status()["deployments"]
            if deployment in ("", one["name"])
            for instance in one["instances"]
        }

    def pids(self, deployment: str = "") -> dict[str, int]:
        """Of the engines that are ready."""
        return {
            name: int(one["process"]) for name, one in self.instances(deployment).items() if one["phase"] == "ready"
        }

    def is_settled(self) -> bool:
        """Whether everything that is wanted is ready, and nothing else is there."""
        if self.process.poll() is not None:
            raise AssertionError(f"the plane has ended with {self.process.returncode}:\n{self.said()}")
        try:
            return all(one.settled for one in deployments_of(self.status()))
        except (NoPlane, PlaneSilent):
            return False

    def is_there(self) -> bool:
        """Whether it can be asked anything."""
        return self.admin.is_there()

    def processes(self) -> dict[int, str]:
        """Everything that carries the mark and lives: the plane, its supervisor, its engines."""
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
        """The pids of its supervisors; there should be one."""
        return [pid for pid, command in self.processes().items() if SUPERVISOR in command]

    def said(self) -> str:
        """The end of what the plane has printed."""
        return (self.folder / "up.log").read_text(encoding="utf-8", errors="replace")[-4000:]

    def until(self, holds: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
        """Wait for what must come."""
        deadline = time.monotonic() + patience_s
        while not holds():
            if time.monotonic() > deadline:
                raise AssertionError(f"never came: {what}; the plane said:\n{self.said()}")
            time.sleep(0.02)

    # Commands

    def pointsman(self, command: str, *args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """A command of ours about this plane, in a process of its own."""
        words = [sys.executable, "-m", "pointsman.cli.main", command, *map(str, args)]
        if "--url" not in args:
            words += ["--state", str(self.state)]
        environment = {**os.environ, **self.environment, **env}
        return subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=2 * PATIENCE_S
        )
