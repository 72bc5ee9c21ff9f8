"""Containment of a deployment's own code: policies and plugins that users wrote.

Enters: the plugins of a deployment. Leaves: the same objects, whose methods are timed, interrupted if they block, and
not called while they are suspended. The one rule: user code that is slow, blocks or raises affects only the decisions
of its own deployment. Methods of built-in plugins are not touched.
"""

from collections.abc import Callable, Iterable, Mapping
from inspect import getattr_static
from types import FunctionType
from typing import Any, Protocol

import msgspec

from pointsman.errors import PluginError
from pointsman.reasons import Reason
from pointsman.render.text import one_line
from pointsman.selection import plugin_name
from pointsman.types import SchedulingDecision

TIME_LIMIT_S = 0.005
"""Default time limit for one call to a user's code."""
STALL_FACTOR = 10
"""A call that takes this many times its limit is interrupted. Then the code is suspended at once."""
STRIKES = 3
"""The code is suspended after this many calls in a row that were slow or raised."""
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 300.0
"""Each suspension is twice as long as the last one, unless the code has worked for this long in between."""
MAX_TEXT = 300

TURNS = ("waits", "leaves", "next", "taken", "returned", "sent", "ended")
"""Methods of a band's `Turns`. They keep account of every request, so a skipped call would corrupt that account."""
ORDERS = ("key", "key_at", "order", "order_at", "eviction_key")
"""Methods that return a sort key. Once guarded, they return (0, key). If the code cannot be called, they return
(1, arrival): such requests go after the others, by arrival."""
ROLES = (
    *("schedule", "prioritize", "rule_for", "for_batch", *ORDERS),
    *("rejections", "scores", "pick", "pick_profiles", "process_results", "produce", "lets_all_pass", "decides"),
    *("denial", "dispatched", "request_headers", "response_headers", "departed", "extract"),
    *("for_band", "ceilings", "saturation", "evictable", *TURNS),
)
"""The methods of policies and plugins that a dispatcher calls."""


class Stalled(BaseException):
    """Raised inside user code that has run for too long. It is not an `Exception`, so that the code's own handlers let
    it pass."""


class Useless(msgspec.Struct, frozen=True):
    """Answers of policies and plugins that the dispatcher could not use, since its plan took effect."""

    count: int = 0
    last: str = ""
    """The last unusable answer."""


class CodeWatch(Protocol):
    """Measures calls to user code, and interrupts those that block. It is a part of the runtime."""

    inside: bool
    """Whether a call is running."""

    def now(self) -> float:
        """The time in seconds, on the clock of dispatchers."""
        ...

    def call(self, limit_s: float, method: Callable[..., Any], about: tuple[Any, ...]) -> tuple[Any, float]:
        """Call the method. Returns its result (for a generator, all that it yields) and the seconds it took. After the
        limit, raises `Stalled` inside the method if possible.
        """
        ...


CAUSES = ("policy-slow", "policy-blocked", "policy-raised")


class Misconduct(msgspec.Struct):
    """The faults of one policy or plugin of a user."""

    policy: str
    strikes: int = 0
    """Faulty calls in a row."""
    count: int = 0
    """Total number of calls that were slow, blocked or raised."""
    causes: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    """The number of these calls by the code of their cause."""
    cause: Reason | None = None
    """The cause of the last faulty call."""
    last_at: float = 0.0
    suspended_until: float | None = None
    """When the suspension ends; None if the code is in use, or may be tried again."""
    pause_s: float = 0.0
    resumed_at: float = 0.0

    def went_well(self, now: float) -> None:
        if self.suspended_until is not None:
            self.suspended_until, self.resumed_at = None, now
        self.strikes = 0

    def went_wrong(self, cause: Reason, now: float, *, suspend: bool) -> None:
        self.count += 1
        self.causes[cause.code] += 1
        self.strikes += 1
        self.cause, self.last_at = cause, now
        if suspend or self.strikes >= STRIKES or self.suspended_until is not None:
            if self.suspended_until is None and now - self.resumed_at > MAX_PAUSE_S:
                self.pause_s = 0.0
            self.pause_s = min(2 * self.pause_s or FIRST_PAUSE_S, MAX_PAUSE_S)
            self.suspended_until = now + self.pause_s

    def suspended(self, now: float) -> Reason | None:
        """Why the code is not called now; None if it may be called."""
        if self.suspended_until is None or now >= self.suspended_until:
            return None
        left_s = round(self.suspended_until - now, 3)
        return Reason("policy-suspended", {"policy": self.policy, "left_s": left_s, "cause": self.cause})

    def as_dict(self, now: float) -> dict[str, Any]:
        until = self.suspended_until
        return {
            "policy": self.policy,
            "count": self.count,
            "message": None if self.cause is None else str(self.cause),
            "last_s": round(now - self.last_at, 1) if self.count else None,
            "suspended_s": round(until - now, 1) if until is not None and until > now else None,
        }

    def problem(self, deployment: str, now: float) -> Reason:
        """What the code did, how often, when last, and whether it is in use now."""
        facts = self.as_dict(now)
        told = {
            "deployment": deployment,
            "cause": self.cause,
            "last_s": facts["last_s"],
            "left_s": facts["suspended_s"],
        }
        return Reason("policy-misbehaves", {"policy": self.policy, "count": self.count, **told})


class WrongAnswer(Exception):
    """A policy's result does not have the form that its interface demands."""


def decisions_in(answer: object) -> list[SchedulingDecision]:
    """The decisions that `schedule` has returned. Raises `WrongAnswer` if it returned anything else too."""
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes | Mapping):
        what = "None" if answer is None else one_line(f"{answer!r}", MAX_TEXT)
        raise WrongAnswer(f"returned {what} from schedule(), not a list of decisions")
    decisions = list(answer)
    for one in decisions:
        if not isinstance(one, SchedulingDecision):
            raise WrongAnswer(f"returned {one_line(repr(one), MAX_TEXT)} among its decisions")
    return decisions


class UserCodeFailed(PluginError):
    """A user's code gave no answer, because it raised, blocked, or is suspended."""

    def __init__(self, name: str, why: Reason) -> None:
        super().__init__(name, str(why))
        self.why = why


class Containment:
    """The user code of one deployment."""

    def __init__(self, watch: CodeWatch, limit_s: float = TIME_LIMIT_S, stall: float = STALL_FACTOR) -> None:
        """A call that takes `stall` times its limit is interrupted."""
        self._watch = watch
        self._limit_s = limit_s
        self._stall_s = limit_s * stall
        self.members: list[Misconduct] = []
        self._unguarded: list[str] = []

    def contain(self, plugins: Iterable[object]) -> None:
        """Guard the methods of those plugins that users wrote. Each plugin belongs to one deployment only."""
        for plugin in plugins:
            if is_user_code(plugin):
                name = getattr(plugin, "name", None)
                told = Misconduct(name if isinstance(name, str) and name else plugin_name(plugin))
                try:
                    self._guard(plugin, told)
                except (TypeError, AttributeError):  # such as a frozen msgspec.Struct
                    self._unguarded.append(told.policy)
                else:
                    self.members.append(told)

    def report(self) -> list[dict[str, Any]]:
        """The faults of each policy and plugin of users as plain data, for `status`."""
        now = self._watch.now()
        return [one.as_dict(now) for one in self.members]

    def problems(self, deployment: str) -> list[Reason]:
        """Problems of code that misbehaved lately, is suspended, or cannot be guarded."""
        now = self._watch.now()
        unguarded = [Reason("policy-unguarded", {"deployment": deployment, "policy": one}) for one in self._unguarded]
        return unguarded + [one.problem(deployment, now) for one in self.members if one.count and _is_recent(one, now)]

    def _guard(self, plugin: Any, told: Misconduct) -> None:
        kind: Any = type(plugin)
        body: dict[str, Any] = {name: self._guarded(kind, name, told) for name in ROLES if _is_users(kind, name)}
        body |= {"__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        if isinstance(getattr(kind, "name", None), str):
            body["name"] = kind.name  # otherwise a policy would report the name of its subclass
        # A class for this object alone, so that current holders of the object find the guarded methods too.
        guarded = type(kind)(kind.__name__, (kind,), body)
        object.__setattr__(plugin, "__class__", guarded)  # this works for frozen dataclasses too

    def _guarded(self, kind: type, name: str, told: Misconduct) -> Callable[..., Any]:
        method, watch, limit_s, stall_s = getattr_static(kind, name), self._watch, self._limit_s, self._stall_s
        call = method if isinstance(method, FunctionType) else _unbound(method, kind)
        orders, suspends = name in ORDERS, name not in TURNS

        def guarded(*about: Any) -> Any:
            if watch.inside:  # the code calls itself
                return call(*about)
            if told.suspended_until is not None and suspends:
                why = told.suspended(watch.now())
                if why is not None:
                    return _stand_in(name, about, UserCodeFailed(told.policy, why))
            try:
                answer, taken_s = watch.call(stall_s, call, about)
                answer = decisions_in(answer) if name == "schedule" else answer
            except (Exception, Stalled) as error:
                cause = cause_of(error, stall_s)
                told.went_wrong(cause, watch.now(), suspend=suspends and isinstance(error, Stalled))
                return _stand_in(name, about, UserCodeFailed(told.policy, cause))
            if taken_s > limit_s:
                facts = {"taken_ms": round(taken_s * 1000, 1), "limit_ms": limit_s * 1000}
                cause = Reason("policy-slow", facts)
                told.went_wrong(cause, watch.now(), suspend=suspends and taken_s > stall_s)
            elif told.strikes:
                told.went_well(watch.now())
            if name == "for_band":
                self._guard(answer, told)
            return (0, answer) if orders else answer

        return guarded


def cause_of(error: Exception | Stalled, limit_s: float) -> Reason:
    """Why a call gave no answer. It was interrupted after `limit_s`."""
    if isinstance(error, Stalled):
        return Reason("policy-blocked", {"limit_ms": limit_s * 1000})
    return Reason("policy-raised", {"error": type(error).__name__, "text": what_it_did(error)})


def what_it_did(error: Exception) -> str:
    if isinstance(error, WrongAnswer):
        return str(error)
    if isinstance(error, PluginError):
        return one_line(f"{error.plugin}: {error.broken}", MAX_TEXT)
    return one_line(f"raised {type(error).__name__}: {error}", MAX_TEXT).rstrip(": ")


def _stand_in(name: str, about: tuple[Any, ...], failed: UserCodeFailed) -> Any:
    """The default result, if the caller has no stand-in: order of arrival, no limits, or no eviction."""
    if name in ORDERS:
        subject = about[1]
        return 1, subject.enqueued_at if hasattr(subject, "enqueued_at") else subject.arrival_time
    if name == "ceilings":
        return [1.0] * len(about[2])
    if name == "evictable":
        return False
    raise failed


def _unbound(method: Any, kind: type) -> Callable[..., Any]:
    """A static or class method, called with the object like any other."""
    return lambda plugin, *about: method.__get__(plugin, kind)(*about)


def _is_recent(one: Misconduct, now: float) -> bool:
    return one.suspended_until is not None or now - one.last_at < MAX_PAUSE_S


def is_user_code(plugin: object) -> bool:
    return type(plugin).__module__.partition(".")[0] != "pointsman"


def _is_users(kind: type, name: str) -> bool:
    """Whether users wrote this method of a class."""
    method = getattr(kind, name, None)
    return callable(method) and (getattr(method, "__module__", None) or "").partition(".")[0] != "pointsman"
