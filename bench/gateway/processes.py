"""Processes that cannot outlive the run: each on one core, in a session of its own, ended with its whole group."""

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
    """A process that we started, which may answer on its output; leaving its `with` block ends it."""

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        cores: set[int],
        log: Path,
        env: Mapping[str, str] | None = None,
        talks: bool = False,
    ) -> None:
        self.log = log
        libc, parent = ctypes.CDLL(None), os.getpid()

        def prepare() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # we died before it could be told
                os._exit(1)
            os.sched_setaffinity(0, cores)

        with log.open("ab") as errors:
            self._popen = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else errors,
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

    def tell(self, line: str) -> None:
        """One line to its input."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{line}\n".encode())
        self._popen.stdin.flush()

    def hear(self) -> str:
        """The next line of its output."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline().decode()
        if not line:
            raise RuntimeError(f"{self._popen.args!r} ended before it had answered: {self.last_words()}")
        return line.strip()

    def stop(self, patience_s: float = 8.0) -> None:
        """Asks it to end, and makes it: no member of its group is left."""
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        if self.running:
            self._popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(patience_s)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()

    def last_words(self, lines: int = 3) -> str:
        """The end of its log."""
        said = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return " / ".join(line.strip() for line in said[-lines:]) or "it said nothing"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
