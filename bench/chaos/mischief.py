"""What goes wrong: every so often one instance is killed, hung or made to answer garbage, by the dice of a seed.

One instance that was not struck, or has recovered, is left at any time: as long as one lives, no request may suffer.
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
"""Garbage of every kind, on all requests of an instance, or on half of them for a while."""


class Strike(NamedTuple):
    """One instance was struck."""

    at: float
    kind: str
    what: str
    instance: str
    pid: int
    over_at: float
    """By then it has passed by itself; infinity: only when the instance is started anew."""


class Mischief:
    """Strikes instances of a plane."""

    def __init__(self, plane: LivePlane, seed: int, kinds: Sequence[str]) -> None:
        self.strikes: list[Strike] = []
        self.passed_over = 0
        """Times when nobody was struck, as one must be left."""
        self._plane = plane
        self._random = Random(seed)
        self._kinds = list(kinds)

    def go_on(self, seconds: float, every_s: float) -> None:
        """Strike again and again."""
        due = time.monotonic()
        until = due + seconds
        while (due := due + every_s) < until:
            time.sleep(max(due - time.monotonic(), 0.0))
            self._strike()
        time.sleep(max(until - time.monotonic(), 0.0))

    def struck(self, instance: str, by: float) -> Strike | None:
        """What last befell an instance before this time."""
        return next((one for one in reversed(self.strikes) if one.instance == instance and one.at <= by), None)

    def _strike(self) -> None:
        living = self._living()
        kind, fault = self._random.choice(self._kinds), self._random.choice(FAULTS)
        if len(living) < 2:
            self.passed_over += 1
            return
        victim = self._random.choice(sorted(living))
        pid, url = living[victim]
        now, over_at = time.monotonic(), float("inf")
        what = kind
        with suppress(OSError):  # it has ended meanwhile
            if kind == KILLED:
                os.kill(pid, signal.SIGKILL)
            elif kind == HUNG:
                os.kill(pid, signal.SIGSTOP)
            else:
                tell(url, fault)
                what = json.dumps(fault)
                over_at = now + fault.get("seconds", float("inf"))
            self.strikes.append(Strike(now, kind, what, victim, pid, over_at))

    def _living(self) -> dict[str, tuple[int, str]]:
        """Instances that are ready and that nothing is wrong with, as far as we had a hand in it."""
        now = time.monotonic()
        ill = {strike.pid for strike in self.strikes if strike.over_at > now}
        return {
            name: (int(one["process"]), one["url"])
            for name, one in self._plane.instances().items()
            if one["phase"] == "ready" and int(one["process"]) not in ill
        }


def tell(url: str, fault: Mapping[str, Any]) -> None:
    """Have a simulated engine go wrong."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10.0)
    try:
        connection.request("POST", "/faults", json.dumps(fault))
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
    finally:
        connection.close()
