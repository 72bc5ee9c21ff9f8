"""A simulated deployment: a load of concurrent requests, and replicas that take time to start."""

from collections.abc import Callable
from math import isfinite

from pointsman.scaling import Guard, Measurements, ScalingLimits, ScalingRecord, invoke, windows_of

SERVICE_S = 0.2
TOKENS = 100.0
DEADLINE_MS = 500.0


class World:
    """Virtual time, one policy, one guard."""

    def __init__(
        self,
        policy: object,
        limits: ScalingLimits,
        *,
        concurrency: int = 4,
        start_up_s: float = 0.0,
        tick_s: float = 1.0,
    ) -> None:
        self.policy, self.concurrency, self.start_up_s, self.tick_s = policy, concurrency, start_up_s, tick_s
        self.guard = Guard("chat", limits, "policy")
        self.now = 1_700_000_000.0
        self.measured = Measurements(windows_of([policy]))
        self.ready_at: list[float] = [self.now] * self.guard.target
        """When each replica is ready."""
        self.records: list[ScalingRecord] = []
        self.targets: list[tuple[float, int]] = []

    @property
    def replicas(self) -> int:
        return sum(ready <= self.now for ready in self.ready_at)

    def run(self, seconds: float, load: Callable[[float], float]) -> "World":
        """Run for this long under a load that depends on the time."""
        end = self.now + seconds
        while self.now < end:
            self.now += self.tick_s
            self.tick(load(self.now))
        return self

    def tick(self, load: float) -> None:
        """Measure, call the policy, decide, and apply."""
        self._measure(load)
        view = self.measured.view(
            name="chat",
            now=self.now,
            replicas=self.replicas,
            starting=len(self.ready_at) - self.replicas,
            target=self.guard.target,
            min_replicas=self.guard.limits.min_replicas,
            max_replicas=self.guard.limits.max_replicas,
            max_concurrency=self.concurrency,
            cost_per_replica_hour=1.0,
            since_up_s=self.guard.since_up_s(self.now),
            since_down_s=self.guard.since_down_s(self.now),
            state=self.guard.policy_state,
        )
        record = self.guard.decide(view, invoke(self.policy, view))
        if record is not None:
            self.records.append(record)
        self.targets.append((self.now, self.guard.target))
        while len(self.ready_at) < self.guard.target:
            self.ready_at.append(self.now + self.start_up_s)
            self.measured.started(self.start_up_s)
        self.ready_at = sorted(self.ready_at)[: self.guard.target]

    def _measure(self, load: float) -> None:
        room = self.replicas * self.concurrency
        ongoing = min(load, room)
        usage = min(1.0, 0.9 * load / room) if room else None
        self.measured.sample(self.now, ongoing=ongoing, queued=load - ongoing, kv_usage=usage)
        self.measured.arrived(self.now, load / SERVICE_S * self.tick_s)
        if ongoing:
            latency_ms = 1000 * SERVICE_S * max(load / room, 0.25)
            done = ongoing / SERVICE_S * self.tick_s
            met = latency_ms <= DEADLINE_MS
            assert isfinite(latency_ms)
            self.measured.ended(
                self.now, latency_ms=latency_ms, ttft_ms=latency_ms / 4, met_slo=met, tokens=done * TOKENS
            )

    @property
    def changes(self) -> list[tuple[int, int]]:
        """Before and after of every change of the target."""
        return [(record.before, record.after) for record in self.records if record.before != record.after]
