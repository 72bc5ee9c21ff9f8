from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.routing.queue import BandSettings, FlowControl, Queued, VirtualTokenCounterFairnessPolicy
from pointsman.routing.queue.token_fairness import MAX_IDLE_FLOWS
from tests.routing.queue.waiting import bands_of, item, offer, served

EVEN = VirtualTokenCounterFairnessPolicy(input_weight=1.0, output_weight=1.0, default_output_tokens=10)


def queue_with(policy: VirtualTokenCounterFairnessPolicy = EVEN) -> FlowControl:
    return FlowControl([BandSettings(fairness=policy, max_requests=None)])


def fill(queue: FlowControl, flow: str, *input_tokens: int, first: int = 0) -> None:
    for number, tokens in enumerate(input_tokens, start=first):
        assert offer(queue, item(f"{flow}{number}", flow=flow, prompt_tokens=tokens)) == [None]


@pytest.mark.parametrize(
    ("policy", "request_", "charge"),
    [
        (VirtualTokenCounterFairnessPolicy(), {"prompt_tokens": 100}, 100 + 2 * 256),
        (VirtualTokenCounterFairnessPolicy(), {"prompt_tokens": 100, "max_tokens": 10}, 100 + 2 * 10),
        (VirtualTokenCounterFairnessPolicy(), {"prompt_tokens": 100, "max_tokens": 4096}, 100 + 2 * 256),
        (VirtualTokenCounterFairnessPolicy(), {"prompt": "x" * 40, "max_tokens": 0}, 10),
        (VirtualTokenCounterFairnessPolicy(3.0, 0.5, 8), {"prompt_tokens": 2}, 10),
    ],
)
def test_the_charge(policy: VirtualTokenCounterFairnessPolicy, request_: dict[str, Any], charge: float) -> None:
    assert policy.charge(item(**request_)) == charge


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"input_weight": -1.0}, "inputWeight is -1"),
        ({"output_weight": -0.5}, "outputWeight is -0.5"),
        ({"default_output_tokens": 0}, "defaultOutputTokens is 0"),
    ],
)
def test_bad_parameters(parameters: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        VirtualTokenCounterFairnessPolicy(**parameters)


def test_the_flow_with_the_fewest_tokens_goes_next() -> None:
    queue = queue_with()
    fill(queue, "long", 90, 90)
    fill(queue, "short", 10, 10, 10, 10, 10, 10)
    # long is charged 100 for each, short 20
    assert served(queue) == ["long0", "short0", "short1", "short2", "short3", "short4", "long1", "short5"]


def test_idle_flows_save_up_no_turns() -> None:
    queue = queue_with()
    fill(queue, "a", *[0] * 10)
    assert served(queue, 5) == ["a0", "a1", "a2", "a3", "a4"]
    fill(queue, "b", *[0] * 5)
    # b starts where a is, not five requests behind; of equal counters, the earlier head
    assert served(queue, 6) == ["a5", "b0", "a6", "b1", "a7", "b2"]


def test_the_charge_is_corrected_when_the_output_is_known() -> None:
    queue = queue_with()
    fill(queue, "a", 0, 0, 0, 0, 0)
    fill(queue, "b", 0, 0, 0, 0, 0)
    first, second = queue.pop(0.0, 0.0), queue.pop(0.0, 0.0)
    assert first is not None
    assert second is not None
    for one in (first, second):
        queue.served(one)
    queue.ended(first, 30)  # a: 10 expected, 30 used
    queue.ended(second, 5)  # b: 10 expected, 5 used
    assert served(queue) == ["b1", "b2", "b3", "a1", "b4", "a2", "a3", "a4"]


def test_a_request_that_is_put_back_is_not_charged() -> None:
    queue = queue_with()
    fill(queue, "a", 50, 0)
    fill(queue, "b", 0, 0)
    one = queue.pop(0.0, 0.0)
    assert one is not None
    queue.put_back(one)
    assert served(queue) == ["a0", "b0", "b1", "a1"]


def test_a_request_taken_out_of_turn_is_charged_too() -> None:
    queue = queue_with()
    fill(queue, "a", 0, 0, 0)
    fill(queue, "b", 0, 0, 0)
    for one in list(queue.waiting()):
        if one.request.request_id in ("a1", "a2"):
            queue.take(one, now=0.0)
            queue.served(one)
    fill(queue, "c", 0)
    assert served(queue) == ["b0", "c0", "b1", "a0", "b2"]


def test_several_may_be_taken_before_one_is_served() -> None:
    queue = queue_with()
    fill(queue, "a", 0, 0)
    fill(queue, "b", 0, 0)
    taken = [queue.pop(0.0, 0.0) for _ in range(4)]
    assert [one.request.request_id for one in taken if one] == ["a0", "b0", "a1", "b1"]


FLOWS = st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=30), min_size=2, max_size=5)
"""Input tokens of the requests of each flow."""


def serve(queue: FlowControl, charged: dict[str, float]) -> set[str]:
    """Serve one request and add its charge to `charged`; the flows that wait after it."""
    one = queue.pop(0.0, 0.0)
    if one is not None:
        queue.served(one)
        charged[one.flow] += EVEN.charge(one)
    return set(bands_of(queue)[0].flows)


@given(FLOWS)
def test_from_a_common_start_flows_are_charged_alike_within_the_largest_request(flows: list[list[int]]) -> None:
    queue = queue_with()
    for number, costs in enumerate(flows):
        fill(queue, f"flow{number}-", *costs)
    largest = max(map(max, flows)) + 10
    charged = {f"flow{number}-": 0.0 for number in range(len(flows))}
    while waiting := serve(queue, charged):
        assert all(abs(charged[f] - charged[g]) <= largest for f, g in combinations(waiting, 2))


@given(FLOWS, st.integers(0, 40))
def test_over_any_period_flows_are_charged_alike_within_twice_the_largest_request(
    flows: list[list[int]], turns_before_the_last_comes: int
) -> None:
    queue = queue_with()
    *early, last = [f"flow{number}-" for number in range(len(flows))]
    for flow, costs in zip(early, flows, strict=False):
        fill(queue, flow, *costs)
    largest = max(map(max, flows)) + 10
    charged = dict.fromkeys([*early, last], 0.0)
    for _ in range(turns_before_the_last_comes):
        serve(queue, charged)
    fill(queue, last, *flows[-1])
    history = [dict(charged)]
    while waiting := serve(queue, charged):
        history.append(dict(charged))
        for f, g in combinations(waiting, 2):
            leads = [now[f] - now[g] for now in history]
            assert max(leads) - min(leads) <= 2 * largest


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), min_size=1, max_size=60))
def test_corrections_add_no_more_than_what_was_in_flight(steps: list[tuple[int, int]]) -> None:
    queue = queue_with()
    flows = ["a", "b", "c"]
    for flow in flows:
        fill(queue, flow, *[0] * 80)
    charged = dict.fromkeys(flows, 0.0)
    in_flight: dict[str, list[Queued]] = {flow: [] for flow in flows}
    most_in_flight = 0
    for ending, output in steps:
        one = queue.pop(0.0, 0.0)
        assert one is not None
        queue.served(one)
        charged[one.flow] += EVEN.charge(one)
        in_flight[one.flow].append(one)
        most_in_flight = max(most_in_flight, *map(len, in_flight.values()))
        if ending < 3 and in_flight[flows[ending]]:
            ended = in_flight[flows[ending]].pop(0)
            queue.ended(ended, output)
            charged[ended.flow] += EVEN.correction(ended, output)
        largest, more, less = 10, 50, 10  # 10 are expected, 0 to 60 are used
        bound = largest + most_in_flight * (more + less)
        assert all(abs(charged[f] - charged[g]) <= bound for f, g in combinations(flows, 2))


def remembered(queue: FlowControl) -> int:
    [band] = bands_of(queue)
    return len(band.turns._accounts)  # type: ignore[attr-defined]


def serve_one(queue: FlowControl, output_tokens: int) -> None:
    one = queue.pop(0.0, 0.0)
    assert one is not None
    queue.served(one)
    queue.ended(one, output_tokens)


def test_an_idle_flow_is_forgotten_once_the_others_have_caught_up() -> None:
    queue = queue_with()
    for number in range(1000):
        fill(queue, f"user{number}-", number % 97)
        serve_one(queue, output_tokens=100 * (number % 2))
    assert remembered(queue) < 20


def test_memory_is_bounded_even_if_new_flows_keep_the_others_from_catching_up() -> None:
    queue = queue_with()
    for number in range(4000):
        fill(queue, f"user{number}-", number % 97)
        if number % 3:
            serve_one(queue, output_tokens=100 * (number % 2))
    assert len(queue) < remembered(queue) <= len(queue) + MAX_IDLE_FLOWS
