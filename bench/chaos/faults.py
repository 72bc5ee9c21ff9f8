"""Fault injection: at intervals, one random instance is killed, stopped or made to send garbage.

At least one instance is healthy at any time, because the guarantees hold only then.
"""

import http.client
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bench.chaos.planes import LivePlane

KILLED, HUNG, GARBAGE = "killed", "hung", "garbage"
FAULTS: Sequence[Mapping[str, Any]] = (
    {"fault": "garbage"},
    {"fault": "garbage", "afterTokens": 4},
    {"fault": "garbage-body"},
    {"fault": "short-body"},
    {"fault": "long-body"},
    {"fault": "end", "afterTokens": 4},
    {"fault": "cut", "afterTokens": 4},
    {"fault": "reset", "probability": 0.5, "seconds": 2.0},
    {"fault": "status", "status": 503},
)
"""Faults of simulated engines, on all requests of an instance, or on half of them for a while."""


class InjectedFault(NamedTuple):
    at: float
    kind: str
    detail: str
    instance: str
    pid: int
    ends_at: float
    """Infinity if it lasts until the instance restarts."""


class FaultInjector:
    """Injects faults into instances of a plane."""

    def __init__(self, plane: LivePlane, seed: int, kinds: Sequence[str]) -> None:
        self.faults: list[InjectedFault] = []
        self.skipped = 0
        """Times when only one instance was healthy."""
        self._plane = plane
        self._random = Random(seed)
        self._kinds = list(kinds)

    def run(self, seconds: float, every_s: float) -> None:
        """Inject a fault every `every_s` seconds."""
        due = time.monotonic()
        until = due + seconds
        while (due := due + every_s) < until:
            time.sleep(max(due - time.monotonic(), 0.0))
            self._inject()
        time.sleep(max(until - time.monotonic(), 0.0))

    def _inject(self) -> None:
        healthy = self._healthy()
        kind, fault = self._random.choice(self._kinds), self._random.choice(FAULTS)
        if len(healthy) < 2:
            self.skipped += 1
            return
        victim = self._random.choice(sorted(healthy))
        pid, url = healthy[victim]
        now, ends_at = time.monotonic(), float("inf")
        detail = kind
        with suppress(OSError):  # the process may have ended
            if kind == KILLED:
                os.kill(pid, signal.SIGKILL)
            elif kind == HUNG:
                os.kill(pid, signal.SIGSTOP)
            else:
                inject_fault(url, fault)
                detail = json.dumps(fault)
                ends_at = now + fault.get("seconds", float("inf"))
            self.faults.append(InjectedFault(now, kind, detail, victim, pid, ends_at))

    def _healthy(self) -> dict[str, tuple[int, str]]:
        """Ready instances without an injected fault, as (pid, URL) by name."""
        now = time.monotonic()
        faulty = {fault.pid for fault in self.faults if fault.ends_at > now}
        return {
            name: (int(one["process"]), one["url"])
            for name, one in self._plane.instances().items()
            if one["phase"] == "ready" and int(one["process"]) not in faulty
        }


def inject_fault(url: str, fault: Mapping[str, Any] | None) -> None:
    """Switch a fault of a simulated engine on; None: switch all off."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10.0)
    try:
        if fault is None:
            connection.request("DELETE", "/faults")
        else:
            connection.request("POST", "/faults", json.dumps(fault))
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
    finally:
        connection.close()
