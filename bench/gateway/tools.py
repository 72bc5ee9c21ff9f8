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


class Loaded(msgspec.Struct, frozen=True):
    """What a load generator saw."""

    requests: int
    errors: int
    events: int
    seconds: float
    cpu_s: float
    """Its own."""
    latency_p50_us: float
    latency_p99_us: float
    first_p50_us: float
    """To the first event of a stream."""
    first_p99_us: float
    complaint: str
    """The beginning of the first wrong answer."""


class Tools:
    """How to start the load generator and the backend, beside the proxies' core."""

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
            [*self._commands["backend"], str(ports)], cores={self._core}, log=self._folder / "backend.log", talks=True
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
        """Clients of one port: "ready" when they are warm; after a line from us they send, then print `Loaded`."""
        figures = [port, connections, warm_s, seconds, spread_ms, events]
        return Process(
            [*self._commands["load"], *map(str, figures), requests],
            cores={self._core},
            log=self._folder / "load.log",
            talks=True,
        )

    def _compiled(self, compiler: str, name: str) -> str:
        program = self._folder / name
        subprocess.run([compiler, "-O2", "-o", program, HERE / "native" / f"{name}.c"], check=True)
        return str(program)
