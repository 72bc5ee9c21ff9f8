import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.routing.queue import (
    BandSettings,
    EdfOrderingPolicy,
    FairnessPolicy,
    FlowControl,
    GlobalStrictFairnessPolicy,
    RoundRobinFairnessPolicy,
    VirtualTokenCounterFairnessPolicy,
)
from tests.routing.queue.waiting import ids, item, offer, served


def queue_with(fairness: FairnessPolicy, arrivals: str = "") -> FlowControl:
    """A queue in which requests wait, named by their flow and their number in it: `aab` is a1, a2, b1."""
    queue = FlowControl([BandSettings(fairness=fairness)])
    arrive(queue, arrivals)
    return queue


def arrive(queue: FlowControl, arrivals: str) -> None:
    seen = {flow: sum(name.startswith(flow) for name in ids(queue.waiting())) for flow in arrivals}
    for flow in arrivals:
        seen[flow] += 1
        assert offer(queue, item(f"{flow}{seen[flow]}", flow=flow)) == [None]


def test_global_strict_ignores_flows() -> None:
    assert served(queue_with(GlobalStrictFairnessPolicy(), "aabba")) == ["a1", "a2", "b1", "b2", "a3"]


def test_global_strict_compares_heads_by_the_ordering() -> None:
    queue = FlowControl([BandSettings(ordering=EdfOrderingPolicy())])
    for request_id, flow, ttl_s in (("b1", "b", 9.0), ("a1", "a", 5.0), ("a2", "a", 1.0), ("b2", "b", 3.0)):
        offer(queue, item(request_id, flow=flow, ttl_s=ttl_s))
    assert served(queue) == ["a2", "b2", "a1", "b1"]


@pytest.mark.parametrize(
    ("arrivals", "order"),
    [
        ("ccbaab", ["a1", "b1", "c1", "a2", "b2", "c2"]),
        ("aaab", ["a1", "b1", "a2", "a3"]),
        ("b", ["b1"]),
    ],
)
def test_round_robin_visits_flows_by_sorted_id(arrivals: str, order: list[str]) -> None:
    queue = queue_with(RoundRobinFairnessPolicy(), arrivals)
    assert ids(queue.waiting()) == order
    assert served(queue) == order


def test_round_robin_continues_after_the_last_chosen_flow_even_if_it_is_empty() -> None:
    queue = queue_with(RoundRobinFairnessPolicy(), "mz")
    assert served(queue, 1) == ["m1"]
    arrive(queue, "an")
    assert served(queue) == ["n1", "z1", "a1"]


def test_round_robin_gives_no_second_turn_to_a_flow_that_was_empty_in_between() -> None:
    queue = queue_with(RoundRobinFairnessPolicy(), "ab")
    assert served(queue, 1) == ["a1"]
    offer(queue, item("a2", flow="a"))
    assert served(queue) == ["b1", "a2"]


def test_round_robin_inserts_a_new_flow_by_its_id() -> None:
    queue = queue_with(RoundRobinFairnessPolicy(), "bbdd")
    assert served(queue, 1) == ["b1"]
    arrive(queue, "ac")
    assert served(queue) == ["c1", "d1", "a1", "b2", "d2"]


def take(queue: FlowControl, request_id: str) -> None:
    [one] = [one for one in queue.waiting() if one.request.request_id == request_id]
    queue.take(one, now=0.0)
    queue.served(one)


def test_round_robin_continues_where_it_was_when_a_request_is_taken_out_of_turn() -> None:
    queue = queue_with(RoundRobinFairnessPolicy(), "aabbcc")
    assert served(queue, 1) == ["a1"]
    take(queue, "c2")
    take(queue, "a2")
    assert served(queue) == ["b1", "c1", "b2"]


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 5), min_size=1), st.integers(0, 20))
def test_round_robin_serves_each_waiting_flow_within_as_many_turns_as_there_are_flows(
    depth: dict[str, int], before: int
) -> None:
    queue = queue_with(RoundRobinFairnessPolicy(), "".join(flow * n for flow, n in depth.items()))
    served(queue, before)
    waiting = {name[0] for name in ids(queue.waiting())}
    assert {name[0] for name in served(queue, len(waiting))} == waiting


@pytest.mark.parametrize(
    "fairness",
    [GlobalStrictFairnessPolicy(), RoundRobinFairnessPolicy(), VirtualTokenCounterFairnessPolicy()],
    ids=lambda policy: type(policy).__name__,
)
@given(
    st.text("abcd", max_size=12), st.lists(st.sampled_from(["served", "put back", "drop", "a", "b", "z"]), max_size=20)
)
def test_the_displayed_order_is_the_served_order(fairness: FairnessPolicy, arrivals: str, steps: list[str]) -> None:
    queue = queue_with(fairness, arrivals)
    for number, step in enumerate(steps):
        if len(step) == 1:
            offer(queue, item(f"{step}-{number}", flow=step))
        elif (one := queue.pop(0.0, 0.0)) is not None:
            {"served": queue.served, "put back": queue.put_back, "drop": queue.drop}[step](one)
    displayed = ids(queue.waiting())
    assert ids(queue.waiting()) == displayed  # displaying has no side effects
    assert served(queue) == displayed


def test_bands_do_not_share_their_turns() -> None:
    fairness = RoundRobinFairnessPolicy()
    queue = FlowControl([BandSettings(priority=p, fairness=fairness) for p in (1, 0)])
    for priority in (1, 0):
        for flow in "ab":
            offer(queue, item(f"{flow}{priority}", flow=flow, priority=priority))
    assert served(queue) == ["a1", "b1", "a0", "b0"]
