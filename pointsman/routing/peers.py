"""What dispatchers for the same instances share with each other: requests in flight, and what plugins have learned.

Enters: messages from other dispatchers, with the time. Leaves: messages for them, and events for this process's
dispatcher. The one rule: messages are optional. A dispatcher without messages decides by what it has sent itself.

A message has absolute numbers for the instances whose numbers have changed, so two messages can be merged into one.
`begin_again` restores what was lost with a connection. Each dispatcher adds what others have in flight to its own
columns (`endpoints.share`). There scorers, filters and limits read the sum, and need not know other dispatchers.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.endpoints import IN_FLIGHT_REQUESTS, IN_FLIGHT_TOKENS
from pointsman.routing.events import Shared

SILENCE_S = 3.0
"""The load from another dispatcher is dropped if nothing was received from that dispatcher for this long."""
AT_ONCE = 512
"""Maximum number of learned facts in one message. The rest goes into the next messages."""
MAX_UNTOLD = 8 * AT_ONCE
"""Maximum number of facts not yet sent. The oldest are dropped: other dispatchers learn from their own requests."""
REPEATED_S = 10.0
"""Minimum time before a fact is repeated. Repetition shows others that it is in use; they drop facts that are not."""

NOTHING = (0.0, 0.0)


class News(msgspec.Struct, array_like=True, omit_defaults=True):
    """The changes at a dispatcher."""

    in_flight: dict[str, tuple[float, float]] = {}
    """Requests, and prompt tokens to compute, by instance."""
    learned: list[tuple[int, str, Any]] = []
    """(index of the plugin among the learners, id of the endpoint, what was learned)"""

    def __bool__(self) -> bool:
        return bool(self.in_flight or self.learned)


class Peers:
    """The other dispatchers: messages to them, and what they have reported."""

    def __init__(self, dispatcher: Dispatcher, tell: Callable[[Shared], None]) -> None:
        """`tell` passes events to the dispatcher, and carries out the commands that it returns."""
        self._dispatcher = dispatcher
        self._tell = tell
        self._plugins: tuple[Any, ...] | None = None
        """The plugins whose learning is observed; None before the first call of `news`."""
        self._told: dict[str, tuple[float, float]] = {}
        self._untold: deque[tuple[int, str, Any]] = deque(maxlen=MAX_UNTOLD)
        self._repeated: set[tuple[int, str, Any]] = set()
        self._repeated_since = 0.0
        self._heard: dict[str, dict[str, tuple[float, float]]] = {}
        """Load by peer, then by instance."""
        self._heard_at: dict[str, float] = {}

    # Messages for others

    def begin_again(self) -> None:
        """Start over, as for peers that have received no earlier messages."""
        self._told.clear()
        self._repeated.clear()

    def news(self, now: float) -> News:
        """The changes since the last call."""
        self._listen()
        if now - self._repeated_since >= REPEATED_S:
            self._repeated_since = now
            self._repeated.clear()
        current = own_load(self._dispatcher)
        told = self._told
        changed = {name: load for name, load in current.items() if told.get(name, NOTHING) != load}
        changed |= {name: NOTHING for name, load in told.items() if name not in current and load != NOTHING}
        self._told = current
        untold = self._untold
        return News(changed, [untold.popleft() for _ in range(min(len(untold), AT_ONCE))])

    def _listen(self) -> None:
        """Observe what plugins learn; a new configuration brings new plugins."""
        if self._plugins is self._dispatcher.plugins:
            return
        self._plugins = self._dispatcher.plugins
        for number, plugin in enumerate(self._dispatcher.learners):
            plugin.listener = self._listener(number)

    def _listener(self, number: int) -> Callable[[str, Any], None]:
        untold, repeated = self._untold, self._repeated

        def learned(endpoint_id: str, what: Any) -> None:
            key = (number, endpoint_id, what[-1] if isinstance(what, list) else what)
            if key not in repeated:
                repeated.add(key)
                untold.append((number, endpoint_id, what))

        return learned

    # Messages from others

    def heard(self, peer: str, news: News | None, now: float) -> None:
        """Take in the message from a peer. `news` is None if the peer is alive and nothing has changed."""
        self._heard_at[peer] = now
        if news is not None and news:
            known = self._heard.setdefault(peer, {})
            known.update(news.in_flight)
            self._add(news.in_flight, news.learned)

    def gone(self, peer: str) -> None:
        """Remove a peer that has ended, together with its load."""
        self._heard_at.pop(peer, None)
        lost = self._heard.pop(peer, None)
        if lost:
            self._add(lost, ())

    def expire(self, now: float) -> None:
        """Drop the load of peers that have been silent for long."""
        for peer in [name for name, at in self._heard_at.items() if now - at > SILENCE_S]:
            self.gone(peer)

    def totals(self) -> dict[str, tuple[float, float]]:
        """Requests and tokens that all peers have in flight, by instance."""
        names = {name for loads in self._heard.values() for name in loads}
        return {name: self._total(name) for name in names}

    def _total(self, name: str) -> tuple[float, float]:
        loads = [known.get(name, NOTHING) for known in self._heard.values()]
        return sum(requests for requests, _ in loads), sum(tokens for _, tokens in loads)

    def _add(self, changed: Iterable[str], learned: Iterable[tuple[int, str, Any]]) -> None:
        self._tell(Shared({name: self._total(name) for name in changed}, tuple(learned)))


def own_load(dispatcher: Dispatcher) -> dict[str, tuple[float, float]]:
    """Requests and tokens that a dispatcher itself has in flight, by instance, without idle instances."""
    columns: Mapping[str, Any] = dispatcher.fleet.load.columns
    found = {}
    for endpoint in dispatcher.fleet.roster:
        requests, tokens = endpoint.theirs
        own = float(columns[IN_FLIGHT_REQUESTS][endpoint.row]) - requests
        if own > 0:
            found[str(endpoint)] = (own, max(0.0, float(columns[IN_FLIGHT_TOKENS][endpoint.row]) - tokens))
    return found
