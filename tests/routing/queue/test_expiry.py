import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.routing.events import Outcome
from pointsman.routing.queue import FlowControl
from tests.routing.queue.waiting import ids, item, left, offer, size_bytes

TTL, NO_ENDPOINTS = Outcome.EVICTED_TTL, Outcome.EVICTED_NO_ENDPOINTS


@pytest.mark.parametrize(
    ("settings", "own_ttl_s", "pool_is_empty", "due", "outcome"),
    [
        ({}, None, False, 60.0, TTL),
        ({}, None, True, 60.0, NO_ENDPOINTS),  # the limit for an empty pool is the same unless given
        ({"default_request_ttl_s": 5.0}, None, False, 5.0, TTL),
        ({"default_request_ttl_s": 5.0}, None, True, 5.0, NO_ENDPOINTS),
        ({"no_endpoint_request_ttl_s": 2.0}, None, True, 2.0, NO_ENDPOINTS),
        ({"no_endpoint_request_ttl_s": 2.0}, None, False, 60.0, TTL),
        ({}, 3.0, False, 3.0, TTL),  # an earlier deadline of the client
        ({}, 90.0, False, 60.0, TTL),  # a later one changes nothing
        ({}, 3.0, True, 3.0, NO_ENDPOINTS),  # also while there is no instance
        ({"no_endpoint_request_ttl_s": 2.0}, 3.0, True, 2.0, NO_ENDPOINTS),
        ({"no_endpoint_request_ttl_s": 0.0}, 3.0, True, 3.0, NO_ENDPOINTS),
        ({"default_request_ttl_s": 0.0}, None, False, None, None),
        ({"default_request_ttl_s": -1.0}, None, True, None, None),
        ({"default_request_ttl_s": 0.0}, 3.0, False, 3.0, TTL),
        ({"no_endpoint_request_ttl_s": 0.0}, None, True, None, None),
        ({}, 0.0, False, 60.0, TTL),
    ],
)
def test_when_a_request_expires(
    settings: dict[str, float],
    own_ttl_s: float | None,
    pool_is_empty: bool,
    due: float | None,
    outcome: Outcome | None,
) -> None:
    queue = FlowControl(**settings)  # type: ignore[arg-type]
    offer(queue, item("r", ttl_s=own_ttl_s), now=100.0, pool_is_empty=pool_is_empty)
    if due is None:
        assert queue.next_expiry() is None
        assert queue.expire(1e12, pool_is_empty) == []
        return
    assert queue.next_expiry() == 100.0 + due
    assert queue.expire(100.0 + due - 1e-3, pool_is_empty) == []
    assert left(queue.expire(100.0 + due, pool_is_empty)) == [("r", outcome)]
    assert (len(queue), size_bytes(queue), queue.next_expiry()) == (0, 0, None)


def test_the_time_to_live_restarts_when_the_pool_empties_or_fills() -> None:
    queue = FlowControl(default_request_ttl_s=60.0, no_endpoint_request_ttl_s=5.0)
    offer(queue, item("old"), now=0.0)
    queue.pool_changed(is_empty=True, now=50.0)
    offer(queue, item("new"), now=52.0, pool_is_empty=True)
    assert queue.next_expiry() == 55.0
    queue.pool_changed(is_empty=False, now=54.0)
    assert queue.next_expiry() == 114.0
    assert queue.expire(113.0, pool_is_empty=False) == []
    assert left(queue.expire(114.0, pool_is_empty=False)) == [("old", TTL), ("new", TTL)]


def test_repeating_the_state_of_the_pool_is_no_change() -> None:
    queue = FlowControl()
    offer(queue, item("r"), now=0.0)
    for now in (10.0, 20.0, 59.0):
        queue.pool_changed(is_empty=False, now=now)
    assert queue.next_expiry() == 60.0


def test_only_requests_past_their_time_to_live_expire() -> None:
    queue = FlowControl()
    for number, ttl_s in enumerate([9.0, 3.0, 7.0, 1.0, 5.0]):
        offer(queue, item(f"{number}", ttl_s=ttl_s))
    assert left(queue.expire(5.0, pool_is_empty=False)) == [("3", TTL), ("1", TTL), ("4", TTL)]
    assert ids(queue.waiting()) == ["0", "2"]


def test_held_requests_do_not_expire_until_they_are_put_back() -> None:
    queue = FlowControl()
    offer(queue, item("r"))
    held = queue.pop(0.0, 0.0)
    assert held is not None
    assert queue.expire(100.0, pool_is_empty=False) == []
    queue.put_back(held)
    assert left(queue.expire(100.0, pool_is_empty=False)) == [("r", TTL)]


WORDS: list[tuple[float | None, bool, str]] = [
    (None, False, "waited 61 s without an instance having room; the limit is 60 s (flowControl.defaultRequestTTL)"),
    (9.0, False, "waited 61 s without an instance having room; its own deadline allowed 9 s"),
    (None, True, "waited 61 s and no instance is running; the limit is 60 s (flowControl.noEndpointRequestTTL)"),
]


@pytest.mark.parametrize(("ttl_s", "pool_is_empty", "why"), WORDS)
def test_the_refusal_of_an_expired_request_says_why(ttl_s: float | None, pool_is_empty: bool, why: str) -> None:
    queue = FlowControl()
    offer(queue, item("r", ttl_s=ttl_s), pool_is_empty=pool_is_empty)
    [(_, refusal)] = queue.expire(61.0, pool_is_empty)
    assert str(refusal.reason).startswith(why)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "empty", "filled", "expire"]),
        st.integers(0, 4),  # seconds until then
        st.sampled_from([None, 2.0, 7.0, 30.0]),
    ),
    max_size=40,
)


@given(EVENTS, st.sampled_from([-1.0, 3.0, 10.0]), st.sampled_from([-1.0, 2.0, 10.0]))
def test_expiry_matches_its_definition(
    events: list[tuple[str, int, float | None]], ttl_s: float, no_endpoint_ttl_s: float
) -> None:
    """The definition: max(enqueue, last change) + budget <= now."""
    queue = FlowControl(default_request_ttl_s=ttl_s, no_endpoint_request_ttl_s=no_endpoint_ttl_s)
    waiting: dict[str, tuple[float, float | None]] = {}
    now, changed_at, is_empty = 0.0, float("-inf"), False
    queue.pool_changed(is_empty, now)

    def due(enqueued_at: float, own: float | None) -> float:
        budgets = [no_endpoint_ttl_s if is_empty else ttl_s, own or -1.0]
        return max(enqueued_at, changed_at) + min((b for b in budgets if b > 0), default=float("inf"))

    for number, (event, later, own) in enumerate(events):
        now += later
        if event == "offer":
            offer(queue, item(f"{number}", ttl_s=own), now=now, pool_is_empty=is_empty)
            waiting[f"{number}"] = now, own
        elif event == "expire":
            expected = {name for name, one in waiting.items() if due(*one) <= now}
            assert {name for name, _ in left(queue.expire(now, is_empty))} == expected
            waiting = {name: one for name, one in waiting.items() if name not in expected}
        elif (event == "empty") is not is_empty:
            changed_at, is_empty = now, not is_empty
            queue.pool_changed(is_empty, now)
        first = min((due(*one) for one in waiting.values()), default=float("inf"))
        assert (queue.next_expiry() or float("inf")) == first
