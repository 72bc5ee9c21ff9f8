"""What our own requests take of an instance: columns of reservations, what is learned from them, and its price."""

from math import inf, isnan, nan
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pointsman.routing.endpoints import (
    IN_FLIGHT_REQUESTS,
    IN_FLIGHT_TOKENS,
    IS_FULL,
    LATENCY_MS,
    LIGHTNESS,
    LIMIT,
    LOAD,
    PRICE,
    THROUGHPUT,
    Endpoint,
    EndpointTable,
    Metrics,
)
from pointsman.selection.columns import ARRAYS_FROM
from tests.properties import examples
from tests.routing.test_endpoints import EVERY, fleet_of, instance, row_of, sizes, value

# Learning


def test_learned_latency_excludes_the_load_and_old_values_fade() -> None:
    fleet = fleet_of(1)
    fleet.load.learn_latency(fleet["i0"], 200.0, 0.5)
    assert value(fleet, "i0", LATENCY_MS) == 100.0
    fleet.load.learn_latency(fleet["i0"], 150.0, 1.0)
    assert value(fleet, "i0", LATENCY_MS) == pytest.approx(110.0)
    for _ in range(50):
        fleet.load.learn_latency(fleet["i0"], 40.0, 1.0)
    assert value(fleet, "i0", LATENCY_MS) == pytest.approx(40.0, abs=0.01)


@pytest.mark.parametrize("nonsense", [0.0, -3.0, nan])
def test_a_latency_of_zero_is_not_learned(nonsense: float) -> None:
    """Clocks are coarse, and may be set back."""
    fleet = fleet_of(1)
    fleet.load.learn_latency(fleet["i0"], nonsense, 1.0)
    assert isnan(value(fleet, "i0", LATENCY_MS))
    fleet.load.learn_latency(fleet["i0"], 80.0, 1.0)
    fleet.load.learn_latency(fleet["i0"], nonsense, 1.0)
    assert value(fleet, "i0", LATENCY_MS) == 80.0


# Reservations


@sizes
def test_fractions_of_tokens_leave_no_residue(extra: int) -> None:
    fleet = fleet_of(extra + 1)
    endpoint = fleet["i0"]
    for tokens in (0.1, 0.2, 0.3):
        fleet.load.reserve(endpoint, tokens)
    for tokens in (0.3, 0.1, 0.2):
        fleet.load.release(endpoint, tokens)
    assert value(fleet, "i0", IN_FLIGHT_TOKENS) == 0.0


def test_the_prompt_may_be_released_before_the_request() -> None:
    fleet = fleet_of(1)
    fleet.load.reserve(fleet["i0"], 30.0)
    fleet.load.release_tokens(fleet["i0"], 30.0)
    assert (value(fleet, "i0", IN_FLIGHT_TOKENS), value(fleet, "i0", IN_FLIGHT_REQUESTS)) == (0, 1)
    fleet.load.release(fleet["i0"], 0.0)
    assert (value(fleet, "i0", IN_FLIGHT_TOKENS), value(fleet, "i0", IN_FLIGHT_REQUESTS)) == (0, 0)


class Columns(RuleBasedStateMachine):
    """Members come, go and change around the length at which columns become arrays; a dictionary is the model."""

    @initialize(number=st.sampled_from([0, 3, ARRAYS_FROM - 2, ARRAYS_FROM]))
    def start(self, number: int) -> None:
        self.fleet = fleet_of(number)
        self.limits: dict[str, int | None] = {f"i{n}": 4 for n in range(number)}
        self.held: list[tuple[str, Endpoint, float]] = []
        self.reported: dict[str, float] = dict.fromkeys(self.limits, 0.0)
        """What the engine has beyond ours."""
        self.measured: dict[str, float] = {}
        """What it had when it was last measured."""
        self.joined = number

    def names(self) -> st.SearchStrategy[str]:
        return st.sampled_from(sorted(self.limits))

    @rule(limit=st.none() | st.integers(0, 3), load=st.integers(0, 2))
    def join(self, limit: int | None, load: int) -> None:
        name = f"i{self.joined}"
        self.joined += 1
        self.fleet.add(instance(name, limit, current_load=load))
        self.limits[name], self.reported[name] = limit, float(load)

    @precondition(lambda self: self.limits)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(self.names())
        self.fleet.remove(name)
        del self.limits[name], self.reported[name]
        self.measured.pop(name, None)

    @precondition(lambda self: self.limits)
    @rule(data=st.data(), limit=st.none() | st.integers(0, 3), load=st.integers(0, 3))
    def change(self, data: st.DataObject, limit: int | None, load: int) -> None:
        name = data.draw(self.names())
        self.fleet.update(instance(name, limit, current_load=load))
        self.limits[name] = limit
        self.reported[name] = max(0.0, (load or self.measured.get(name, 0.0)) - self.ours(name))

    @precondition(lambda self: self.limits)
    @rule(data=st.data(), running=st.integers(0, 5), waiting=st.integers(0, 2), block_size=st.sampled_from([0, 16]))
    def measure(self, data: st.DataObject, running: int, waiting: int, block_size: int) -> None:
        name = data.draw(self.names())
        self.fleet.measure(name, Metrics(float(waiting), float(running), block_size=block_size), 1.0)
        self.measured[name] = float(running + waiting)
        self.reported[name] = max(0.0, running + waiting - self.ours(name))

    @precondition(lambda self: self.limits)
    @rule(data=st.data(), tokens=st.integers(0, 1000))
    def reserve(self, data: st.DataObject, tokens: int) -> None:
        endpoint = self.fleet[data.draw(self.names())]
        self.fleet.load.reserve(endpoint, float(tokens))
        self.held.append((str(endpoint), endpoint, float(tokens)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, endpoint, tokens = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.fleet.load.release(endpoint, tokens)

    def ours(self, name: str) -> int:
        return sum(endpoint is self.fleet[name] for _, endpoint, _ in self.held)

    @invariant()
    def columns_say_how_things_stand(self) -> None:
        fleet = self.fleet
        assert [str(endpoint) for endpoint in fleet.roster] == list(self.limits)
        assert [endpoint.row for endpoint in fleet.roster] == list(range(len(fleet)))
        assert fleet.roster.arrays is (len(fleet) >= ARRAYS_FROM)
        assert all(len(fleet.roster.column(column)) == len(fleet) for column in EVERY)
        for name in {name for name, _, _ in self.held} & self.limits.keys() | set(list(self.limits)[-3:]):
            row, limit, ours = row_of(fleet, name), self.limits[name], self.ours(name)
            load = ours + self.reported[name]
            most = 256 if limit is None else max(limit, 1)
            assert row[IN_FLIGHT_REQUESTS] == ours
            assert row[IN_FLIGHT_TOKENS] == sum(tokens for _, held, tokens in self.held if held is fleet[name])
            assert row[LOAD] == load >= 0
            assert row[LIMIT] == (inf if limit is None else limit)
            assert row[IS_FULL] == (limit is not None and load >= limit)
            assert row[LIGHTNESS] == most / (most + load)


TestColumns = Columns.TestCase
TestColumns.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("extra", [0, ARRAYS_FROM])
def test_throughput_is_learned_from_what_was_declared(extra: int) -> None:
    fleet = fleet_of(extra)
    fleet.add(instance("i", limit=8, throughput_tokens_per_sec=100))
    for _ in range(200):
        fleet.load.learn_throughput(fleet["i"], 500.0, 1.0, 1.0)
    assert value(fleet, "i", THROUGHPUT) == pytest.approx(500, rel=0.01), "alone on it: its tokens per second"
    fleet.update(instance("i", limit=8, throughput_tokens_per_sec=100, labels={"new": "label"}))
    assert value(fleet, "i", THROUGHPUT) == pytest.approx(500, rel=0.01), "what was learned stays"
    fleet.update(instance("i", limit=8, throughput_tokens_per_sec=200))
    assert value(fleet, "i", THROUGHPUT) == 200, "its owner has changed it"
    assert fleet.instances()[-1].throughput_tokens_per_sec == 200


def test_requests_that_share_an_instance_add_up() -> None:
    fleet = EndpointTable([instance("i", limit=8)])
    for _ in range(3):
        fleet.load.reserve(fleet["i"], 1.0)
    fleet.load.learn_throughput(fleet["i"], 100.0, 1.0, 8 / 11)  # three others when it was sent, and three now
    assert value(fleet, "i", THROUGHPUT) == pytest.approx(400)
    fleet.load.learn_throughput(fleet["i"], 0.0, 1.0, 1.0)
    fleet.load.learn_throughput(fleet["i"], 10.0, 0.0, 1.0)
    assert value(fleet, "i", THROUGHPUT) == pytest.approx(400), "nothing was measured"


@pytest.mark.parametrize(
    ("fields", "price"),
    [
        ({"price_per_gpu_hour": 2.0, "gpu_count": 4}, 8.0),
        ({"price_per_gpu_hour": 2.0, "price_per_hour": 5.0}, 5.0),
        ({"price_per_gpu_hour": 2.0, "gpu_count": 0}, nan),
        ({"gpu_count": 0, "price_per_hour": 0.0}, 0.0),
        ({}, nan),
    ],
)
def test_the_price_of_an_instance(fields: dict[str, Any], price: float) -> None:
    fleet = EndpointTable([instance("i", **fields)])
    assert value(fleet, "i", PRICE) == pytest.approx(price, nan_ok=True)
