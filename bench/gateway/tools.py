"""The load generator and the backend: small C programs, compiled for the run; in Python where there is no compiler.

Their command lines and what they print are described at the top of native/*.c.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from bench.gateway.processes import Process

HERE = Path(__file__).parent


class LoadResult(msgspec.Struct, frozen=True):
    """The result of a load generator."""

    requests: int
    errors: int
    events: int
    seconds: float
    cpu_s: float
    """CPU time of the load generator."""
    latency_p50_us: float
    latency_p99_us: float
    first_p50_us: float
    """Time to the first event of a stream."""
    first_p99_us: float
    first_error: str
    """Start of the first wrong response; empty if all were right."""


class Tools:
    """Starts the load generator and the backend, on another core than the proxies."""

    def __init__(self, folder: Path, core: int, *, native: bool = True) -> None:
        self._folder = folder
        self._core = core
        self._commands = {
            name: [sys.executable, "-m", f"bench.gateway.fallback.{name}"] for name in ("load", "backend")
        }
        self.kind = "Python (slow: no C compiler)" if native else "Python"
        compiler = shutil.which("cc") if native else None
        if compiler:
            self._commands = {name: [self._compiled(compiler, name)] for name in self._commands}
            self.kind = "C"

    def backend(self, ports: int) -> Process:
        return Process(
            [*self._commands["backend"], str(ports)], cores={self._core}, log=self._folder / "backend.log", piped=True
        )

    def load(
        self,
        port: int,
        requests: Path,
        *,
        connections: int,
        warm_s: float,
        seconds: float,
        spread_ms: float,
        events: int,
    ) -> Process:
        """Clients of one port. They print "ready" when warm, start on a line of input, and print a `LoadResult`."""
        arguments = [port, connections, warm_s, seconds, spread_ms, events]
        return Process(
            [*self._commands["load"], *map(str, arguments), requests],
            cores={self._core},
            log=self._folder / "load.log",
            piped=True,
        )

    def _compiled(self, compiler: str, name: str) -> str:
        program = self._folder / name
        subprocess.run([compiler, "-O2", "-o", program, HERE / "native" / f"{name}.c"], check=True)
        return str(program)
