"""Any sequence of operations, against a plain list of what should be waiting."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pointsman.routing.events import Refusal
from pointsman.routing.queue import (
    BandSettings,
    FairnessPolicy,
    FlowControl,
    GlobalStrictFairnessPolicy,
    Queued,
    QueueStage,
    RoundRobinFairnessPolicy,
    VirtualTokenCounterFairnessPolicy,
)
from tests.properties import examples
from tests.routing.queue.waiting import bands_of, ids, item, size_bytes

FAIRNESS: list[FairnessPolicy] = [
    GlobalStrictFairnessPolicy(),
    RoundRobinFairnessPolicy(),
    VirtualTokenCounterFairnessPolicy(default_output_tokens=10),
]


class Lives(RuleBasedStateMachine):
    """Every request offered leaves exactly once; room is conserved; order inside a flow is kept."""

    @initialize(
        fairness=st.sampled_from(FAIRNESS),
        max_requests=st.sampled_from([None, 3, 8]),
        max_bytes=st.sampled_from([None, 30]),
        single=st.booleans(),
    )
    def start(self, fairness: FairnessPolicy, max_requests: int | None, max_bytes: int | None, single: bool) -> None:
        band = BandSettings(fairness=fairness, max_requests=6, max_bytes=40)
        self.queue = FlowControl(
            [band],
            default_band=band,
            max_requests=max_requests,
            max_bytes=max_bytes,
            single_band=single,
            default_request_ttl_s=20.0,
            no_endpoint_request_ttl_s=7.0,
        )
        self.now = 0.0
        self.pool_is_empty = False
        self.offered = 0
        self.waiting: set[Queued] = set()
        self.parked: set[Queued] = set()
        """The waiting requests that are parked."""
        self.held: list[Queued] = []
        self.served: list[Queued] = []
        self.left: list[Queued] = []

    def leaves(self, pairs: list[tuple[Queued, Refusal]]) -> None:
        for one, refusal in pairs:
            assert str(refusal.reason)
            self.waiting.remove(one)
            self.parked.discard(one)
            self.left.append(one)

    @rule(
        flow=st.sampled_from("abc"),
        priority=st.integers(-2, 2),
        size=st.integers(0, 15),
        ttl_s=st.sampled_from([None, 3.0, 50.0]),
    )
    def offer(self, flow: str, priority: int, size: int, ttl_s: float | None) -> None:
        self.offered += 1
        one = item(f"{self.offered}", flow=flow, priority=priority, size=size, ttl_s=ttl_s)
        offered = self.queue.offer(one, self.now, self.pool_is_empty)
        self.leaves(list(offered.displaced))
        assert all(victim.priority < min(priority, 0) or priority >= 0 for victim, _ in offered.displaced)
        assert all(victim.priority < 0 for victim, _ in offered.displaced)
        if offered.refusal is None:
            self.waiting.add(one)
        else:
            self.left.append(one)

    @rule(saturation=st.sampled_from([0.0, 0.5, 1.0]), looks=st.integers(0, 2))
    def pop(self, saturation: float, looks: int) -> None:
        self.queue.retry_parked(looks)
        one = self.queue.pop(self.now, saturation)
        in_order = self.waiting - self.parked
        if one is None:
            assert saturation >= 1.0 or not (self.waiting if looks else in_order)
            return
        self.waiting.remove(one)
        assert saturation < 1.0
        if one in self.parked:
            assert looks, "parked until it may be tried again"
            rivals = [other for other in self.parked if other.band is one.band and other is not one]
            self.parked.remove(one)
        else:
            rivals = [
                other for other in in_order if other.band is one.band and other.flow == one.flow and other is not one
            ]
        assert all((one.enqueued_at, one.seq) < (other.enqueued_at, other.seq) for other in rivals)
        rest = self.waiting if looks else in_order - {one}
        assert all(other.band.priority <= one.band.priority for other in rest)
        self.held.append(one)

    @precondition(lambda self: self.waiting)
    @rule(number=st.integers(0, 100))
    def take(self, number: int) -> None:
        one = sorted(self.waiting, key=lambda one: one.seq)[number % len(self.waiting)]
        self.queue.take(one, self.now)
        self.waiting.remove(one)
        self.parked.discard(one)
        self.held.append(one)

    @precondition(lambda self: self.held)
    @rule(how=st.sampled_from(["served", "put back", "park", "drop"]), which=st.randoms(use_true_random=False))
    def decide(self, how: str, which: object) -> None:
        one = self.held.pop(which.randrange(len(self.held)))  # type: ignore[attr-defined]
        if how == "served":
            self.queue.served(one)
            self.served.append(one)
        elif how == "put back":
            self.queue.put_back(one)
            self.waiting.add(one)
        elif how == "park":
            self.queue.park(one)
            self.waiting.add(one)
            self.parked.add(one)
        else:
            self.queue.drop(one)
            self.left.append(one)

    @precondition(lambda self: self.served)
    @rule(output_tokens=st.integers(0, 50), failed=st.booleans())
    def end(self, output_tokens: int, failed: bool) -> None:
        one = self.served.pop(0)
        if failed:
            self.queue.put_back(one)
            self.waiting.add(one)
        else:
            self.queue.ended(one, output_tokens)
            self.left.append(one)

    @rule(number=st.integers(1, 30))
    def cancel(self, number: int) -> None:
        cancelled = self.queue.cancel(f"{number}")
        assert (cancelled is not None) is (f"{number}" in ids(self.waiting))
        if cancelled is not None:
            self.waiting.remove(cancelled)
            self.parked.discard(cancelled)
            self.left.append(cancelled)

    @rule(later=st.integers(0, 5), pool_is_empty=st.booleans())
    def expire(self, later: int, pool_is_empty: bool) -> None:
        self.now += later
        self.pool_is_empty = pool_is_empty
        self.leaves(self.queue.expire(self.now, pool_is_empty))
        first = self.queue.next_expiry()
        assert first is None or first > self.now

    @rule()
    def drain(self) -> None:
        self.leaves(self.queue.drain())
        assert not self.waiting

    @invariant()
    def nothing_is_lost_and_nothing_is_there_twice(self) -> None:
        every_request = [*self.waiting, *self.held, *self.served, *self.left]
        assert len(every_request) == len(set(every_request)) == self.offered
        displayed = list(self.queue.waiting())
        assert len(displayed) == len(self.waiting)
        assert set(displayed) == self.waiting
        for stage, items in (
            (QueueStage.WAITING, self.waiting),
            (QueueStage.HELD, self.held),
            (QueueStage.SERVED, self.served),
            (QueueStage.LEFT, self.left),
        ):
            assert all(one.stage is stage for one in items)

    @invariant()
    def room_is_conserved(self) -> None:
        inside = [*self.waiting, *self.held]
        bands = bands_of(self.queue)
        assert len(self.queue) == len(inside) == sum(band.room.requests for band in bands)
        inside_bytes = sum(one.size_bytes for one in inside)
        assert size_bytes(self.queue) == inside_bytes == sum(band.room.size_bytes for band in bands)
        assert sum(len(flow) for band in bands for flow in band.flows.values()) == len(self.waiting - self.parked)
        assert sum(len(band.parked) for band in bands) == len(self.parked)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
