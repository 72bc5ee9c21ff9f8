"""Replays a recording on the product's own plane, on virtual time.

Enters: a recording, a fleet, a policy and a seed. Leaves: the outcome of each request as soon as it has ended, and
the state over time. The one rule: the dispatcher, plugins, strategies, controller and scaling are those of the
product. No code here decides anything.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from pointsman.config.yaml import text_of
from pointsman.errors import PointsmanError, UnknownName, command
from pointsman.lab.traffic.arrivals import Arrival, ReplayLoad, arrivals
from pointsman.lab.traffic.fleets import LabFleet
from pointsman.lab.traffic.policies import TriedPolicy
from pointsman.lab.traffic.recording import BLOCK_TOKENS, RecordedRequest, Recording
from pointsman.routing.decisions import Choice
from pointsman.routing.endpoints import IN_FLIGHT_REQUESTS, Endpoint
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.routes import DispatcherSettings, Route
from pointsman.runtimes.interface import ProcessOrder
from pointsman.runtimes.simulation.engines import SimulatedRequest
from pointsman.runtimes.simulation.faults import FaultDocument, FaultInjector, read_faults
from pointsman.runtimes.simulation.simulation import Simulation, pace_of_engine
from pointsman.runtimes.traffic import Lane
from pointsman.selection import SchedulingFailure
from pointsman.simulator.continuous_batching import ContinuousBatching
from pointsman.simulator.performance import Pace
from pointsman.types import RequestMetadata

START_LIMIT_S = 3600.0
"""Time limit for the start of instances. After it, the replay ends with an error."""
DRAIN_LIMIT_S = 48 * 3600.0
"""Time limit for requests to end after the last arrival. After it, the replay ends with an error."""
BINS = 240
"""Number of intervals of the time line."""
SESSION_HEADER = "x-session-id"
BLOCK_BYTES = BLOCK_TOKENS * 4
_64_BITS = (1 << 64) - 1


def faults_of(file: Path) -> FaultDocument:
    """Read the faults and settings in a file, for a `ReplaySetting`."""
    return read_faults(text_of(file), str(file))


class ReplaySetting(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a replay except recording, policy and seed."""

    fleet: LabFleet
    load: ReplayLoad = ReplayLoad()
    deployment: str = ""
    """The deployment whose policy is tried. Empty if there is only one deployment."""
    scrape_interval_s: float | None = 0.5
    """Time between two readings of metrics. None if metrics are never read."""
    scrape_delay_s: float = 0.01
    start_up_s: float = 1.0
    """How long an instance takes to start."""
    faults: FaultDocument | None = None
    """The faults, in seconds since the first arrival."""


class RequestOutcome(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one request. Times are in seconds since the first arrival."""

    number: int
    at: float
    """Time at which the request arrived."""
    sent_at: float
    """Time at which the request was sent. Nan if it was never sent. The times below are also nan if there is none."""
    first_at: float
    ended_at: float
    served: bool
    instance: str
    cached_tokens: int
    outcome: str
    request: RecordedRequest

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.at

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first token. 0 for an answer with one token."""
        more = self.request.output_length - 1
        return (self.ended_at - self.first_at) / more if more > 0 else 0.0

    @property
    def latency_s(self) -> float:
        return self.ended_at - self.at


class TimeLine(msgspec.Struct, frozen=True):
    """The state of the replay at equal intervals."""

    bin_s: float
    waiting: list[int]
    """Number of requests in the queues of the dispatchers."""
    running: list[int]
    replicas: list[int]
    """Number of instances that take requests."""
    load: dict[str, list[int]]
    """Number of requests in flight, by instance."""


class Replayed(msgspec.Struct, frozen=True):
    ended: list[RequestOutcome]
    """Outcomes in the order of arrival. Empty if a listener received the outcomes instead."""
    line: TimeLine
    seconds: float
    """Time from the first arrival to the end of the last request."""
    gpu_hours: float
    """GPU hours of all instances that were up during this time."""
    errors: list[str]
    """Failures of the policy, and faults that could not be injected."""


class Substitution(msgspec.Struct, frozen=True):
    """One decision that replaces the policy's decision."""

    request: int
    """Position of the request in the order of arrival, from 0."""
    instance: str


class SubstitutingRoute:
    """A route that has only one instance to choose for one request."""

    def __init__(self, route: Route, substitution: Substitution) -> None:
        self.name = route.name
        self._route, self._request, self._instance = route, str(substitution.request), substitution.instance

    def choose(self, cycle: RequestCycle, endpoints: Endpoints) -> Choice | SchedulingFailure[Endpoint]:
        if cycle.request.request_id == self._request:
            endpoints = endpoints.without([one.row for one in endpoints if str(one) != self._instance])
        return self._route.choose(cycle, endpoints)


def substitute(lane: Lane, substitution: Substitution) -> None:
    if lane.dispatcher.strategy != lane.dispatcher._chooser.route.name:
        raise PointsmanError(
            f'the policy "{lane.dispatcher.strategy}" decides about all waiting requests at once, so no decision can '
            f"be replaced alone; a Strategy or a plugin decides request by request"
        )
    lane.dispatcher._chooser.route = SubstitutingRoute(lane.dispatcher._chooser.route, substitution)


class Player:
    """Replays one recording on one simulated plane."""

    def __init__(
        self,
        recording: Recording,
        setting: ReplaySetting,
        policy: TriedPolicy | None,
        seed: int,
        ended: Callable[[RequestOutcome], None],
        substitution: Substitution | None = None,
    ) -> None:
        """`ended` is called with the outcome of each request, in the order in which they end."""
        self._recording, self._setting, self._seed = recording, setting, seed
        self.paces: dict[str, Pace] = {}
        """By instance: the pace that decides when the requests in flight get their tokens."""
        self.simulation = Simulation(
            setting.fleet.manifest(policy, setting.deployment),
            setting.fleet.workers(),
            pace=self._pace,
            settings=DispatcherSettings(seed=seed, traced=False),
            listener=self._happened,
            scrape_interval_s=setting.scrape_interval_s,
            scrape_delay_s=setting.scrape_delay_s,
            start_up_s=setting.start_up_s,
        )
        self._models = list(self.simulation.traffic.by_model)
        if substitution is not None:
            for lane in self._lanes():
                substitute(lane, substitution)
        self._began = self._seconds = 0.0
        self._ended = ended
        self._open: dict[str, Arrival] = {}
        """Requests that have arrived but have not ended."""
        self._sessions = _Sessions(self) if setting.load.closed else None
        self._blocks: dict[str, int] = {}
        self._sampled = _Samples(self.simulation, setting.fleet.gpus)
        self._injector = FaultInjector(self.simulation, seed)

    def _pace(self, order: ProcessOrder) -> Pace:
        made = self.paces[order.instance_id] = pace_of_engine(order)
        return made

    def play(self, progress: Callable[[float], None] | None = None) -> Replayed:
        """Play the whole recording. `progress` is called with the finished share of the recording."""
        self._wait_for_instances()
        survey, load = self._recording.survey(), self._setting.load
        self._sampled.begin(self._began, max(survey.seconds / (1.0 if load.clients else load.speed), 1.0) / BINS)
        if self._setting.faults is not None:
            self._injector.schedule(self._setting.faults.drawn(self._seed), since=self._began)
        clock, sessions, last = self.simulation.clock, self._sessions, 0.0
        for arrival in arrivals(self._recording, load, self._seed):
            clock.run_until(self._began + arrival.at)
            if sessions is None:
                self.submit(arrival)
            else:
                sessions.arrived(arrival)
            last = arrival.at
            if progress is not None and arrival.number % 256 == 0:
                progress(arrival.number / (survey.requests * (load.speed if load.clients else 1.0)))
        self._drain(last)
        return self._replayed()

    def submit(self, arrival: Arrival) -> None:
        """Let a request arrive now."""
        one, name = arrival.request, str(arrival.number)
        lane = self._lane(one.model)
        self._open[name] = arrival
        request = RequestMetadata(
            name,
            prompt=prompt_of(one),
            model_name=one.model or self._models[0],
            priority=one.priority,
            slo_deadline_ms=one.slo_ms,
            user_id=one.tenant,
            arrival_time=self.simulation.clock.now(),
            prompt_tokens=one.input_length,
            multimodal=False,
            headers={SESSION_HEADER: one.session_id} if one.session_id else {},
        )
        blocks = blocks_of(one, self._block_size(lane))
        self.simulation.submit(request, max(one.output_length, 1), blocks)

    def _lane(self, model: str) -> Lane:
        by_model = self.simulation.traffic.by_model
        if not model and len(self._models) > 1:
            raise PointsmanError(
                f"the recording does not name models, and the fleet has {len(self._models)}: {', '.join(self._models)}"
            )
        name = model or self._models[0]
        if name not in by_model:
            raise UnknownName("model", name, by_model)
        return by_model[name]

    def _block_size(self, lane: Lane) -> int:
        """Number of tokens per block in the engines of a lane. 0 if these engines have no prefix cache."""
        size = self._blocks.get(lane.name)
        if size is None:
            first = next((self.paces[str(one)] for one in lane.dispatcher.fleet.roster if str(one) in self.paces), None)
            size = first.cache.block_size if isinstance(first, ContinuousBatching) else 0
            self._blocks[lane.name] = size
        return size

    def _wait_for_instances(self) -> None:
        simulation, limit = self.simulation, START_LIMIT_S + self._setting.start_up_s
        while not simulation.plane.ready:
            if simulation.clock.now() > limit:
                problems = (
                    "; ".join(one["text"] for one in simulation.plane.status()["problems"])
                    or f"see {command('place', 'FILE')}"
                )
                raise PointsmanError(f"the instances of {self._setting.fleet.text} do not start: {problems}")
            simulation.run_until(simulation.clock.now() + 1.0)
        self._began = simulation.clock.now() + 1.0

    def _drain(self, last: float) -> None:
        clock, limit = self.simulation.clock, self._began + last + DRAIN_LIMIT_S
        while self._open or (self._sessions is not None and self._sessions.waits):
            if clock.now() >= limit:
                raise PointsmanError(f"requests are still unanswered {DRAIN_LIMIT_S / 3600:g} h after the last arrival")
            clock.run_on(limit)  # the loop stops when no request is left

    def _lanes(self) -> Iterable[Lane]:
        return self.simulation.traffic.lanes.values()

    def _happened(self, at: float, what: str, one: SimulatedRequest, where: str) -> None:
        is_served = what == "served"
        if not is_served and what != "refused":
            return
        name, began = one.request.request_id, self._began
        arrival = self._open.pop(name)
        ended_at = at - began
        self._seconds = max(self._seconds, ended_at)
        self._ended(
            RequestOutcome(
                arrival.number,
                (one.request.arrival_time or 0.0) - began,
                one.sent_at - began,
                one.first_token_at - began,
                ended_at,
                is_served,
                one.instance,
                one.cached_tokens,
                what if is_served else where,
                arrival.request,
            )
        )
        if self._sessions is not None:
            self._sessions.ended(name)

    def _replayed(self) -> Replayed:
        useless = [lane.dispatcher.counters.useless for lane in self._lanes()]
        errors = [
            f"{one.count:,} of its answers could not be used; the last: {one.last}" for one in useless if one.count
        ]
        missed = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self._injector.missed.items()))
        if missed:
            errors.append(f"faults that found nothing to strike: {missed}")
        return Replayed([], self._sampled.line(), self._seconds, self._sampled.gpu_hours(self._seconds), errors)


class _Sessions:
    """A closed loop. It submits the turns of each session one after the other."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self._open: dict[str, list[Arrival]] = {}
        """By session: the turns that wait for the end of the turn in flight."""
        self._of: dict[str, str] = {}
        self._thinking = 0

    @property
    def waits(self) -> bool:
        return bool(self._open) or self._thinking > 0

    def arrived(self, arrival: Arrival) -> None:
        session = arrival.request.session_id
        if not session:
            self._player.submit(arrival)
        elif session in self._open:
            self._open[session].append(arrival)
        else:
            self._open[session] = []
            self._submit(arrival)

    def ended(self, request_id: str) -> None:
        session = self._of.pop(request_id, "")
        if not session:
            return
        later = self._open[session]
        if later:
            following = later.pop(0)
            clock = self._player.simulation.clock
            clock.call_at(clock.now() + following.request.think_ms / 1000, self._submit, following)
        else:
            del self._open[session]

    def _submit(self, arrival: Arrival) -> None:
        self._of[str(arrival.number)] = arrival.request.session_id
        self._player.submit(arrival)


class _Samples:
    """Samples the state of a simulation at equal intervals, and counts the hours of its instances."""

    def __init__(self, simulation: Simulation, gpus: int) -> None:
        self._simulation, self._gpus = simulation, gpus
        self._bin_s = 1.0
        self._waiting, self._running, self._replicas = array("l"), array("l"), array("l")
        self._load: dict[str, list[int]] = {}
        self._gpu_seconds: list[float] = []

    def begin(self, at: float, bin_s: float) -> None:
        self._bin_s = bin_s
        self._simulation.clock.call_at(at, self._sample)

    def _sample(self) -> None:
        clock = self._simulation.clock
        waiting = running = replicas = gpus = 0
        bins = len(self._waiting)
        for lane in self._simulation.traffic.lanes.values():
            dispatcher = lane.dispatcher
            running += dispatcher.running
            waiting += len(dispatcher) - dispatcher.running
            load = dispatcher.fleet.load.columns[IN_FLIGHT_REQUESTS]
            for endpoint in dispatcher.fleet.roster:
                replicas += endpoint.instance.can_accept_request
                gpus += self._gpus or endpoint.instance.gpu_count
                seen = self._load.setdefault(str(endpoint), [])
                seen += [0] * (bins - len(seen))
                seen.append(int(load[endpoint.row]))
        self._waiting.append(waiting)
        self._running.append(running)
        self._replicas.append(replicas)
        self._gpu_seconds.append(gpus * self._bin_s)
        clock.call_at(clock.now() + self._bin_s, self._sample)

    def line(self) -> TimeLine:
        bins = len(self._waiting)
        load = {name: seen + [0] * (bins - len(seen)) for name, seen in self._load.items()}
        return TimeLine(self._bin_s, self._waiting.tolist(), self._running.tolist(), self._replicas.tolist(), load)

    def gpu_hours(self, seconds: float) -> float:
        """GPU hours until this time, counted in whole intervals."""
        return sum(self._gpu_seconds[: max(int(seconds / self._bin_s), 1)]) / 3600


def prompt_of(one: RecordedRequest) -> memoryview:
    """Bytes in place of a prompt: four per token. Equal blocks have equal bytes. Empty if the blocks are unknown."""
    try:
        names = array("Q", one.hash_ids)
    except OverflowError:
        names = array("Q", [block & _64_BITS for block in one.hash_ids])
    # Every request has such a prompt, 50 KB on average. This code writes its bytes only once.
    text = np.frombuffer(names, dtype=np.uint64).repeat(BLOCK_BYTES // 8)
    return text.data.cast("B")[: one.input_length * 4]


def blocks_of(one: RecordedRequest, block_size: int) -> Sequence[int]:
    """The names of a request's blocks, for an engine whose blocks have this size."""
    if not block_size or not one.hash_ids or block_size == BLOCK_TOKENS:
        return one.hash_ids if block_size else ()
    if BLOCK_TOKENS % block_size == 0:
        parts = BLOCK_TOKENS // block_size
        whole = one.input_length // block_size
        return [block * parts + part for block in one.hash_ids for part in range(parts)][:whole]
    if block_size % BLOCK_TOKENS == 0:
        step = block_size // BLOCK_TOKENS
        return one.hash_ids[step - 1 :: step]
    raise PointsmanError(
        f"blocks of {block_size} tokens do not fit those of the recording, which have {BLOCK_TOKENS}; "
        f"set blockSize of the engine to {BLOCK_TOKENS}, or to a divisor of it"
    )


def replay(
    recording: Recording,
    setting: ReplaySetting,
    policy: TriedPolicy | None,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
    substitution: Substitution | None = None,
    ended: Callable[[RequestOutcome], None] | None = None,
) -> Replayed:
    """Replay a recording on a fleet that routes by this policy. If `policy` is None, the fleet's manifest decides.

    If there is `ended`, it is called with the outcome of each request, and no outcomes are kept.
    """
    if ended is not None:
        return Player(recording, setting, policy, seed, ended, substitution).play(progress)
    kept: list[RequestOutcome] = []
    replayed = Player(recording, setting, policy, seed, kept.append, substitution).play(progress)
    kept.sort(key=lambda one: one.number)
    return msgspec.structs.replace(replayed, ended=kept)
