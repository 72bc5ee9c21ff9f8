from typing import Any

import pytest

from pointsman.errors import ConfigError, PointsmanError
from pointsman.routing.events import Outcome
from pointsman.routing.queue import (
    BandSettings,
    Blocked,
    FlowControl,
    PriorityHoldbackPolicy,
    QueueStage,
    RoundRobinFairnessPolicy,
    SoftReflectiveCeilingPolicy,
)
from pointsman.routing.queue.bands import MAX_DYNAMIC_BANDS
from tests.routing.queue.waiting import bands_of, ids, item, left, offer, served, size_bytes

FULL, NOBODY = Outcome.REJECTED_CAPACITY, Outcome.REJECTED_NO_ENDPOINTS


def bands(*priorities: int, **settings: Any) -> list[BandSettings]:
    return [BandSettings(priority=priority, **settings) for priority in priorities]


# Which band


def test_higher_bands_go_first() -> None:
    queue = FlowControl(bands(-1, 2, 0))
    offer(queue, item("a", priority=-1), item("b", priority=0), item("c", priority=2), item("d", priority=2))
    assert ids(queue.waiting()) == ["c", "d", "b", "a"]
    assert served(queue) == ["c", "d", "b", "a"]


@pytest.mark.parametrize(
    ("default", "default_negative", "bands_of_5_and_minus_5"),
    [
        (None, None, (0, 0)),  # band 0 takes unprovisioned priorities
        (BandSettings(), None, (5, -5)),
        (None, BandSettings(), (0, -5)),
        (BandSettings(), BandSettings(), (5, -5)),
    ],
)
def test_priorities_without_a_band_of_their_own(
    default: BandSettings | None, default_negative: BandSettings | None, bands_of_5_and_minus_5: tuple[int, int]
) -> None:
    queue = FlowControl(bands(1), default_band=default, default_negative_band=default_negative)
    found = item("a", priority=5), item("b", priority=-5)
    offer(queue, *found)
    assert tuple(one.band.priority for one in found) == bands_of_5_and_minus_5
    assert {0, 1} <= {band.priority for band in bands_of(queue)}


def test_a_band_made_on_demand_has_the_settings_of_its_default() -> None:
    queue = FlowControl(default_band=BandSettings(max_requests=1), default_negative_band=BandSettings(max_requests=2))
    first = [item(f"{priority} {n}", priority=priority) for priority in (7, -7) for n in range(3)]
    refusals = offer(queue, *first)
    assert [refusal is None for refusal in refusals] == [True, False, False, True, True, False]
    assert refusals[1] is not None
    assert "flowControl.defaultPriorityBand.maxRequests" in str(refusals[1].reason)
    assert refusals[5] is not None
    assert "flowControl.defaultNegativePriorityBand.maxRequests" in str(refusals[5].reason)


def test_bands_made_on_demand_stay_bounded() -> None:
    queue = FlowControl(default_band=BandSettings())
    for priority in range(1, 3 * MAX_DYNAMIC_BANDS):
        offer(queue, item(f"{priority}", priority=priority))
        served(queue)
    assert len(bands_of(queue)) <= MAX_DYNAMIC_BANDS + 1
    waiting = [item(f"w{priority}", priority=priority) for priority in range(1, 3 * MAX_DYNAMIC_BANDS)]
    assert offer(queue, *waiting) == [None] * len(waiting)
    assert len(bands_of(queue)) <= MAX_DYNAMIC_BANDS + 1
    assert len(served(queue)) == len(waiting)


def test_a_band_made_on_demand_stays_while_its_requests_are_in_flight() -> None:
    queue = FlowControl(default_band=BandSettings())

    def come_and_go(*priorities: int) -> None:
        for priority in priorities:
            one = item(f"{priority}", priority=priority)
            offer(queue, one)
            assert served(queue) == [f"{priority}"]
            queue.ended(one, 0)

    failing = item("failing", priority=1000)
    offer(queue, failing)
    served(queue)
    come_and_go(*range(1, 2 * MAX_DYNAMIC_BANDS))
    queue.put_back(failing)
    assert served(queue) == ["failing"]
    queue.ended(failing, 0)
    come_and_go(*range(1, 2 * MAX_DYNAMIC_BANDS))
    assert 1000 not in {band.priority for band in bands_of(queue)}


def test_a_single_band_takes_all_priorities() -> None:
    queue = FlowControl(bands(0, 5), default_band=BandSettings(), single_band=True)
    offer(queue, item("a", priority=-1), item("b", priority=5), item("c"))
    assert served(queue) == ["a", "b", "c"]
    assert [band.priority for band in bands_of(queue)] == [0]


def test_two_bands_of_one_priority_are_an_error() -> None:
    with pytest.raises(ConfigError, match="two bands have the same priority"):
        FlowControl(bands(1, 1))


# Ceilings


@pytest.mark.parametrize(("saturation", "goes"), [(0.0, True), (0.999, True), (1.0, False), (7.0, False)])
def test_a_band_is_blocked_at_its_ceiling(saturation: float, goes: bool) -> None:
    queue = FlowControl()
    offer(queue, item("r"))
    assert served(queue, saturation=saturation) == (["r"] if goes else [])
    assert queue.blocked == (None if goes else Blocked(0, 1.0))


def test_an_empty_band_never_blocks_those_below() -> None:
    class OnlyTheLowest:
        def ceilings(self, saturation: float, priorities: object) -> list[float]:
            return [0.0, 0.0, 1.0]

    queue = FlowControl(bands(2, 1), limits=OnlyTheLowest())
    offer(queue, item("low"))
    assert served(queue, saturation=0.5) == ["low"]


def test_a_blocked_band_with_requests_holds_up_those_below() -> None:
    class OnlyTheLowest:
        def ceilings(self, saturation: float, priorities: object) -> list[float]:
            return [0.3, 1.0]

    queue = FlowControl(bands(1), limits=OnlyTheLowest())
    offer(queue, item("low"), item("high", priority=1))
    assert served(queue, saturation=0.5) == []
    assert queue.blocked == Blocked(1, 0.3)
    assert served(queue, saturation=0.2) == ["high", "low"]


def test_holdback_keeps_room_for_higher_bands() -> None:
    queue = FlowControl(bands(1, -1), limits=PriorityHoldbackPolicy(min_ceiling=0.5))
    offer(queue, item("low", priority=-1), item("mid"), item("high", priority=1))
    assert served(queue, saturation=0.9) == ["high"]
    assert served(queue, saturation=0.7) == ["mid"]
    assert served(queue, saturation=0.4) == ["low"]


def test_the_limit_policy_is_called_once_per_dispatch() -> None:
    queue = FlowControl(bands(1), limits=SoftReflectiveCeilingPolicy())
    offer(queue, *(item(f"{n}") for n in range(3)))
    assert [len(served(queue, 1, saturation=0.75)) for _ in range(6)] == [0, 0, 1, 0, 0, 1]


# Bounds


@pytest.mark.parametrize(
    ("max_requests", "max_bytes", "sizes", "accepted"),
    [
        (2, None, [1, 1, 1], [True, True, False]),
        (None, 10, [4, 6, 1], [True, True, False]),
        (None, 10, [4, 7, 6], [True, False, True]),
        (None, 10, [11], [False]),
        (None, None, [10**6] * 3, [True] * 3),
    ],
)
@pytest.mark.parametrize("whose", ["band", "all"])
def test_bounds(
    whose: str, max_requests: int | None, max_bytes: int | None, sizes: list[int], accepted: list[bool]
) -> None:
    bound: dict[str, Any] = {"max_requests": max_requests, "max_bytes": max_bytes}
    free = BandSettings(max_requests=None, max_bytes=None)
    queue = FlowControl([BandSettings(**bound)]) if whose == "band" else FlowControl([free], **bound)
    found = offer(queue, *(item(f"{n}", size=size) for n, size in enumerate(sizes)))
    assert [refusal is None for refusal in found] == accepted
    assert {refusal.outcome for refusal in found if refusal is not None} <= {FULL}
    assert len(queue) == sum(accepted)
    assert size_bytes(queue) == sum(size for size, fits in zip(sizes, accepted, strict=True) if fits)


def test_the_bounds_of_a_band_by_default() -> None:
    band = BandSettings()
    assert (band.max_requests, band.max_bytes) == (5000, 1_000_000_000)


@pytest.mark.parametrize("bound", [{"max_requests": 0}, {"max_bytes": -1}])
def test_bounds_that_would_refuse_every_request_are_errors(bound: dict[str, Any]) -> None:
    for made in (BandSettings, FlowControl):
        with pytest.raises(ConfigError, match="must be at least 1"):
            made(**bound)


def test_the_refusal_of_a_full_queue_names_the_bound_and_its_setting() -> None:
    queue = FlowControl(bands(0, max_requests=5000, max_bytes=6000))
    offer(queue, *(item(f"{n}") for n in range(5000)))
    [refusal] = offer(queue, item("one more"))
    assert refusal is not None
    assert str(refusal.reason) == (
        "the queue is full: 5,000 of 5,000 requests waiting at priority 0 (flowControl.priorityBands[].maxRequests)"
    )
    served(queue, 1)
    [refusal] = offer(queue, item("a big one", size=1002))
    assert refusal is not None
    assert str(refusal.reason) == (
        "the queue is full: 4,999 of 6,000 bytes waiting at priority 0, and this request has 1,002 "
        "(flowControl.priorityBands[].maxBytes)"
    )


def test_a_full_queue_without_instances() -> None:
    queue = FlowControl(max_requests=1)
    offer(queue, item("a"), pool_is_empty=True)
    [refusal] = offer(queue, item("b"), pool_is_empty=True)
    assert refusal is not None
    assert (refusal.outcome, refusal.status) == (NOBODY, 503)
    assert str(refusal.reason).startswith(
        "no instance is running, and the queue is full: 1 of 1 requests waiting in all"
    )


def test_a_waiting_id_is_refused_and_the_first_request_stays() -> None:
    queue = FlowControl()
    offer(queue, item("r", flow="first"))
    [refusal] = offer(queue, item("r", flow="second"))
    assert refusal is not None
    assert refusal.outcome is Outcome.REJECTED_OTHER
    assert [one.flow for one in queue.waiting()] == ["first"]


# Shedding


def sheddable_queue(**settings: int) -> FlowControl:
    """Full, with two requests of each of -2, -1 and 0."""
    queue = FlowControl(bands(-1, -2, 1), **{"max_requests": 6, "max_bytes": 60, **settings})  # type: ignore[arg-type]
    for number, priority in enumerate([-2, -2, -1, -1, 0, 0]):
        assert offer(queue, item(f"{priority}/{number}", priority=priority, size=10)) == [None]
    return queue


@pytest.mark.parametrize(
    ("priority", "size", "displaced"),
    [
        (1, 10, ["-2/1"]),
        (0, 10, ["-2/1"]),
        (0, 1, ["-2/1"]),
        (-1, 10, ["-2/1"]),
        (0, 11, ["-2/1", "-2/0"]),
        (0, 25, ["-2/1", "-2/0", "-1/3"]),
        (1, 40, ["-2/1", "-2/0", "-1/3", "-1/2"]),
        (1, 41, None),  # not even all of them would make room: none is displaced
        (-1, 21, None),
        (-2, 10, None),  # none is lower
    ],
)
def test_sheddable_requests_make_room(priority: int, size: int, displaced: list[str] | None) -> None:
    queue = sheddable_queue()
    before = ids(queue.waiting())
    offered = queue.offer(item("new", priority=priority, size=size), 0.0, pool_is_empty=False)
    if displaced is None:
        assert offered.refusal is not None
        assert (offered.refusal.outcome, offered.displaced) == (FULL, ())
        assert ids(queue.waiting()) == before
    else:
        assert offered.refusal is None
        assert left(offered.displaced) == [(name, FULL) for name in displaced]
        assert sorted(ids(queue.waiting())) == sorted({*before, "new"} - set(displaced))


def test_the_refusal_of_a_displaced_request_says_why() -> None:
    offered = sheddable_queue().offer(item("new", priority=1, size=10), 0.0, pool_is_empty=False)
    [(_, refusal)] = offered.displaced
    assert str(refusal.reason) == (
        "displaced by higher-priority work: a request of priority 1 needed the room of this one of priority -2 in a "
        "full queue: 6 of 6 requests waiting in all (flowControl.maxRequests); send it again later"
    )


def test_a_full_band_displaces_nothing() -> None:
    queue = FlowControl(bands(0, max_requests=1) + bands(-1))
    offer(queue, item("low", priority=-1), item("a"))
    offered = queue.offer(item("b"), 0.0, pool_is_empty=False)
    assert offered.refusal is not None
    assert offered.displaced == ()


def test_in_a_single_band_its_bound_is_the_bound_of_all() -> None:
    queue = FlowControl(bands(0, max_requests=2), single_band=True)
    offer(queue, item("low", priority=-1), item("a"))
    offered = queue.offer(item("b"), 0.0, pool_is_empty=False)
    assert left(offered.displaced) == [("low", FULL)]
    assert served(queue) == ["a", "b"]


def test_held_requests_are_not_displaced() -> None:
    queue = FlowControl(bands(-1), max_requests=1)
    offer(queue, item("low", priority=-1))
    held = queue.pop(0.0, 0.0)
    assert held is not None
    assert queue.offer(item("high"), 0.0, pool_is_empty=False).refusal is not None
    queue.put_back(held)
    assert left(queue.offer(item("high"), 0.0, pool_is_empty=False).displaced) == [("low", FULL)]


# The lifecycle of a request


def test_a_request_that_could_not_be_placed_keeps_its_position() -> None:
    queue = FlowControl()
    offer(queue, *map(item, "abc"))
    a, b = queue.pop(1.0, 0.0), queue.pop(2.0, 0.0)
    assert a is not None
    assert b is not None
    assert (a.taken_at, b.taken_at, len(queue)) == (1.0, 2.0, 3)  # held, and still taking up room
    queue.put_back(b)
    queue.put_back(a)
    assert served(queue) == ["a", "b", "c"]


def test_a_failed_request_returns_to_its_position_even_in_a_full_queue() -> None:
    queue = FlowControl(max_requests=2, bands=[BandSettings(fairness=RoundRobinFairnessPolicy())])
    offer(queue, item("a"), item("b"))
    failed = queue.pop(0.0, 0.0)
    assert failed is not None
    queue.served(failed)
    assert offer(queue, item("c")) == [None]
    queue.put_back(failed)
    assert len(queue) == 3
    assert served(queue) == ["a", "b", "c"]


def test_taking_a_request_out_of_turn() -> None:
    queue = FlowControl(bands(1))
    offer(queue, item("a"), item("b"), item("high", priority=1))
    [_, a, b] = queue.waiting()
    queue.take(b, now=3.0)
    assert (b.stage, b.taken_at, len(queue)) == (QueueStage.HELD, 3.0, 3)
    with pytest.raises(PointsmanError, match='request "b" should be waiting, but is taken out'):
        queue.take(b, now=3.0)
    queue.served(b)
    queue.take(a, now=3.0)
    queue.put_back(a)
    assert served(queue) == ["high", "a"]


def test_dropping_a_held_request() -> None:
    queue = FlowControl()
    offer(queue, item("a", size=7))
    held = queue.pop(0.0, 0.0)
    assert held is not None
    queue.drop(held)
    assert (len(queue), size_bytes(queue), held.stage) == (0, 0, QueueStage.LEFT)


def test_cancelling() -> None:
    queue = FlowControl()
    offer(queue, *map(item, "abc"))
    cancelled = queue.cancel("b")
    assert cancelled is not None
    assert ids([cancelled]) == ["b"]
    assert queue.cancel("b") is None
    assert queue.cancel("unknown") is None
    held = queue.pop(0.0, 0.0)
    assert held is not None
    assert queue.cancel("a") is None  # it belongs to the caller that popped it
    assert served(queue) == ["c"]


def test_draining() -> None:
    queue = FlowControl(bands(1))
    offer(queue, item("a"), item("b", priority=1))
    gone = queue.drain()
    assert left(gone) == [("b", Outcome.EVICTED_SHUTTING_DOWN), ("a", Outcome.EVICTED_SHUTTING_DOWN)]
    assert {refusal.status for _, refusal in gone} == {503}
    assert (len(queue), queue.drain(), queue.next_expiry()) == (0, [], None)


def test_steps_out_of_turn_are_errors() -> None:
    queue = FlowControl()
    one = item("r")
    with pytest.raises(PointsmanError, match=r'request "r" should be taken out.*, but is not offered yet'):
        queue.served(one)
    offer(queue, one)
    for step in (queue.served, queue.put_back, queue.drop):
        with pytest.raises(PointsmanError, match="but is waiting"):
            step(one)
    with pytest.raises(PointsmanError, match="but is waiting"):
        queue.offer(one, 0.0, pool_is_empty=False)
    with pytest.raises(PointsmanError, match="should be dispatched, but is waiting"):
        queue.ended(one, 5)
    assert served(queue) == ["r"]
    queue.ended(one, 5)
    with pytest.raises(PointsmanError, match="but is gone"):
        queue.ended(one, 5)
