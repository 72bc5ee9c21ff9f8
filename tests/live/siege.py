"""A plane under attack: what its other clients notice, and what the attack costs it."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from bench.chaos.load import Load
from bench.chaos.planes import LivePlane
from tests.live.manifests import hashed

KEY, OTHER_KEY = "of the attacker", "of the others"
KEYS = {
    "tenants": [{"name": "attacker"}, {"name": "others"}],
    "keys": [{"tenant": "attacker", "sha256": hashed(KEY)}, {"tenant": "others", "sha256": hashed(OTHER_KEY)}],
}
"""Settings of a gateway that needs keys."""
QUIET_S = 0.7
"""How long the plane is watched without an attack."""
RATIO, TURN_S = 10.0, 0.05
"""Processor time of a turn of the loop: at most so many times that of the quiet plane, or this if that is more. It is
ten times what one read of a socket may take. Other programs on the machine take wall time, but not this."""
MOST_S = 5.0
"""Time without an answer, however busy the machine is."""
WATCHER = Path(__file__).parent / "watcher.py"
MIB = 1024 * 1024


class Watcher:
    """Asks for `/health` from another process."""

    def __init__(self, host: str, port: int) -> None:
        command = [sys.executable, str(WATCHER), host, str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has its first answer

    def stop(self) -> dict[str, Any]:
        """Longest time without an answer, and the number of answers."""
        output, _ = self._process.communicate(timeout=90.0)
        found: dict[str, Any] = json.loads(output)
        return found


class Siege:
    """One attack. Its numbers are there when the block has ended."""

    def __init__(self, plane: LivePlane, name: str, key: str = OTHER_KEY) -> None:
        self.plane = plane
        self.name = name
        self._key = key
        where = urlsplit(plane.url)
        self.host, self.port = where.hostname or "", where.port or 80
        self.pid = plane.process.pid
        self.pids = [self.pid, *(one["pid"] for one in plane.status()["gateways"])]
        """Of the plane and its gateways."""
        self.quiet_s = self.worst_s = 0.0
        self.quiet_turn_s = self.turn_s = 0.0
        """Processor time of the longest turn of the loops, rounded up to a bound of their histogram."""
        self.files = 0
        """Maximum of open files."""
        self.before_bytes = 0
        """Memory before the attack."""
        self.grown_bytes = 0
        """Maximum of the memory, less that before the attack."""
        self.load = Load(plane.url, ["m"], clients=3, key=key)
        self._ended = threading.Event()

    @contextmanager
    def laid(self) -> Iterator["Siege"]:
        """Attack within this block."""
        first = self._turns()
        watcher = Watcher(self.host, self.port)
        time.sleep(QUIET_S)
        self.quiet_s = watcher.stop()["worst_s"]
        before = self._turns()
        self.quiet_turn_s = longest(first, before)
        for pid in self.pids:
            reset_peak(pid)
        self.before_bytes = sum(memory(pid, "VmRSS") for pid in self.pids)
        counting = threading.Thread(target=self._count_files)
        counting.start()
        watcher = Watcher(self.host, self.port)
        try:
            with self.load:
                yield self
        finally:
            watched = watcher.stop()
            self._ended.set()
            counting.join()
        self.worst_s = watched["worst_s"]
        self.grown_bytes = sum(memory(pid, "VmHWM") for pid in self.pids) - self.before_bytes
        self.turn_s = longest(before, self._turns())
        print(
            f"\n{self.name}: longest turn {1000 * self.turn_s:g} ms of processor time ({1000 * self.quiet_turn_s:g} ms "
            f"before); /health unanswered for at most {1000 * self.worst_s:.0f} ms ({1000 * self.quiet_s:.0f} ms "
            f"before), {watched['answers']} answers; {self.grown_bytes / MIB:.0f} MiB more memory; at most "
            f"{self.files} open files; other clients: {dict(self.load.verdicts())}"
        )

    def check(self, *, grown_mib: float, files: int = 400) -> None:
        """Others did not notice, and the attack was cheap."""
        turn_s = min(self.turn_s, self.worst_s)  # a turn during the attack is in both; not one before or after
        assert turn_s <= max(RATIO * self.quiet_turn_s, TURN_S), turn_s
        assert self.worst_s <= MOST_S, self.worst_s
        assert self.load.unexpected() == []
        assert self.load.verdicts()["served"] > 0
        assert self.grown_bytes <= grown_mib * MIB
        assert self.files <= files

    def _turns(self) -> dict[float, float]:
        """Turns of the loops of all gateways so far, by the upper bound of their processor time."""
        where = Request(f"{self.plane.url}/metrics", headers={"authorization": f"Bearer {self._key}"})

        def read() -> dict[float, float]:
            with urlopen(where, timeout=20.0) as answer:
                text = answer.read().decode()
            found = re.findall(r'^pointsman_loop_busy_seconds_bucket\{le="(.+)"\} (\d+)$', text, re.MULTILINE)
            return {float(bound): float(count) for bound, count in found}

        seen = now = read()
        while seen == now:  # pages are shared for a while: this one may be older than the attack
            time.sleep(0.02)
            now = read()
        return now

    def _count_files(self) -> None:
        while not self._ended.wait(0.02):
            with suppress(OSError):
                each = [len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids]  # noqa: PTH208 (faster)
                self.files = max(self.files, *each)

    # Attacking

    def connect(self, timeout_s: float = 20.0) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout_s)

    def send(self, data: bytes, timeout_s: float = 20.0) -> bytes:
        """Send bytes on a new connection, and return all that comes back until the connection is closed."""
        with self.connect(timeout_s) as connection:
            return exchange(connection, data)

    def post(self, path: str, body: bytes, *headers: str, close: bool = True) -> bytes:
        """A POST request, as bytes."""
        lines = [f"POST {path} HTTP/1.1", f"host: {self.host}:{self.port}", f"content-length: {len(body)}", *headers]
        return "\r\n".join([*lines, *(["connection: close"] if close else []), "", ""]).encode() + body


def exchange(connection: socket.socket, data: bytes) -> bytes:
    """Send bytes, however many of them are wanted, and return all that comes back until the connection is closed."""
    received = bytearray()

    def read() -> None:
        with suppress(OSError):
            while part := connection.recv(65_536):
                received.extend(part)

    reading = threading.Thread(target=read)
    reading.start()
    with suppress(OSError):  # it is closed before all is sent
        connection.sendall(data)
    reading.join()
    return bytes(received)


def statuses(answer: bytes) -> list[int]:
    """The status of every answer in these bytes."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) [ A-Za-z-]+\r\n", answer)]


def longest(before: Mapping[float, float], after: Mapping[float, float]) -> float:
    """The bound of the longest turn between two readings of the histogram, which counts turns up to each bound."""
    counts = [after[bound] - before[bound] for bound in sorted(after)]
    return next(bound for bound, count in zip(sorted(after), counts, strict=True) if count == counts[-1])


def reset_peak(pid: int) -> None:
    """Let VmHWM begin anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def memory(pid: int, field: str) -> int:
    """VmRSS or VmHWM of a process, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
