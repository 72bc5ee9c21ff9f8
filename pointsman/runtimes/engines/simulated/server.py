"""The server: who asks what, when the pace lets answers go on, and which fault strikes.

Everything happens in callbacks of one loop: a request arrives, the timer of the pace's next step fires, or a client is
gone. Times are those of `now`: the loop's clock, held back while the machine cannot keep up.
"""

import asyncio
from collections.abc import Callable, Mapping
from itertools import count
from typing import NamedTuple

from pointsman.runtimes.connection import Connection, ServerExchange, listen
from pointsman.runtimes.engines.simulated.answering import Answering
from pointsman.runtimes.engines.simulated.answers import error_body
from pointsman.runtimes.engines.simulated.faults import ANY_TIME, AT_ONCE, AT_THE_START, Fault, Faults, read_fault
from pointsman.runtimes.engines.simulated.metrics import SimulatedCounters, metrics_text
from pointsman.runtimes.simulation.performance import Job, Pace

MOST_BEHIND_S = 0.05
"""If the machine is further behind than this, simulated time waits for it."""


class Settings(NamedTuple):
    """What does not change while it runs."""

    model: str
    output_tokens: int
    """How long an answer is unless the client wants it shorter."""
    context_tokens: int
    block_size: int
    kv_tokens: int
    hashes_prompts: bool
    """The pace has a prefix cache."""


class SimulatedRoute(NamedTuple):
    """What is done for a request."""

    place: str
    """What faults call it; empty: none strikes here."""
    answer: Callable[[Answering], None]


Routes = Mapping[tuple[bytes, bytes], SimulatedRoute]
"""By method and path."""


class SimulatedServer:
    """One simulated engine."""

    def __init__(self, settings: Settings, routes: Routes, pace: Pace, seed: str) -> None:
        self.settings = settings
        self._routes = routes
        self.pace = pace
        self.tally = SimulatedCounters()
        self.faults = Faults(seed)
        self.answer_numbers = count(1)
        self._loop = asyncio.get_running_loop()
        self._held_back = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._address = ("", 0)
        self._returning: asyncio.Task[int] | None = None

    def now(self) -> float:
        return self._loop.time() - self._held_back

    # Listening

    async def listen(self, host: str, port: int) -> int:
        """Take connections; the port that was taken."""
        self._listener, taken = await listen(host, port, self._handle, self._connections)
        self._address = (host, taken)
        return taken

    def stop_listening(self, until: float | None) -> None:
        """Refuse connections, until then or for good; idle ones are closed."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            if connection.is_idle:
                connection.close()
        if until is not None:
            self._loop.call_later(max(until - self.now(), 0.0), self.listen_again)

    def listen_again(self) -> None:
        if self._listener is None:
            self._returning = self._loop.create_task(self.listen(*self._address))

    # Requests

    def _handle(self, exchange: ServerExchange) -> None:
        route = self._routes.get((exchange.method, exchange.path))
        if route is None:
            exchange.respond(404, error_body(404, f"{exchange.asked} is nothing that a simulated server answers"))
            return
        answering = Answering(self, exchange, route.answer)
        if route.place == "work":
            self.tally.requests += 1
        fault = self.faults.strike(route.place, self.now()) if route.place else None
        if fault is None:
            answering.answer()
        elif fault.name in AT_THE_START:
            self.done(fault)
            AT_THE_START[fault.name](answering, fault)
        elif fault.after_tokens is None:
            self.strike(answering, fault)
        else:
            answering.fault = fault
            answering.answer()

    def strike(self, answering: Answering, fault: Fault) -> None:
        """A fault ends an answer, or takes its place."""
        self.done(fault)
        ANY_TIME[fault.name](answering, fault)

    def done(self, fault: Fault) -> None:
        self.tally.faults[fault.name] = self.tally.faults.get(fault.name, 0) + 1

    def add_faults(self, told: object) -> None:
        """Switch faults on. Raises ValueError, and then none of them is."""
        read = [read_fault(one, self.now()) for one in (told if isinstance(told, list) else [told])]
        for fault in read:
            if fault.name in AT_ONCE:
                self.done(fault)
                AT_ONCE[fault.name](self, fault)
            else:
                self.faults.add(fault)

    def metrics(self) -> str:
        block_size = self.settings.block_size
        blocks = self.settings.kv_tokens // block_size
        return metrics_text(self.settings.model, self.pace, self.tally, block_size, blocks)

    # Pace

    def submit(self, job: Job) -> None:
        self.pace.submit(job, self.now())
        self._set_timer()

    def cancel(self, job: Job) -> None:
        self.pace.cancel(job, self.now())
        self._set_timer()

    def _set_timer(self) -> None:
        due = self.pace.next_at
        if due is None:
            return
        at = due + self._held_back
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._go_on)

    def _go_on(self) -> None:
        """Hand out the tokens that are due."""
        self._timer = None
        due = self.pace.next_at
        if due is not None and self.now() > due + MOST_BEHIND_S:
            self._held_back += self.now() - due - MOST_BEHIND_S
        written: dict[Answering, None] = {}
        for step in self.pace.advance(self.now()):
            for job in step.produced:
                assert isinstance(job.owner, Answering)
                job.owner.token(step.at)
                written[job.owner] = None
        for answering in written:
            answering.exchange.flush()
        self._set_timer()
