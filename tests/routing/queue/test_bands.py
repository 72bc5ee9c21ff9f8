"""Parked requests hold up no others, keep their order, and are all tried again."""

from pointsman.routing.queue import BandSettings, FlowControl, Queued, StaticUsageLimitPolicy
from tests.routing.queue.waiting import bands_of, item


def queue_of(number: int, **settings: object) -> FlowControl:
    queue = FlowControl([BandSettings(max_requests=None)], **settings)  # type: ignore[arg-type]
    for n in range(number):
        queue.offer(item(f"{n}"), float(n), False)
    return queue


def pop(queue: FlowControl, saturation: float = 0.0) -> Queued | None:
    return queue.pop(100.0, saturation)


def set_all_aside(queue: FlowControl) -> None:
    while (one := pop(queue)) is not None:
        queue.park(one)


def looked_at(queue: FlowControl, looks: int) -> list[str]:
    """The requests that are tried again in one round, if none can be placed."""
    queue.retry_parked(looks)
    seen = []
    while (one := pop(queue)) is not None:
        seen.append(one.request.request_id)
        queue.park(one)
    return seen


def test_the_first_parked_request_is_tried_each_time_and_the_others_in_turn() -> None:
    queue = queue_of(6)
    set_all_aside(queue)
    rounds = [looked_at(queue, 3) for _ in range(4)]
    assert [seen[0] for seen in rounds] == ["0"] * 4
    assert {name for seen in rounds for name in seen} == {"0", "1", "2", "3", "4", "5"}


def test_no_parked_request_is_tried_twice_in_a_round() -> None:
    queue = queue_of(2)
    set_all_aside(queue)
    assert sorted(looked_at(queue, 3)) == ["0", "1"]


def test_requests_in_order_pass_parked_ones_which_still_count() -> None:
    queue = queue_of(3)
    set_all_aside(queue)
    queue.offer(item("late"), 50.0, False)
    one = pop(queue)
    assert one is not None
    assert one.request.request_id == "late"
    assert len(queue) == 4
    assert len(bands_of(queue)[0].parked) == 3
    assert [waiting.request.request_id for waiting in queue.waiting()] == ["0", "1", "2"]


def test_parked_requests_can_be_cancelled_taken_expired_and_drained() -> None:
    queue = queue_of(4, default_request_ttl_s=60.0)
    set_all_aside(queue)
    first, second, *_ = queue.waiting()
    assert queue.cancel(first.request.request_id) is first
    queue.take(second, 5.0)
    queue.served(second)
    assert [one.request.request_id for one, _ in queue.expire(62.5, False)] == ["2"]
    assert [one.request.request_id for one, _ in queue.drain()] == ["3"]
    assert len(queue) == 0


def test_ceilings_apply_to_parked_requests_too() -> None:
    queue = queue_of(1, limits=StaticUsageLimitPolicy(0.5))
    set_all_aside(queue)
    queue.retry_parked(3)
    assert pop(queue, saturation=0.5) is None
    assert queue.blocked is not None
    assert pop(queue, saturation=0.4) is not None
