"""The faults that can be injected.

A fault is `{"fault": NAME}` with optional fields. `on` says which requests it affects (work, health, metrics, models,
all; default work). `count` (the next n requests), `probability` and `seconds` (from now) limit the fault; without them,
it lasts until it is cleared. Faults of the first table also accept `afterTokens`: with this field they strike after n
tokens of an answer, and without it they replace the answer.
"""

import os
import socket
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pointsman.simulator.answers import error_body, head_for

if TYPE_CHECKING:
    from random import Random

    from pointsman.simulator.server import Answering, SimulatedServer


PLACES = ("work", "health", "metrics", "models", "all")
NONSENSE = b"\x00\xff<<< this is not what you asked for >>>\r\n\r\n"


class Fault:
    """One fault, and when it strikes."""

    def __init__(self, name: str, now: float, fields: Mapping[str, Any]) -> None:
        self.name = name
        self.on: str = fields.get("on", "work")
        self.count: int | None = fields.get("count")
        self.probability: float = fields.get("probability", 1.0)
        self.until: float | None = now + fields["seconds"] if "seconds" in fields else None
        self.after_tokens: int | None = fields.get("afterTokens")
        self.delay_s: float = fields.get("delayMs", 1000.0) / 1000.0
        self.status: int = fields.get("status", 500)
        self.retry_after_s: int | None = fields.get("retryAfter")
        self.kept: bytes | None = None
        """The answer at the fault's first strike, for `stale`."""
        self.fields = dict(fields)

    def strikes(self, place: str, now: float, chance: Callable[[], float]) -> bool:
        """Whether the fault applies to this request. If so, the request is counted."""
        if self.on not in (place, "all") or self.is_over(now):
            return False
        if self.probability < 1.0 and chance() >= self.probability:
            return False
        if self.count is not None:
            self.count -= 1
        return True

    def is_over(self, now: float) -> bool:
        return self.count == 0 or (self.until is not None and now >= self.until)


# Instead of an answer, or in the middle of one


def hang(answering: "Answering", _: Fault) -> None:
    """Nothing more is sent; the connection stays open."""
    answering.stop()


def reset(answering: "Answering", _: Fault) -> None:
    """The connection is reset, as if the machine had died."""
    answering.stop()
    transport = answering.connection.transport
    end: socket.socket = transport.get_extra_info("socket")
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def cut(answering: "Answering", _: Fault) -> None:
    """The connection is closed without the end that HTTP requires."""
    answering.stop()
    answering.connection.close()


def end(answering: "Answering", _: Fault) -> None:
    """The answer ends as HTTP requires, but the rest of its tokens, its finish reason and [DONE] are missing."""
    half = answering.stop()
    if answering.stream is not None:
        answering.stream.end()
    elif half:
        answering.connection.close()
    else:
        answering.connection.answer(200, b"")


def garbage(answering: "Answering", _: Fault) -> None:
    """The server sends bytes that are not HTTP, then closes the connection."""
    answering.stop()
    answering.connection.write(NONSENSE)
    answering.connection.close()


def drip(answering: "Answering", fault: Fault) -> None:
    """The server sends a byte every `delayMs` (default 1000). The bytes never complete an event or the answer."""
    half = answering.stop()
    if answering.stream is None and not half:
        answering.connection.write(head_for(1 << 20))

    def send_byte() -> None:
        if answering.stream is not None:
            answering.stream.write(b":")
        else:
            answering.connection.write(b" ")
        answering.later(fault.delay_s, send_byte)

    send_byte()


def crash(*_: object) -> None:
    """The process ends with exit code 1."""
    os._exit(1)


ANY_TIME: Mapping[str, Callable[["Answering", Fault], None]] = {
    "hang": hang,
    "reset": reset,
    "cut": cut,
    "end": end,
    "garbage": garbage,
    "drip": drip,
    "crash": crash,
}

# Instead of an answer only


def status(answering: "Answering", fault: Fault) -> None:
    """The answer is an error with this `status` (default 500); its Retry-After is `retryAfter` if that is given."""
    body = error_body(fault.status, f"a fault makes this server answer {fault.status}")
    lines = b"" if fault.retry_after_s is None else b"retry-after: %d\r\n" % fault.retry_after_s
    answering.connection.answer(fault.status, body, lines=lines)


def garbage_body(answering: "Answering", _: Fault) -> None:
    """The answer has status 200 and a meaningless body."""
    answering.connection.answer(200, NONSENSE)


def short_body(answering: "Answering", _: Fault) -> None:
    """The head promises more bytes than come before the connection is closed."""
    answering.connection.write(head_for(1000) + b'{"id": "cmpl-')
    answering.connection.close()


def long_body(answering: "Answering", _: Fault) -> None:
    """More bytes come than the head promises."""
    answering.connection.write(head_for(4) + b'{"id": "cmpl-1"}' + NONSENSE)
    answering.connection.answered(close=not answering.request.keep_alive)


def slow_headers(answering: "Answering", fault: Fault) -> None:
    """The answer begins late by `delayMs` (default 1000)."""
    answering.later(fault.delay_s, answering.answer)


def slow_tokens(answering: "Answering", fault: Fault) -> None:
    """At least `delayMs` (default 1000) pass between two tokens."""
    answering.token_delay_s = fault.delay_s
    answering.answer()


def stale(answering: "Answering", fault: Fault) -> None:
    """The metrics stay the same as at the first strike."""
    fault.kept = fault.kept or answering.server.metrics().encode()
    answering.connection.answer(200, fault.kept, b"text/plain; version=0.0.4")


AT_THE_START: Mapping[str, Callable[["Answering", Fault], None]] = {
    "status": status,
    "garbage-body": garbage_body,
    "short-body": short_body,
    "long-body": long_body,
    "slow-headers": slow_headers,
    "slow-tokens": slow_tokens,
    "stale": stale,
}

# Faults of the whole server


def refuse(server: "SimulatedServer", fault: Fault) -> None:
    """The server stops listening, only for `seconds` if that is given. Answers in flight continue."""
    server.stop_listening(fault.until)


AT_ONCE: Mapping[str, Callable[["SimulatedServer", Fault], None]] = {"refuse": refuse}

_NUMBERS: Mapping[str, tuple[bool, float, float]] = {
    "count": (True, 1, float("inf")),
    "probability": (False, 0, 1),
    "seconds": (False, 0, float("inf")),
    "afterTokens": (True, 0, float("inf")),
    "delayMs": (False, 0, float("inf")),
    "status": (True, 100, 599),
    "retryAfter": (True, 0, float("inf")),
}
"""For each field: whether only whole numbers are allowed, the minimum and the maximum."""


def read_fault(fields: object, now: float) -> Fault:
    """A fault from JSON. Raises ValueError."""
    if not isinstance(fields, dict):
        raise ValueError('a fault is written {"fault": NAME, ...}')
    name = fields.get("fault")
    known = [*ANY_TIME, *AT_THE_START, *AT_ONCE]
    if name not in known:
        raise ValueError(f"there is no fault {name!r}; known: {', '.join(known)}")
    if fields.get("on", "work") not in PLACES:
        raise ValueError(f"on is one of {', '.join(PLACES)}, not {fields['on']!r}")
    for key, value in fields.items():
        if key in ("fault", "on"):
            continue
        if key not in _NUMBERS:
            raise ValueError(f"{key!r} is not a field of a fault; known: fault, on, {', '.join(_NUMBERS)}")
        whole, minimum, maximum = _NUMBERS[key]
        kinds = int if whole else int | float
        if isinstance(value, bool) or not isinstance(value, kinds) or not minimum <= value <= maximum:
            raise ValueError(f"{key} must be a number from {minimum:g} to {maximum:g}, not {value!r}")
    if "afterTokens" in fields and name not in ANY_TIME:
        raise ValueError(f"{name} cannot strike after tokens; these can: {', '.join(ANY_TIME)}")
    if name in AT_ONCE and ({"on", "count", "probability"} & fields.keys()):
        raise ValueError(f"{name} strikes the whole server; it takes seconds only")
    return Fault(name, now, fields)


class Faults:
    """The active faults, in order. The first fault that strikes a request applies."""

    def __init__(self, seed: str) -> None:
        self._on: list[Fault] = []
        self._seed = seed
        self._random: Random | None = None

    def add(self, fault: Fault) -> None:
        self._on.append(fault)

    def clear(self) -> None:
        self._on.clear()

    def active(self, now: float) -> list[dict[str, Any]]:
        """The active faults, as JSON."""
        return [fault.fields for fault in self._current(now)]

    def strike(self, place: str, now: float) -> Fault | None:
        """The fault that strikes this request; None if no fault strikes it."""
        if not self._on:
            return None
        return next((fault for fault in self._current(now) if fault.strikes(place, now, self._chance)), None)

    def _chance(self) -> float:
        if self._random is None:
            from random import Random  # most servers do not need it

            self._random = Random(self._seed)
        return self._random.random()

    def _current(self, now: float) -> list[Fault]:
        self._on = [fault for fault in self._on if not fault.is_over(now)]
        return self._on
