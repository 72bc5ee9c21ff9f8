"""The server: requests, the tokens that the pace produces for them, and the faults that strike.

Everything happens in callbacks of one loop: a request arrives, the timer of the pace's next step fires, or a client
disconnects. Times are simulated: they follow the loop's clock, but wait while the machine cannot keep up.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple, Protocol

from pointsman.http.heads import HttpRequest
from pointsman.http.server import HttpServer, ResponseStream, ServerConnection
from pointsman.simulator.answers import BadCompletionRequest, block_hashes, error_body
from pointsman.simulator.faults import ANY_TIME, AT_ONCE, AT_THE_START, Fault, Faults, read_fault
from pointsman.simulator.performance import Job, Pace

# Metrics, with the names and the format of vLLM


FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
WHOLE_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


class SimulatedHistogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        yield f"# TYPE {name} histogram"
        total = 0
        for bound, number in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += number
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}.0'
        yield f"{name}_count{{{labels}}} {total}.0"
        yield f"{name}_sum{{{labels}}} {self._sum!r}"


class SimulatedCounters:
    def __init__(self) -> None:
        self.requests = 0
        """Requests for work: chat, completions, embeddings."""
        self.ended = {"stop": 0, "length": 0, "abort": 0}
        """Ended requests by reason; abort means that the client disconnected before the end."""
        self.prompt_tokens = 0
        self.written_tokens = 0
        self.faults: dict[str, int] = {}
        """Number of requests that each fault has affected."""
        self.first_token = SimulatedHistogram(FIRST_TOKEN_S)
        self.between_tokens = SimulatedHistogram(BETWEEN_TOKENS_S)
        self.whole = SimulatedHistogram(WHOLE_S)


def metrics_text(model: str, pace: Pace, counters: SimulatedCounters, block_size: int, blocks: int) -> str:
    escaped = model.replace("\\", "\\\\").replace('"', '\\"')
    labels = f'engine="0",model_name="{escaped}"'
    gauges = {
        "num_requests_running": pace.running,
        "num_requests_waiting": pace.waiting,
        "kv_cache_usage_perc": pace.kv_usage,
    }
    totals = {
        "prefix_cache_queries_total": pace.counts.prefix_queries,
        "prefix_cache_hits_total": pace.counts.prefix_hits,
        "num_preemptions_total": pace.counts.preemptions,
        "prompt_tokens_total": counters.prompt_tokens,
        "generation_tokens_total": counters.written_tokens,
    }
    lines: list[str] = []
    for kind, values in (("gauge", gauges), ("counter", totals)):
        for name, value in values.items():
            lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{labels}}} {float(value)!r}"]
    lines.append("# TYPE vllm:request_success_total counter")
    lines += [
        f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {float(count)}'
        for reason, count in counters.ended.items()
    ]
    lines += counters.first_token.lines("vllm:time_to_first_token_seconds", labels)
    lines += counters.between_tokens.lines("vllm:inter_token_latency_seconds", labels)
    lines += counters.whole.lines("vllm:e2e_request_latency_seconds", labels)
    lines.append("# TYPE vllm:cache_config_info gauge")
    lines.append(f'vllm:cache_config_info{{block_size="{block_size}",engine="0",num_gpu_blocks="{blocks}"}} 1.0')
    return "\n".join(lines) + "\n"


class Work(Protocol):
    """Turns tokens into an answer."""

    def token(self, at: float) -> None: ...

    def so_far(self) -> bytes:
        """The part of an unfinished answer that a fault sends if nothing was sent yet."""
        ...


class Answering:
    """One request, until it is answered or abandoned."""

    def __init__(
        self,
        server: "SimulatedServer",
        connection: ServerConnection,
        request: HttpRequest,
        answer: Callable[["Answering"], None],
    ) -> None:
        self.server = server
        self.connection = connection
        self.request = request
        self.fault: Fault | None = None
        """The fault that strikes after `after_tokens` tokens; None if there is none."""
        self.token_delay_s = 0.0
        self.stream: ResponseStream | None = None
        """The stream of the answer; None until its head was sent."""
        self.job: Job | None = None
        self._answer = answer
        self._work: Work | None = None
        self._timers: set[asyncio.TimerHandle] = set()

    def answer(self) -> None:
        """Answer without a fault."""
        try:
            self._answer(self)
        except BadCompletionRequest as refused:
            self.connection.answer(refused.status, error_body(refused.status, str(refused), refused.param))

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Make a call later, unless the client has disconnected by then."""

        def due() -> None:
            self._timers.discard(timer)
            call()
            self.flush()

        timer = asyncio.get_running_loop().call_later(delay_s, due)
        self._timers.add(timer)
        self.connection.serving = self

    def start(self, work: Work, prompt: str, prompt_tokens: int, output_tokens: int) -> Job:
        """Give work to the pace. `prompt`: a text with which later prompts may begin."""
        settings = self.server.settings
        hashes = block_hashes(prompt, settings.block_size) if settings.hashes_prompts else ()
        self._work = work
        self.job = Job(prompt_tokens, output_tokens, hashes, self)
        self.connection.serving = self
        self.server.counters.prompt_tokens += prompt_tokens
        self.server.clock.submit(self.job)
        return self.job

    def token(self, at: float) -> None:
        if self._work is not None and self.job is not None:
            self._work.token(at)

    def flush(self) -> None:
        if self.stream is not None:
            self.stream.flush()

    def finish(self, reason: str) -> None:
        self.connection.serving = None
        self.job = self._work = None
        self.server.counters.ended[reason] += 1

    def stop(self) -> bool:
        """Stop the work on the answer, and send what is written. Returns True if that is half of an answer in one
        piece."""
        self.connection.serving = None
        for timer in self._timers:
            timer.cancel()
        half = b"" if self._work is None else self._work.so_far()
        if half:
            self.connection.write(half)
        self.flush()
        job, self.job, self._work = self.job, None, None
        if job is not None:
            self.server.clock.cancel(job)
        return bool(half)

    # The client

    def abandon(self) -> None:
        self._work = self.stream = None
        self.stop()
        self.server.counters.ended["abort"] += 1

    def pause(self) -> None: ...

    def resume(self) -> None: ...


MAX_BEHIND_S = 0.05
"""If the machine lags by more than this, simulated time waits for the machine."""


class Settings(NamedTuple):
    model: str
    output_tokens: int
    """The length of an answer if the request has no max_tokens."""
    context_tokens: int
    block_size: int
    kv_tokens: int
    hashes_prompts: bool
    """Whether the pace has a prefix cache."""


class SimulatedRoute(NamedTuple):
    place: str
    """The name of the page in faults; empty if no fault can strike the page."""
    answer: Callable[[Answering], None]


Routes = Mapping[tuple[bytes, bytes], SimulatedRoute]
"""Routes by method and path."""


class PaceClock:
    """Passes on the tokens that the pace produces, when they are due."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._held_back = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def now(self) -> float:
        """Simulated time."""
        return self._loop.time() - self._held_back

    def submit(self, job: Job) -> None:
        self._pace.submit(job, self.now())
        self._set_timer()

    def cancel(self, job: Job) -> None:
        self._pace.cancel(job, self.now())
        self._set_timer()

    def _set_timer(self) -> None:
        due = self._pace.next_at
        if due is None:
            return
        at = due + self._held_back
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._hand_out)

    def _hand_out(self) -> None:
        self._timer = None
        due = self._pace.next_at
        if due is not None and self.now() > due + MAX_BEHIND_S:
            self._held_back += self.now() - due - MAX_BEHIND_S
        written: dict[Answering, None] = {}
        for step in self._pace.advance(self.now()):
            for job in step.produced:
                assert isinstance(job.owner, Answering)
                job.owner.token(step.at)
                written[job.owner] = None
        for answering in written:
            answering.flush()
        self._set_timer()


class SimulatedServer:
    def __init__(self, settings: Settings, routes: Routes, pace: Pace, seed: str) -> None:
        self.settings = settings
        self._routes = routes
        self.pace = pace
        self.clock = PaceClock(pace)
        self.counters = SimulatedCounters()
        self.faults = Faults(seed)
        self.answer_numbers = count(1)
        self._loop = asyncio.get_running_loop()
        self._http = HttpServer(self._handle)
        self._address = ("", 0)
        self._returning: asyncio.Task[int] | None = None

    # Listening

    async def listen(self, host: str, port: int) -> int:
        """Start to accept connections. Returns the port."""
        taken = await self._http.listen(host, port)
        self._address = (host, taken)
        return taken

    def stop_listening(self, until: float | None) -> None:
        """Refuse connections until this time, or for good if the time is None, and close idle connections."""
        self._http.stop_listening()
        for connection in list(self._http.connections):
            connection.drain()
        if until is not None:
            self._loop.call_later(max(until - self.clock.now(), 0.0), self.listen_again)

    def listen_again(self) -> None:
        if not self._http.is_listening:
            self._returning = self._loop.create_task(self.listen(*self._address))

    # Requests

    def _handle(self, connection: ServerConnection, request: HttpRequest) -> None:
        route = self._routes.get((request.method, request.path))
        if route is None:
            line = (b"%b %b" % (request.method, request.path)).decode("latin-1")
            connection.answer(404, error_body(404, f"{line} is unknown to a simulated server"))
            return
        answering = Answering(self, connection, request, route.answer)
        if route.place == "work":
            self.counters.requests += 1
        fault = self.faults.strike(route.place, self.clock.now()) if route.place else None
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
        """Let a fault end an answer, or replace it."""
        self.done(fault)
        ANY_TIME[fault.name](answering, fault)

    def done(self, fault: Fault) -> None:
        self.counters.faults[fault.name] = self.counters.faults.get(fault.name, 0) + 1

    def add_faults(self, faults: object) -> None:
        """Switch on one fault or a list of faults. If a fault is not valid, raises ValueError and adds no fault."""
        read = [read_fault(one, self.clock.now()) for one in (faults if isinstance(faults, list) else [faults])]
        for fault in read:
            if fault.name in AT_ONCE:
                self.done(fault)
                AT_ONCE[fault.name](self, fault)
            else:
                self.faults.add(fault)

    def metrics(self) -> str:
        block_size = self.settings.block_size
        blocks = self.settings.kv_tokens // block_size
        return metrics_text(self.settings.model, self.pace, self.counters, block_size, blocks)
