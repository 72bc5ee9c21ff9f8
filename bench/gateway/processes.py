"""Subprocesses that cannot outlive the run: pinned to cores, each in its own session, stopped with their group."""

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1


class Process:
    """A subprocess, optionally with pipes for lines of text. Leaving its `with` block stops it."""

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        cores: set[int],
        log: Path,
        env: Mapping[str, str] | None = None,
        piped: bool = False,
    ) -> None:
        self.log = log
        libc, parent = ctypes.CDLL(None), os.getpid()

        def prepare() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the parent died before prctl
                os._exit(1)
            os.sched_setaffinity(0, cores)

        with log.open("ab") as errors:
            self._popen = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else errors,
                stderr=errors,
                env={**os.environ, **(env or {})},
                preexec_fn=prepare,
                start_new_session=True,
            )
        self.pid = self._popen.pid

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def write_line(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{line}\n".encode())
        self._popen.stdin.flush()

    def read_line(self) -> str:
        """The next line of its standard output."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline().decode()
        if not line:
            raise RuntimeError(f"{self._popen.args!r} ended without an answer: {self.log_tail()}")
        return line.strip()

    def stop(self, timeout_s: float = 8.0) -> None:
        """Terminate it, then kill what is left of its process group."""
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        if self.running:
            self._popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout_s)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()

    def log_tail(self, lines: int = 3) -> str:
        """The end of its log."""
        lines_logged = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return " / ".join(line.strip() for line in lines_logged[-lines:]) or "its log is empty"


def free_port() -> int:
    """A port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
