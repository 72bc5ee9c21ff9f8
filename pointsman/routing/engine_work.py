"""The work of each instance, from the requests that were sent to it: prompts to read, and answers to write.

Theory of operation. An engine reads prompts in the order in which they came, and writes all answers meanwhile. While it
reads, answers are delayed. So a request waits for the prompts before it (`behind`), and delays the answers there by the
time that its own prompt takes. `read_ms` is the total time spent reading. If `read_ms` was x when an answer began, and
is y now, the answer has been delayed by y - x. Requests from clients that don't stream have no first token: their
prompts count as read once the estimated time for reading them is over.

Enters: requests sent, first tokens, ends. Leaves: sums that are current after each event. The one rule: every request
that was sent leaves once, whatever its outcome. Times are milliseconds.
"""

from pointsman.routing.engine_model import EngineModel, Ratio

MAX_BATCHED_TOKENS = 8192
"""Tokens that an engine computes in one step, by vLLM's default. Prompts that share a step end together."""
MIN_ANSWER = 16
"""Minimum tokens of an answer from which the pace is learned."""
MAX_DELAY = 20.0
"""Maximum delay factor: an answer that took more than this many times the time of its steps counts as this many."""
LONG_PERIOD = 32
"""After this many prompts, the model learns from a busy period even if it has not ended."""


class Reading:
    """A prompt that was sent to an instance and is not read yet."""

    __slots__ = ("done", "due", "ms", "pairs", "prompt", "sent", "streams", "tokens", "tpot", "tpot_slo", "ttft")

    def __init__(
        self,
        ms: float,
        tokens: float,
        prompt: float,
        now_ms: float,
        due_ms: float,
        tpot_slo: float,
        ttft: float = 0.0,
        tpot: float = 0.0,
        *,
        streams: bool = True,
    ) -> None:
        self.ms = ms
        """The time to read it, as estimated when it was sent."""
        self.tokens = tokens
        """Tokens to compute."""
        self.prompt = prompt
        self.pairs = tokens * (prompt - tokens / 2)
        self.sent = now_ms
        self.due = due_ms
        """When its first token is due."""
        self.tpot_slo = tpot_slo
        self.ttft, self.tpot = ttft, tpot
        """Its predicted latency."""
        self.streams = streams
        self.done = (0.0, 0.0, 0.0)
        """`done` of the instance when the prompt was sent."""


class Writing:
    """An answer that an instance writes."""

    __slots__ = ("began", "done", "late", "prompt", "read", "sent", "step", "streams", "tpot_slo")

    def __init__(self, prompt: Reading, began: float, read: float) -> None:
        self.began = began
        """When its first token arrived."""
        self.read = read
        """`read_ms` of the instance at that time."""
        self.prompt = prompt.prompt
        self.late = began > prompt.due
        """Whether its first token was late."""
        self.tpot_slo = prompt.tpot_slo
        self.sent, self.step, self.streams, self.done = prompt.sent, prompt.tpot, prompt.streams, prompt.done


class EngineWork:
    """The work of one instance."""

    __slots__ = (
        "_mark",
        "_model",
        "_period",
        "_started",
        "context",
        "delays",
        "done",
        "head_ms",
        "left_ms",
        "pace",
        "patient",
        "read_ms",
        "reading",
        "since",
        "slowness",
        "writing",
    )

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self.slowness, self.pace = Ratio(), Ratio()
        """How slow reading and writing are, relative to the deployment."""
        self.delays = Ratio()
        """The time per token, divided by the time per token without prompts to read."""
        self.reading: dict[str, Reading] = {}
        """Prompts in the order in which they were sent."""
        self.writing: dict[str, Writing] = {}
        self.patient = 0
        """Number of prompts whose first token will not be seen."""
        self.left_ms = 0.0
        """The estimated time to read all prompts in `reading`."""
        self.head_ms = 0.0
        """The reading time of the first prompt."""
        self.since = 0.0
        """When the reading of the first prompt began."""
        self.read_ms = 0.0
        """The time spent reading, up to the last event."""
        self.context = 0.0
        """Prompt tokens of all requests on the instance."""
        self.done = (0.0, 0.0, 0.0)
        """Prompts read so far, their tokens, and their pairs."""
        self._mark = 0.0
        """The time of the last event of the busy period."""
        self._started = 0.0
        self._period = [0, 0.0, 0.0]
        """Prompts read in the busy period so far, their tokens, and their pairs."""

    def tpot_ms(self) -> float:
        """The time per token of an answer, including the recent delays by prompts."""
        return self.step_ms() * self.delays.value

    def step_ms(self) -> float:
        """The time per token while no prompts are read."""
        return self.pace.value * self._model.step_ms(self.context)

    def sent(self, request_id: str, one: Reading) -> None:
        if not self.reading:
            self.since = self._mark = self._started = one.sent
            self.head_ms = one.ms
            self._period = [0, 0.0, 0.0]
        one.done = self.done
        self.reading[request_id] = one
        self.left_ms += one.ms
        self.context += one.prompt
        self.patient += not one.streams

    def first_token(self, request_id: str, now: float) -> float | None:
        """Handle the first token of a request. Returns its predicted time; None if no first token was expected."""
        one = self.reading.get(request_id)
        if one is None:
            return None
        self._read_those_before(request_id, now)
        self._read(request_id, one, now)
        return one.ttft

    def ended(self, request_id: str, output_tokens: int | None, now: float) -> None:
        """Handle a request that has left. `output_tokens`: the tokens of its answer; None without an answer, or if the
        number is unknown."""
        one = self.reading.get(request_id)
        if one is not None:
            if output_tokens is None:
                self._drop(request_id, one, now)
                return
            self._read_those_before(request_id, now)
            self._read(request_id, one, now, learn=False)
        written = self.writing.pop(request_id, None)
        if written is None:
            return
        if output_tokens is not None and not written.streams:
            learn_from_end(self._model, self, written, output_tokens, now)
        elif output_tokens is not None and output_tokens > MIN_ANSWER:
            took, delay = now - written.began, self.read_at(now) - written.read
            expected = self.step_ms()
            self.delays.add(min(took / (output_tokens - 1), MAX_DELAY * expected), expected)
            step = (took - delay) / (output_tokens - 1)
            if step > 0:
                self._model.step.learn((1.0, self.context * 1e-3), step, self.pace)
        self.context = self.context - written.prompt if self.reading or self.writing else 0.0

    def read_at(self, now: float) -> float:
        """`read_ms` at this time."""
        return self.read_ms + (now - self._mark if self.reading else 0.0)

    def _read(self, request_id: str, one: Reading, now: float, *, learn: bool = True) -> None:
        """Handle a prompt that is read: its answer begins."""
        step = MAX_BATCHED_TOKENS * 1e-3 * self._model.reading.coefficients[1] * self.slowness.value
        carried = min(max(now - self.since - one.ms, 0.0), step)  # spent on the next prompts, in the same step
        self.read_ms += max(now - self._mark, 0.0)
        self._mark = now
        is_head = next(iter(self.reading)) == request_id
        del self.reading[request_id]
        self.patient -= not one.streams
        self.writing[request_id] = Writing(one, now, self.read_ms)
        self.done = (self.done[0] + 1.0, self.done[1] + one.tokens, self.done[2] + one.pairs)
        period = self._period
        period[0] += 1
        period[1] += one.tokens
        period[2] += one.pairs
        if not self.reading:
            self.left_ms = self.head_ms = 0.0
            if learn:
                self._learn(now)
            return
        self.left_ms -= one.ms
        if is_head:
            self.since = now - carried
            self.head_ms = next(iter(self.reading.values())).ms
        if learn and period[0] >= LONG_PERIOD:
            self._learn(now)

    def _learn(self, now: float) -> None:
        """Learn from a busy period that is over, or has lasted long enough."""
        prompts, tokens, pairs = self._period
        took = now - self._started
        self._period, self._started = [0, 0.0, 0.0], now
        if took > 0 and prompts:
            self._model.reading.learn((prompts, tokens * 1e-3, pairs * 1e-6), took, self.slowness)

    def _read_those_before(self, request_id: str, now: float) -> None:
        """Count earlier prompts of requests that do not stream as read, because prompts are read in order."""
        if next(iter(self.reading)) == request_id:
            return
        for other_id, other in list(self.reading.items()):
            if other_id == request_id:
                return
            if not other.streams:
                self._read(other_id, other, now)

    def settle(self, now: float) -> None:
        """Count prompts of requests that do not stream as read once the time for reading them is over."""
        while self.reading:
            request_id, one = next(iter(self.reading.items()))
            if one.streams or now - self.since < one.ms:
                return
            self._read(request_id, one, self.since + one.ms, learn=False)

    def _drop(self, request_id: str, one: Reading, now: float) -> None:
        """Handle a request that left before its prompt was read."""
        is_head = next(iter(self.reading)) == request_id
        del self.reading[request_id]
        self.patient -= not one.streams
        self.context -= one.prompt
        self.left_ms -= one.ms
        if not self.reading:
            self.read_ms += now - self._mark
            self.left_ms = self.head_ms = 0.0
            if not self.writing:
                self.context = 0.0
        elif is_head:
            self.since = now
            self.head_ms = next(iter(self.reading.values())).ms


def learn_from_end(model: EngineModel, work: EngineWork, one: Writing, tokens: int, now: float) -> None:
    """Learn from a request whose first token was not seen: its reading and writing are off by the same factor."""
    read = [after - before for after, before in zip(work.done, one.done, strict=True)]
    reading = work.slowness.value * model.reading_ms(int(read[0]), read[1], read[2])
    step = work.step_ms()
    off = (now - one.sent) / (reading + tokens * step)
    if off > 0:
        model.reading.learn((read[0], read[1] * 1e-3, read[2] * 1e-6), reading * off, work.slowness)
        model.step.learn((1.0, work.context * 1e-3), step * off, work.pace)
