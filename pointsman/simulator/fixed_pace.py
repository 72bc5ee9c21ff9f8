"""Tokens at a fixed pace, whatever the load: for tests with known times."""

from collections import deque
from heapq import heappop, heappush

from pointsman.simulator.performance import KV_TOKENS_IF_UNKNOWN, Counts, EngineStep, Job


class FixedPace:
    """A `Pace` that serves every job as if it were alone; only the number of seats is limited."""

    def __init__(
        self, first_token_s: float, token_s: float, max_num_seqs: int = 256, kv_tokens: int = KV_TOKENS_IF_UNKNOWN
    ) -> None:
        self.counts = Counts()
        self._first_token_s = first_token_s
        self._token_s = token_s
        self._seats = max_num_seqs
        self._kv_tokens = kv_tokens
        self._kv_used = 0
        self._waiting: deque[Job] = deque()
        self._running: dict[Job, None] = {}
        self._due: list[tuple[float, int, Job]] = []
        """A heap; the number keeps the order of jobs that are due together."""
        self._numbers = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        return min(self._kv_used / self._kv_tokens, 1.0)

    @property
    def next_at(self) -> float | None:
        while self._due and self._due[0][2] not in self._running:  # cancelled
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        return prompt_tokens + output_tokens <= self._kv_tokens

    def submit(self, job: Job, now: float) -> None:
        job.arrived = now
        self.counts.prefix_queries += job.prompt_tokens
        self._waiting.append(job)
        self._seat(now)

    def cancel(self, job: Job, now: float) -> None:
        if job in self._running:
            self._leave(job)
            self._seat(now)
        elif job in self._waiting:
            self._waiting.remove(job)

    def advance(self, now: float) -> list[EngineStep]:
        steps: list[EngineStep] = []
        while (at := self.next_at) is not None and at <= now:
            _, _, job = heappop(self._due)
            job.generated += 1
            self._kv_used += 1
            done = job.generated == job.output_tokens
            steps.append(EngineStep(at, (job,), (job,) if done else ()))
            if done:
                self._leave(job)
                self._seat(at)
            else:
                self._set(job, at + self._token_s)
        return steps

    def _seat(self, now: float) -> None:
        while self._waiting and len(self._running) < self._seats:
            job = self._waiting.popleft()
            self._running[job] = None
            self._kv_used += job.prompt_tokens
            self._set(job, now + self._first_token_s)

    def _set(self, job: Job, at: float) -> None:
        self._numbers += 1
        heappush(self._due, (at, self._numbers, job))

    def _leave(self, job: Job) -> None:
        del self._running[job]
        self._kv_used -= job.prompt_tokens + job.generated
