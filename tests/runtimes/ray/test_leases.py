"""Both sides of a lease on virtual time: a plane never takes a node for gone that may still run something."""

import heapq
from collections.abc import Callable
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from pointsman.runtimes.machine.supervisor import LATE_S, EngineLease
from pointsman.runtimes.ray.leases import MARGIN_S, NodeLease

LEASE_S, STOP_S = 3.0, 1.0
Delay = st.one_of(st.floats(0.0, 0.5), st.floats(0.0, 30.0), st.none())
"""Of a message; None: it is lost."""


def test_nothing_is_granted_before_a_stamp_was_heard() -> None:
    lease = NodeLease(LEASE_S, STOP_S)
    assert lease.echo() is None
    assert lease.until_over(0.0) == 0.0
    lease.heard(500.0, 10.0)
    assert lease.until_over(10.0) == 0.0, "a stamp grants nothing until it is echoed"
    assert lease.echo() == 500.0
    assert lease.until_over(10.0) == LEASE_S + STOP_S + MARGIN_S
    lease.forget()
    assert lease.echo() is None
    assert lease.until_over(10.0) > 0.0, "what was granted stays granted"


@given(
    polls=st.lists(st.tuples(st.floats(0.01, 2.0), Delay, st.floats(0.0, 0.3), Delay), max_size=30),
    offset=st.floats(-1e4, 1e6),
)
def test_a_node_that_is_taken_for_gone_has_ended_everything(
    polls: list[tuple[float, float | None, float, float | None]], offset: float
) -> None:
    """Each poll: pause before it, delay of its delivery, time until its answer, delay of the answer."""
    plane, node = NodeLease(LEASE_S, STOP_S), EngineLease(offset)
    due: list[tuple[float, int, Callable[[float], None]]] = []
    order = count()

    def later(at: float, call: Callable[[float], None]) -> None:
        heapq.heappush(due, (at, next(order), call))

    def send(delivery: float | None, wait: float, answer: float | None) -> Callable[[float], None]:
        def sent(now: float) -> None:
            stamp = plane.echo()
            if delivery is not None:
                later(now + delivery, lambda at: arrived(at, stamp))

        def arrived(now: float, stamp: float | None) -> None:
            if stamp is not None:
                node.renew(stamp, LEASE_S, now + offset)
            if answer is not None:
                later(now + wait, lambda at: later(at + answer, lambda then: plane.heard(at + offset, then)))

        return sent

    now = 0.0
    for pause, delivery, wait, answer in polls:
        now += pause
        later(now, send(delivery, wait, answer))
    while due:
        now, _, call = heapq.heappop(due)
        call(now)
        ends = node.ends - offset + STOP_S + LATE_S if node.is_granted else now  # then the kernel has ended it
        assert plane.over_at >= ends or not node.is_granted, (plane.over_at, ends)
