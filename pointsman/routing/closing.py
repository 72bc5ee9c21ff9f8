"""Instances that a dispatcher closes by itself: those that ask for a pause, and those that are silent.

Enters: signs of life of instances, with the time. Leaves: instances to probe, to close and to open. The one rule: an
instance that answers is never silent, however long its work takes.

The plane probes instances at intervals of seconds. A gateway can notice sooner that an instance has stopped. A frozen
process, a lost node or a cut network does not close connections, but no more bytes arrive. The lack of bytes alone
proves nothing, because an engine may take long to compute a long prompt. So an instance is silent if all of this holds:

- It has requests of this gateway, and has answered some before.
- For `QUIET_S` no byte came from it, on any connection. Then the gateway probes it, over a new connection.
- For `ANSWER_S` there was neither an answer to the probe nor a byte. Any answer counts, of any status: the probe tests
  whether there is a server, not whether it is healthy. After an answer, the quiet time before the next probe is longer,
  up to `MAX_QUIET_S`.
- Either it has answered such a probe before while its requests waited, or no byte has come for `PATIENCE` times as long
  as is usual. The second case is for servers that answer nothing while they work, such as users' code.
- Another instance takes requests, and has no unanswered probe itself. Without such an instance, the gateway itself may
  be cut off, and moving requests would gain nothing.

A silent instance gets no new requests. The gateway sends its requests elsewhere, with three exceptions: requests whose
answer has begun, requests that may not be repeated, and requests without tries left. These stay where they are. The
gateway still probes the instance, and opens it at its first byte or answer. After such a false alarm, the usual time of
the instance is longer.

Nothing here runs for each request. One timer of the gateway looks at all instances every `LOOK_S`; connections note
that a byte has come. If the timer is late because the gateway or its machine was busy, that time does not count.
"""

from collections.abc import Callable, Collection
from math import inf
from typing import NamedTuple

import msgspec

from pointsman.reasons import Reason
from pointsman.routing.endpoints import close, reopen
from pointsman.routing.events import DispatcherCommand, Failed, HeardAgain, Paused, Silenced
from pointsman.routing.sending import Sender

LOOK_S, IDLE_LOOK_S = 0.05, 0.2
"""Intervals at which instances are looked at. The second applies while none has requests or sends bytes."""
QUIET_S = 0.3
"""A busy instance is probed if no byte has come from it for this long."""
MAX_QUIET_S = 1.0
"""While an instance answers probes, the interval between them doubles, up to this maximum."""
ANSWER_S = 0.5
"""Time to answer a probe."""
PATIENCE = 3.0
FORGOTTEN = 0.005
"""The share by which the usual time without a byte falls at each look before which a byte came."""
MAX_LATE_S = 0.2
"""A look that is later than this shows that the gateway was delayed, not the instances."""
MAX_ASKED = 2
"""Maximum number of probes begun at one look. So there are at most 40 per second, however many instances there are."""


class Hearing(msgspec.Struct):
    """The signs of life of one instance with requests."""

    byte_at: float
    """When the last byte came. If the instance had no request then, when it got its next request."""
    sign_at: float
    """`byte_at`, or the time of the last answer to a probe, whichever is later."""
    is_busy: bool = False
    has_answered: bool = False
    """Whether a byte has ever come."""
    usual_s: float = 0.0
    """The longest time without a byte, which decays slowly."""
    answers_meanwhile: bool = False
    """Whether the instance answered the last probe in time."""
    wait_s: float = QUIET_S
    asked_at: float | None = None
    """When the unanswered probe was sent; None if no probe is unanswered."""
    is_asked: bool = False
    """Whether a probe is in progress."""
    probed_at: float = -inf
    """When the last probe began."""
    is_silent: bool = False

    def overdue(self, now: float) -> bool:
        """Whether a probe has not been answered in time."""
        return self.asked_at is not None and now - self.asked_at >= ANSWER_S

    def byte(self, now: float) -> None:
        quiet_s = now - self.byte_at if self.is_busy else 0.0
        self.usual_s = max(quiet_s, self.usual_s * (1.0 - FORGOTTEN))
        self.has_answered, self.byte_at, self.wait_s = True, now, QUIET_S
        self.sign(now)

    def sign(self, now: float) -> None:
        """Note a sign of life: a byte, or an answer to a probe."""
        if self.overdue(now):
            self.answers_meanwhile = False
            self.usual_s = max(self.usual_s, now - self.byte_at)
        self.sign_at, self.asked_at = now, None


class Look(NamedTuple):
    """The result of a look."""

    asked: list[str]
    """Instances to probe."""
    silent: list[tuple[str, Reason]]
    """Instances that have gone silent."""
    heard: list[str]
    """Instances that were silent and are no longer."""


class Silences:
    """Which instances of a deployment are silent, as far as one gateway can tell."""

    def __init__(self) -> None:
        self._known: dict[str, Hearing] = {}
        self._looked_at: float | None = None
        self._heard: list[str] = []
        """Instances that were silent and have answered a probe since the last look."""
        self.is_active = False
        """Whether an instance was busy or silent at the last look."""

    def look(
        self,
        now: float,
        members: Collection[str],
        busy: Collection[str],
        heard: Collection[str],
        open_: Collection[str],
    ) -> Look:
        """`busy`: instances with requests from this gateway. `heard`: instances from which bytes came since the last
        look. `open_`: instances that take requests."""
        self._forgive(now)
        for name in [one for one in self._known if one not in members]:
            del self._known[name]
        for name in [*busy, *heard]:
            if name in members and name not in self._known:
                self._known[name] = Hearing(now, now)
        back, self._heard = [one for one in self._heard if one in self._known], []
        for name, one in self._known.items():
            if name in heard:
                if one.is_silent:
                    one.is_silent = False
                    back.append(name)
                one.byte(now)
            if not one.is_silent and one.is_busy is not (name in busy):
                one.is_busy, one.byte_at, one.sign_at = not one.is_busy, now, now
                one.asked_at, one.wait_s = None, QUIET_S
        waiting = [name for name, one in self._known.items() if one.is_busy or one.is_silent]
        self.is_active = bool(waiting)
        others = {one for one in open_ if one not in self._known or self._known[one].asked_at is None}
        silent = [(name, self._close(name, now)) for name in waiting if self._is_silent(name, now) and others - {name}]
        return Look(self._to_ask(waiting, now), silent, back)

    def answered(self, instance_id: str, now: float) -> None:
        """Note that a probe was answered."""
        one = self._known.get(instance_id)
        if one is None:
            return
        one.is_asked = False
        if one.asked_at is None:
            return
        in_time = not one.overdue(now)
        one.sign(now)
        one.answers_meanwhile = in_time
        one.wait_s = min(2 * one.wait_s, MAX_QUIET_S)
        if one.is_silent:
            one.is_silent = False
            self._heard.append(instance_id)

    def unanswered(self, instance_id: str, now: float, *, unmade: bool = False) -> None:
        """Note that a probe has ended without an answer. `unmade`: it was never sent, for a reason on this side."""
        one = self._known.get(instance_id)
        if one is not None:
            one.is_asked = False
            if unmade:
                one.asked_at, one.sign_at = None, now

    def _forgive(self, now: float) -> None:
        """Discount time during which the gateway did not look."""
        last_at, self._looked_at = self._looked_at, now
        if last_at is None or now - last_at < LOOK_S + MAX_LATE_S:
            return
        for one in self._known.values():
            one.byte_at, one.sign_at = one.byte_at + now - last_at, one.sign_at + now - last_at
            one.asked_at = None if one.asked_at is None else one.asked_at + now - last_at

    def _is_silent(self, name: str, now: float) -> bool:
        one = self._known[name]
        if one.is_silent or not one.has_answered or not one.overdue(now):
            return False
        return one.answers_meanwhile or now - one.byte_at >= PATIENCE * one.usual_s

    def _close(self, name: str, now: float) -> Reason:
        one = self._known[name]
        one.is_silent = True
        assert one.asked_at is not None, "it is overdue"
        facts = {"quiet_s": now - one.byte_at, "unanswered_s": now - one.asked_at, "usual_s": one.usual_s}
        return Reason("silent", {name: round(value, 3) for name, value in facts.items()})

    def _to_ask(self, waiting: Collection[str], now: float) -> list[str]:
        """The instances to probe now, in the order of how long they have been quiet, longest first."""
        each = [(self._known[name], name) for name in waiting]
        due = [
            (one.sign_at, name)
            for one, name in each
            if not one.is_asked
            and one.has_answered
            and now - one.probed_at >= ANSWER_S
            and (one.asked_at is not None or now - one.sign_at >= one.wait_s)
        ]
        asked = [name for _, name in sorted(due)[:MAX_ASKED]]
        for name in asked:
            one = self._known[name]
            one.is_asked, one.probed_at = True, now
            one.asked_at = now if one.asked_at is None else one.asked_at
        return asked


class Closings:
    """Events of instances that a dispatcher closes and opens by itself."""

    def __init__(
        self, sender: Sender, failed: Callable[[Failed, float, list[DispatcherCommand]], None], max_tries: int
    ) -> None:
        self._sender = sender
        self._table, self._fleet = sender.table, sender.fleet
        self._failed = failed
        self._max_tries = max_tries

    def paused(self, event: Paused, now: float, commands: list[DispatcherCommand]) -> None:
        facts = {"until": event.until, "for_s": round(event.until - now, 3), "why": event.why}
        self._table.journal.counters.closed[event.instance_id, "paused"] += 1
        self._fleet.pauses[event.instance_id] = event.until
        if event.instance_id not in self._fleet.silent:
            close(self._fleet, self._fleet[event.instance_id], Reason("paused", facts))
        for pool in self._table.pools.waiting():
            self._sender.refuse_paused(pool, now, commands)

    def resume(self, now: float, commands: list[DispatcherCommand]) -> None:
        """End the pauses whose time is over."""
        fleet = self._fleet
        over = [name for name, until in fleet.pauses.items() if until <= now]
        for name in over:
            del fleet.pauses[name]
        self._open([name for name in over if name not in fleet.silent], now, commands)

    def silenced(self, event: Silenced, now: float, commands: list[DispatcherCommand]) -> None:
        """Close an instance, and send those of its requests that may be moved to other instances."""
        endpoint = self._fleet[event.instance_id]
        self._table.journal.counters.closed[event.instance_id, "silent"] += 1
        self._fleet.silent.add(event.instance_id)
        close(self._fleet, endpoint, event.why)
        for request_id in event.movable:
            sent = self._table.sent.get(request_id)
            if sent is None or sent.endpoint is not endpoint or sent.begun or sent.revoked is not None:
                continue
            if sent.item.tries + 1 < self._max_tries:
                self._failed(Failed(request_id, event.why), now, commands)

    def heard_again(self, event: HeardAgain, now: float, commands: list[DispatcherCommand]) -> None:
        """Open a silent instance. This also ends a pause for which it had asked before: it may ask again."""
        self._fleet.silent.discard(event.instance_id)
        self._fleet.pauses.pop(event.instance_id, None)
        self._open([event.instance_id], now, commands)

    def _open(self, names: Collection[str], now: float, commands: list[DispatcherCommand]) -> None:
        opened = [self._fleet[name] for name in names]
        if opened:
            reopen(self._fleet, opened)
        for endpoint in opened:
            self._sender.room_on(endpoint, now, commands)
