"""One request on its way to its answer: its work for the pace, the fault that it meets, the client that goes away."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from pointsman.runtimes.connection import ServerExchange
from pointsman.runtimes.engines.simulated.answers import BadCompletionRequest, block_hashes, error_body
from pointsman.runtimes.simulation.performance import Job

if TYPE_CHECKING:
    from pointsman.runtimes.engines.simulated.faults import Fault
    from pointsman.runtimes.engines.simulated.server import SimulatedServer


class Work(Protocol):
    """What becomes of the tokens."""

    def token(self, at: float) -> None:
        """One more."""
        ...

    def so_far(self) -> bytes:
        """What has been said when a fault strikes, if it is not on its way already."""
        ...


class Answering:
    """One request, until it is answered or given up."""

    def __init__(
        self, server: "SimulatedServer", exchange: ServerExchange, answer: Callable[["Answering"], None]
    ) -> None:
        self.server = server
        self.exchange = exchange
        self.fault: Fault | None = None
        """Strikes after `after_tokens` tokens."""
        self.token_delay_s = 0.0
        self.is_open = False
        """The head of a stream is out."""
        self.job: Job | None = None
        self._answer = answer
        self._work: Work | None = None
        self._timers: set[asyncio.TimerHandle] = set()

    def answer(self) -> None:
        """Answer as if nothing were wrong."""
        try:
            self._answer(self)
        except BadCompletionRequest as refused:
            self.exchange.respond(refused.status, error_body(refused.status, str(refused), refused.param))

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call, unless the client is gone by then."""

        def due() -> None:
            self._timers.discard(timer)
            call()
            self.exchange.flush()

        timer = asyncio.get_running_loop().call_later(delay_s, due)
        self._timers.add(timer)
        self.exchange.gone = self._gone

    def start(self, work: Work, prompt: str, prompt_tokens: int, output_tokens: int) -> Job:
        """Give work to the pace. `prompt`: what later prompts may begin with."""
        settings = self.server.settings
        hashes = block_hashes(prompt, settings.block_size) if settings.hashes_prompts else ()
        self._work = work
        self.job = Job(prompt_tokens, output_tokens, hashes, self)
        self.exchange.gone = self._gone
        self.server.tally.prompt_tokens += prompt_tokens
        self.server.submit(self.job)
        return self.job

    def token(self, at: float) -> None:
        """The pace has one token more for it."""
        if self._work is not None and self.job is not None:
            self._work.token(at)

    def finish(self, reason: str) -> None:
        """All is said, or will be in a moment."""
        self.exchange.gone = None
        self.job = self._work = None
        self.server.tally.ended[reason] += 1

    def abandon(self) -> bool:
        """Do no more for it. What it has said so far is on its way; True: that is half of a plain answer."""
        self.exchange.gone = None
        for timer in self._timers:
            timer.cancel()
        half = b"" if self._work is None else self._work.so_far()
        if half:
            self.exchange.connection.write(half)
        self.exchange.flush()
        job, self.job, self._work = self.job, None, None
        if job is not None:
            self.server.cancel(job)
        return bool(half)

    def _gone(self) -> None:
        """The client is: stop at once."""
        self._work = None
        self.abandon()
        self.server.tally.ended["abort"] += 1
