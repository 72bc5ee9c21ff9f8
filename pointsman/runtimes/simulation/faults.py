"""Faults of a simulation, as data: the kind, the time and the place of each.

A document lists faults at given times, and may ask for random ones. Everything random comes from the seed, so a failure
happens again with the same seed:

    faults:
      - {kind: kill, at: 60, instance: chat-1}
      - {kind: hang, at: 90, seconds: 20}          # an instance at random
    random: {count: 100, begin: 10, end: 600, kinds: [kill, slow-down]}
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec

from pointsman.config.yaml import read_yaml
from pointsman.errors import PointsmanError
from pointsman.runtimes.simulation.simulation import Simulation

Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0.0)]
Moment: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0)]


class SimulationFault(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """A fault."""

    at: Moment
    """Seconds on the clock of the simulation; in a replay, since the first arrival."""


class InstanceFault(SimulationFault, frozen=True, kw_only=True):
    instance: str | None = None
    """The instance; None: any that runs at that time."""


class KillInstance(InstanceFault, frozen=True, kw_only=True, tag="kill"):
    """The process of an instance ends."""


class HangInstance(InstanceFault, frozen=True, kw_only=True, tag="hang"):
    """A process runs but does not answer requests or probes, and its metrics cannot be read."""

    seconds: Positive = 30.0


class SlowDownInstance(InstanceFault, frozen=True, kw_only=True, tag="slow-down"):
    """All work of an instance takes `factor` times as long."""

    factor: Annotated[float, msgspec.Meta(ge=1.0)] = 4.0
    seconds: Positive = 30.0


class FlapInstance(InstanceFault, frozen=True, kw_only=True, tag="flap"):
    """A process is killed several times, if it runs again by then."""

    times: Annotated[int, msgspec.Meta(ge=1)] = 3
    every_s: Positive = 5.0


class LoseMetrics(InstanceFault, frozen=True, kw_only=True, tag="lose-metrics"):
    """The metrics of an instance cannot be read, so the known ones age."""

    seconds: Positive = 30.0


class PartitionGateway(SimulationFault, frozen=True, kw_only=True, tag="partition"):
    """A gateway is cut off from the plane and from other gateways."""

    gateway: int | None = None
    """The gateway; None: any."""
    seconds: Positive = 10.0


AnyFault: TypeAlias = KillInstance | HangInstance | SlowDownInstance | FlapInstance | LoseMetrics | PartitionGateway
FaultKind: TypeAlias = Literal["kill", "hang", "slow-down", "flap", "lose-metrics", "partition"]


class RandomFaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Faults at random times."""

    count: Annotated[int, msgspec.Meta(ge=1)]
    end: Moment
    begin: Moment = 0.0
    kinds: tuple[FaultKind, ...] = get_args(FaultKind)

    def drawn(self, rng: random.Random) -> list[AnyFault]:
        known: dict[str, type[AnyFault]] = {str(one.__struct_config__.tag): one for one in get_args(AnyFault)}
        return [known[rng.choice(self.kinds)](at=rng.uniform(self.begin, self.end)) for _ in range(self.count)]


class FaultDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    faults: tuple[AnyFault, ...] = ()
    random: RandomFaults | None = None

    def drawn(self, seed: int) -> list[AnyFault]:
        """All faults in order of time."""
        more = [] if self.random is None else self.random.drawn(random.Random(seed))
        return sorted([*self.faults, *more], key=lambda one: one.at)


def read_faults(text: str, file: str = "faults") -> FaultDocument:
    """The faults of a document in YAML or JSON. Raises PointsmanError if it is not valid."""
    data, problems = read_yaml(text, file)
    problems.raise_if_any()
    try:
        return msgspec.convert(data, FaultDocument)
    except msgspec.ValidationError as error:
        raise PointsmanError(f"{file}: {error}") from None


class FaultInjector:
    """Injects faults into a simulation."""

    def __init__(self, simulation: Simulation, seed: int = 0) -> None:
        self.happened: Counter[str] = Counter()
        """Faults that were injected, by kind."""
        self.missed: Counter[str] = Counter()
        """Faults for which there was no running instance, or no second gateway."""
        self._simulation = simulation
        self._rng = random.Random(f"{seed}:targets")
        self._acts: dict[type[SimulationFault], Callable[..., bool]] = {
            KillInstance: self._kill,
            HangInstance: self._hang,
            SlowDownInstance: lambda fault: self._change_rate(self._target(fault), 1.0 / fault.factor, fault.seconds),
            FlapInstance: self._flap,
            LoseMetrics: self._lose_metrics,
            PartitionGateway: self._partition,
        }

    def schedule(self, faults: Iterable[AnyFault], since: float = 0.0) -> None:
        """`since`: the time on the clock that is 0 for the faults."""
        for fault in faults:
            self._simulation.clock.call_at(since + fault.at, self._strike, fault)

    def _strike(self, fault: AnyFault) -> None:
        kind = str(type(fault).__struct_config__.tag)
        (self.happened if self._acts[type(fault)](fault) else self.missed)[kind] += 1

    def _target(self, fault: InstanceFault) -> str | None:
        """The instance that a fault affects; None if that instance does not run."""
        running = [one.launch.instance_id for one in self._simulation.runtime.processes.all() if one.pid]
        if fault.instance is not None:
            return fault.instance if fault.instance in running else None
        return self._rng.choice(running) if running else None

    def _after(self, seconds: float, call: Callable[..., Any], *about: object) -> None:
        clock = self._simulation.clock
        clock.call_at(clock.now() + seconds, call, *about)

    def _kill(self, fault: KillInstance) -> bool:
        target = self._target(fault)
        if target is not None:
            self._simulation.runtime.processes.crash(target)
        return target is not None

    def _flap(self, fault: FlapInstance) -> bool:
        target = self._target(fault)
        if target is None:
            return False
        for number in range(fault.times):
            self._after(number * fault.every_s, self._kill, KillInstance(at=fault.at, instance=target))
        return True

    def _hang(self, fault: HangInstance) -> bool:
        target, runtime = self._target(fault), self._simulation.runtime
        if target is None:
            return False
        runtime.processes.health.hang(target)
        self._after(fault.seconds, runtime.processes.health.go_on, target)
        self._unreadable_for(target, fault.seconds)
        return self._change_rate(target, 0.0, fault.seconds)

    def _lose_metrics(self, fault: LoseMetrics) -> bool:
        target = self._target(fault)
        if target is not None:
            self._unreadable_for(target, fault.seconds)
        return target is not None

    def _change_rate(self, target: str | None, rate: float, seconds: float) -> bool:
        if target is None:
            return False
        engine = self._simulation.engines.of(target)
        engine.set_rate(rate)
        self._after(seconds, engine.set_rate, 1.0)  # only this process is slow: the next one has its normal speed
        return True

    def _unreadable_for(self, target: str, seconds: float) -> None:
        unreadable = self._simulation.runtime.probes.unreadable
        unreadable.add(target)
        self._after(seconds, unreadable.discard, target)

    def _partition(self, fault: PartitionGateway) -> bool:
        gateways = self._simulation.gateways
        if gateways is None:
            return False
        number = self._rng.randrange(len(gateways.each)) if fault.gateway is None else fault.gateway
        one = gateways.each[number]
        if one.is_cut_off:
            return False
        one.cut_off()
        self._after(fault.seconds, one.connect)
        return True
