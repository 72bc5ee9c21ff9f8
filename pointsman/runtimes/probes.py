"""The plane's HTTP requests to instances: probes, metrics, and the user config of replicas."""

from collections import Counter, deque
from collections.abc import Callable
from math import ceil

import msgspec

from pointsman.control.desired import Address
from pointsman.control.events import Answered, ProbeNotMade, Silent
from pointsman.control.instances import spread
from pointsman.engines import Engine, ProbeRequest, Samples
from pointsman.http.client import Exchange, HttpClient, NoResponse, Reply
from pointsman.http.pool import local_cause
from pointsman.parameters import read_key
from pointsman.reasons import Reason
from pointsman.routing.endpoints import Metrics
from pointsman.routing.queue.lazy_heap import LazyHeap
from pointsman.runtimes.interface import BackgroundTasks, Clock, LoadTable, Tell, Timer

TASK = "scrapes"
SCRAPE_TIMEOUT = 4.0
"""Timeout of a scrape, as a multiple of the scrape interval."""
TICK = 0.2
"""A share of the scrape interval. Scrapes are made at multiples of this time, so that several share a wake-up."""
BUSY_SCRAPES = 4
"""Number of scrapes of an idle instance before it is scraped less often."""
IDLE_SCRAPE_S = 4.0
"""The longest scrape interval of an idle instance, if there are few idle instances."""
IDLE_SCRAPES_PER_S = 25.0
"""Maximum scrapes of all idle instances together: the more there are, the less often each is scraped."""
AT_ONCE = 16
"""Number of exchanges that are begun in one go before other work continues."""
TURN_S = 0.005
BUFFERED_BYTES = 4 * 1024 * 1024
LATELY_S = 60.0
"""How long a probe that could not be made counts as a problem, unless a later probe is made."""


class ScrapeTurn(msgspec.Struct):
    """The scrape schedule of an instance."""

    quiet: int = 0
    """Consecutive scrapes that found the instance idle."""
    begun_at: float = 0.0
    """When the last scrape began."""
    gap_s: float = 0.0
    """Time from the last scrape to the next."""
    is_on: bool = False
    """Whether a scrape has begun and not ended."""


class ScrapeSchedule:
    """The scrape schedule: at each interval for busy instances, less and less often for idle ones.

    The interval of idle instances grows with their number, so that the total rate of their scrapes is bounded.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._turns: dict[str, ScrapeTurn] = {}
        self._due: LazyHeap[str] = LazyHeap()

    def add(self, instance_id: str, now: float) -> None:
        self._turns[instance_id] = ScrapeTurn()
        self._due.put(instance_id, now, instance_id)

    def remove(self, instance_id: str) -> None:
        self._turns.pop(instance_id, None)
        self._due.discard(instance_id)

    @property
    def next_due(self) -> float | None:
        """When the next scrape is due; None if no scrape is due."""
        due: float | None = self._due.first_key()
        return due

    def take(self, now: float) -> list[str]:
        """The instances to scrape now. The next scrape of each is scheduled after this one has ended."""
        taken = []
        while len(self._due) and self._due.first_key() <= now:
            instance_id = self._due.pop()
            taken.append(instance_id)
            turn = self._turns[instance_id]
            turn.is_on, turn.begun_at = True, now
        return taken

    def ended(self, instance_id: str, now: float, *, is_idle: bool) -> float:
        """Note the end of a scrape. Returns the interval until the next."""
        turn = self._turns.get(instance_id)
        if turn is None:
            return self._interval_s
        turn.is_on, turn.quiet = False, turn.quiet + 1 if is_idle else 0
        longest_s = max(IDLE_SCRAPE_S, len(self._turns) / IDLE_SCRAPES_PER_S)
        doublings = min(max(turn.quiet - BUSY_SCRAPES, 0), 30)
        before_s, turn.gap_s = turn.gap_s, max(min(self._interval_s * 2.0**doublings, longest_s), self._interval_s)
        due_s = turn.gap_s
        if before_s < longest_s == due_s:  # instances that went idle together are not scraped together
            due_s = self._interval_s + (longest_s - self._interval_s) * spread(instance_id)
        self._due.put(instance_id, max(turn.begun_at + due_s, now), instance_id)  # missed scrapes are skipped
        return due_s

    def stir(self, instance_id: str, now: float) -> None:
        """Scrape an instance as soon as a busy one, because it was sent a request."""
        turn = self._turns.get(instance_id)
        if turn is not None:
            turn.quiet = 0
            if not turn.is_on:
                self._due.put(instance_id, max(turn.begun_at + self._interval_s, now), instance_id)


class Exchanges:
    """Begins exchanges a few at a time, so that hundreds of exchanges do not delay requests."""

    def __init__(self, clock: Clock, tasks: BackgroundTasks) -> None:
        self._clock = clock
        self._tasks = tasks
        self._left = AT_ONCE
        """Exchanges that may still begin in this turn of the loop."""
        self._waiting: deque[Question] = deque()
        self._timer: Timer | None = None

    def begin(self, question: "Question") -> None:
        if self._timer is None:
            self._timer = self._clock.call_at(self._clock.now() + TURN_S, self._next_turn)
        if self._left:
            self._left -= 1
            question.begin()
        else:
            self._waiting.append(question)

    def _next_turn(self) -> None:
        self._timer, self._left = None, AT_ONCE
        if self._waiting:
            self._timer = self._clock.call_at(self._clock.now() + TURN_S, self._next_turn)
        while self._waiting and self._left:
            self._left -= 1
            self._tasks.attempt("probes", self._waiting.popleft().begin)

    def close(self) -> None:
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()


class Question:
    """One exchange with an instance, which may wait for its turn."""

    def __init__(
        self, client: HttpClient, asked: ProbeRequest, timeout_s: float, done: Callable[[Reply], None]
    ) -> None:
        self._client = client
        self._asked = asked
        self._timeout_s = timeout_s
        self._done = done
        self._exchange: Exchange | None = None
        self._is_cancelled = False

    def begin(self) -> None:
        if self._is_cancelled:
            return
        asked = self._asked
        try:
            lines = authorization(self._client.target)
            self._exchange = self._client.exchange(
                asked.method, asked.path, asked.body, self._timeout_s, self._done, lines
            )
        except NoResponse as error:
            self._done(error)
        except Exception as error:  # each exchange has exactly one reply
            self._done(NoResponse(f"{type(error).__name__}: {error}", local=local_cause(error) or "plane"))

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._exchange is not None:
            self._exchange.cancel()


class Followed:
    """An instance in service: its connection for probes and scrapes, and the state of its scrapes."""

    def __init__(self, deployment: str, client: HttpClient, engine: Engine) -> None:
        self.deployment, self.client, self.engine = deployment, client, engine
        self.requests = 0
        """Number of requests that were sent to the instance before its last scrape."""
        self.failures = 0
        """Consecutive failed scrapes."""
        self.why = ""
        """Why the last scrape failed."""
        self.question: Question | None = None
        """The scrape in progress."""

    def read(self, reply: Reply) -> tuple[Metrics, Samples] | None:
        """The metrics in a reply. None if the reply has no metrics, which counts as a failure."""
        try:
            found = self._read(reply)
        except NoResponse as error:
            self.failures, self.why = self.failures + 1, str(error)
        except Exception as error:  # a user's own adapter
            self.failures, self.why = self.failures + 1, f"{type(error).__name__}: {error}"
        else:
            self.failures, self.why = 0, ""
            return found
        return None

    def _read(self, reply: Reply) -> tuple[Metrics, Samples]:
        if isinstance(reply, NoResponse):
            raise reply
        if reply.status != 200:
            raise NoResponse(f"GET {self.engine.metrics_path} was answered with {reply.status}")
        samples = Samples(reply.body)
        metrics = self.engine.metrics(samples)
        if metrics is None:
            raise NoResponse(f"{self.engine.metrics_path} has none of the numbers that {self.engine.name} reports")
        return metrics, samples


class Scrapes:
    """Reads the metrics of instances in service, over the same connections as probes."""

    def __init__(self, load: LoadTable, clock: Clock, tasks: BackgroundTasks, exchanges: Exchanges, interval_s: float):
        self._load = load
        self._clock = clock
        self._tasks = tasks
        self._exchanges = exchanges
        self._interval_s = interval_s
        self._schedule = ScrapeSchedule(interval_s)
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self.followed: dict[str, Followed] = {}

    def follow(self, deployment: str, instance_id: str, address: Address, engine: Engine) -> None:
        self.unfollow(instance_id)
        self.followed[instance_id] = Followed(deployment, instance_client(address), engine)
        if engine.metrics_path:
            self._schedule.add(instance_id, self._clock.now())
            self._set_timer()

    def unfollow(self, instance_id: str) -> None:
        self._schedule.remove(instance_id)
        followed = self.followed.pop(instance_id, None)
        if followed is not None:
            if followed.question is not None:
                followed.question.cancel()
            followed.client.close()

    def stir(self, instance_id: str) -> None:
        self._schedule.stir(instance_id, self._clock.now())
        self._set_timer()

    def close(self) -> None:
        for instance_id in list(self.followed):
            self.unfollow(instance_id)
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        due, tick_s = self._schedule.next_due, self._interval_s * TICK
        if due is not None:
            due = ceil(due / tick_s) * tick_s
        if due is not None and (self._timer is None or due < self._timer_at):
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_at = self._clock.call_at(due, self._scrape_due), due

    def _scrape_due(self) -> None:
        self._timer = None
        try:
            for instance_id in self._schedule.take(self._clock.now()):
                self._tasks.attempt(TASK, self._scrape, instance_id)
        finally:
            self._set_timer()

    def _scrape(self, instance_id: str) -> None:
        followed = self.followed[instance_id]

        def done(reply: Reply) -> None:
            followed.question, metrics = None, followed.read(reply)
            if metrics is not None:
                self._tasks.attempt(TASK, self._load.measured, followed.deployment, instance_id, *metrics)
            self._tasks.attempt(TASK, self._scraped, instance_id, followed, None if metrics is None else metrics[0])
            self._set_timer()

        asked, timeout_s = ProbeRequest("GET", followed.engine.metrics_path), self._interval_s * SCRAPE_TIMEOUT
        followed.question = Question(followed.client, asked, timeout_s, done)
        self._exchanges.begin(followed.question)

    def _scraped(self, instance_id: str, followed: Followed, metrics: Metrics | None) -> None:
        """End a scrape. If the instance is idle, the next scrape comes later."""
        seen = self._load.activity(followed.deployment, instance_id)
        is_idle = seen is None or (seen.requests == followed.requests and not seen.in_flight)
        is_idle &= metrics is None or not (metrics.running_requests_size or metrics.waiting_queue_size)
        followed.requests = 0 if seen is None else seen.requests
        now = self._clock.now()
        gap_s = self._schedule.ended(instance_id, now, is_idle=is_idle)
        if gap_s > self._interval_s:
            until = None if metrics is None else now + gap_s + self._interval_s * SCRAPE_TIMEOUT
            self._load.rest(followed.deployment, instance_id, until)


class HttpProbes:
    """`Probes` of the interface, for instances that are HTTP servers.

    Metrics that cannot be read are not reported, so the last known metrics age. The number of requests in flight then
    stands for the load of the instance, so a busy instance never appears idle.
    """

    def __init__(
        self, tell: Tell, load: LoadTable, clock: Clock, tasks: BackgroundTasks, scrape_interval_s: float
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._exchanges = Exchanges(clock, tasks)
        self._scrapes = Scrapes(load, clock, tasks, self._exchanges, scrape_interval_s)
        self.follow, self.stir = self._scrapes.follow, self._scrapes.stir
        self._probes: dict[str, Question] = {}
        self._unmade: dict[str, tuple[NoResponse, float]] = {}
        """Why the last probe of an instance could not be made, and when."""
        self.is_out_of_reach: Callable[[str], bool] = lambda _: False
        """Whether answers of an instance are ignored now, because its worker is cut off."""
        self._held: dict[str, Answered] = {}
        """Answers that were ignored when they came, by instance."""

    def probe(
        self, instance_id: str, address: Address, question: ProbeRequest, readiness: bool, timeout_s: float
    ) -> None:
        self._held.pop(instance_id, None)
        earlier = self._probes.pop(instance_id, None)
        if earlier is not None:
            earlier.cancel()
        followed = self._scrapes.followed.get(instance_id)
        kept = followed.client if followed is not None and followed.client.target == address else None
        client = kept or instance_client(address)

        def done(reply: Reply) -> None:
            del self._probes[instance_id]
            if client is not kept:
                client.close()
            self._probed(instance_id, question, readiness, reply)

        asked = self._probes[instance_id] = Question(client, question, timeout_s, done)
        self._exchanges.begin(asked)

    def _probed(self, instance_id: str, question: ProbeRequest, readiness: bool, reply: Reply) -> None:
        if isinstance(reply, NoResponse) and reply.local:
            self._unmade[instance_id] = reply, self._clock.now()
            self._tell(ProbeNotMade(instance_id, str(reply)))
            return
        self._unmade.pop(instance_id, None)
        failure = _failure(question, reply, is_work=readiness)
        if failure:
            self._tell(Silent(instance_id, failure))
        elif self.is_out_of_reach(instance_id):
            self._held[instance_id] = Answered(instance_id, readiness)
        else:
            self._tell(Answered(instance_id, readiness))

    def back_in_reach(self) -> None:
        """Count the answers of instances again, because their worker answers again."""
        for instance_id in [one for one in self._held if not self.is_out_of_reach(one)]:
            self._tell(self._held.pop(instance_id))

    def forget(self, instance_id: str) -> None:
        """Forget the probe of an instance whose process has ended."""
        self._unmade.pop(instance_id, None)
        self._held.pop(instance_id, None)
        asked = self._probes.pop(instance_id, None)
        if asked is not None:
            asked.cancel()

    def unfollow(self, instance_id: str) -> None:
        self._scrapes.unfollow(instance_id)

    def problems(self) -> list[Reason]:
        unread = [
            Reason("metrics-not-read", {"instance": name, "failures": one.failures, "why": one.why})
            for name, one in self._scrapes.followed.items()
            if one.failures > 1
        ]
        since = self._clock.now() - LATELY_S
        unmade = [error for error, at in self._unmade.values() if at > since]  # some instances may be gone by now
        counts, causes = Counter(error.local for error in unmade), {error.local: str(error) for error in unmade}
        return unread + [
            Reason("probes-not-made", {"instances": counts[cause], "cause": cause, "error": causes[cause]})
            for cause in sorted(causes)
        ]

    def close(self) -> None:
        for instance_id in list(self._probes):
            self.forget(instance_id)
        self._scrapes.close()
        self._exchanges.close()


def instance_client(address: Address) -> HttpClient:
    return HttpClient(address, buffered_bytes=BUFFERED_BYTES)


def authorization(target: object) -> str:
    """The header line with the API key of a server; empty if there is no key. Raises `NoResponse` if unreadable."""
    source = getattr(target, "key", "")
    try:
        return f"authorization: Bearer {read_key(source)}\r\n" if source else ""
    except ValueError as error:
        raise NoResponse(str(error)) from None


def _failure(question: ProbeRequest, reply: Reply, *, is_work: bool) -> str:
    """Why a probe failed; empty if it succeeded. With `is_work`, the answer must also be a JSON object."""
    if isinstance(reply, NoResponse):
        return str(reply)
    return question.failure(reply.status, reply.body, is_work=is_work)
