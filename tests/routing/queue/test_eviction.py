import pytest

from pointsman.routing.events import Outcome
from pointsman.routing.queue import (
    Blocked,
    InFlightEviction,
    PriorityThenTimeEvictionOrderPolicy,
    Queued,
    SheddableEvictionFilter,
)
from pointsman.types import RequestMetadata
from tests.routing.queue.waiting import item, left

NORMAL = Blocked(priority=0, ceiling=1.0)


def started(eviction: InFlightEviction, *priorities: int) -> list[Queued]:
    """Requests in flight, called 0, 1, 2..."""
    items = [item(str(number), priority=priority) for number, priority in enumerate(priorities)]
    for one in items:
        eviction.started(one)
    return items


def stopped(
    eviction: InFlightEviction, now: float = 0.0, saturation: float = 1.0, blocked: Blocked = NORMAL
) -> list[str]:
    return [name for name, _ in left(eviction.victims(now, saturation, blocked))]


@pytest.mark.parametrize(
    ("in_flight", "blocked", "victims"),
    [
        ([0, 1, 2], NORMAL, []),  # none is sheddable
        ([-1, -1, 0], NORMAL, ["1"]),  # the newest
        ([-2, -1, -1], NORMAL, ["0"]),  # the lowest
        ([-1, -2, -2, -1], NORMAL, ["2"]),
        ([-1, -2], Blocked(-1, 1.0), ["1"]),  # for a negative band, only those below it
        ([-1, -1], Blocked(-1, 1.0), []),
        ([-1], Blocked(0, 0.0), []),  # a band that is closed altogether
        ([], NORMAL, []),
    ],
)
def test_which_requests_are_stopped(in_flight: list[int], blocked: Blocked, victims: list[str]) -> None:
    eviction = InFlightEviction()
    started(eviction, *in_flight)
    assert stopped(eviction, blocked=blocked) == victims


def test_nothing_is_stopped_while_no_band_is_blocked() -> None:
    eviction = InFlightEviction()
    started(eviction, -1, -1)
    assert eviction.victims(0.0, 2.0, None) == []


@pytest.mark.parametrize(
    ("saturation", "ceiling", "count"),
    [
        (1.0, 1.0, 1),  # at least one
        (1.1, 1.0, 1),  # 0.1 / 0.11
        (1.2, 1.0, 2),  # 0.2 / 0.12 = 1.7
        (5.0, 1.0, 2),  # at most two
        (0.5, 0.45, 1),
        (0.5, 0.4, 2),
    ],
)
def test_how_many_requests_are_stopped(saturation: float, ceiling: float, count: int) -> None:
    eviction = InFlightEviction()
    started(eviction, *[-1] * 10)
    assert len(stopped(eviction, saturation=saturation, blocked=Blocked(0, ceiling))) == count


def test_eviction_waits_until_all_have_ended_and_then_cools_down() -> None:
    eviction = InFlightEviction()
    items = started(eviction, *[-1] * 4)
    assert stopped(eviction, now=0.0, saturation=2.0) == ["3", "2"]
    assert stopped(eviction, now=1.0, saturation=2.0) == []
    eviction.ended(items[3], now=1.0)
    assert stopped(eviction, now=2.0, saturation=2.0) == []  # one is still to be confirmed
    eviction.ended(items[2], now=3.0)
    assert stopped(eviction, now=3.4, saturation=2.0) == []
    assert stopped(eviction, now=3.5, saturation=2.0) == ["1"]


def test_late_requests_are_not_waited_for_but_count_as_room_to_come() -> None:
    eviction = InFlightEviction()
    started(eviction, *[-1] * 10)
    assert stopped(eviction, now=0.0, saturation=1.3) == ["9", "8"]
    assert stopped(eviction, now=9.9, saturation=1.3) == []
    # 0.3 above the ceiling, 0.13 each: three would do, and two are on their way
    assert stopped(eviction, now=10.0, saturation=1.3) == ["7"]


def test_requests_that_have_ended_are_not_stopped() -> None:
    eviction = InFlightEviction()
    items = started(eviction, -1, -1)
    eviction.ended(items[1], now=0.0)
    assert stopped(eviction) == ["0"]


def test_the_refusal_of_a_stopped_request_says_why() -> None:
    eviction = InFlightEviction()
    started(eviction, -2)
    [(_, refusal)] = eviction.victims(0.0, 1.0, Blocked(1, 1.0))
    assert (refusal.outcome, refusal.status, refusal.drop_reason) == (Outcome.EVICTED_IN_FLIGHT, 429, "evicted")
    assert str(refusal.reason).startswith("stopped while running: work of priority 1 could not start")


class OnlyLong:
    """An eviction filter and order of a user's own: prompts of at least 10 tokens, the oldest first."""

    def evictable(self, item: Queued) -> bool:
        return item.request.input_tokens >= 10

    def eviction_key(self, item: Queued, number: int) -> int:
        return number


def test_a_users_own_filter_and_order() -> None:
    mine = OnlyLong()
    eviction = InFlightEviction(mine, mine)
    for number, tokens in enumerate((5, 20, 30)):
        eviction.started(Queued(RequestMetadata(str(number), prompt_tokens=tokens)))
    assert stopped(eviction, saturation=5.0, blocked=Blocked(1, 1.0)) == ["1", "2"]


def test_the_published_filter_and_order_are_the_default() -> None:
    eviction = InFlightEviction(SheddableEvictionFilter(), PriorityThenTimeEvictionOrderPolicy())
    started(eviction, -1, -2, -2, 0)
    assert stopped(eviction, saturation=5.0) == ["2", "1"]
