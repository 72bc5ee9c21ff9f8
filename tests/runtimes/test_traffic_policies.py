"""Policies that change under load: requests that wait or run are not lost, and only their own deployment changes."""

from collections.abc import Iterator
from typing import Any

import pytest

from pointsman.engines.prometheus import Samples
from pointsman.routing.endpoints import Attribute, Endpoint, Metrics
from pointsman.routing.events import Outcome
from pointsman.routing.queue import FlowControl
from pointsman.routing.routes import DispatchPlan
from pointsman.runtimes.traffic import in_flight
from pointsman.strategies import FIFOPolicy
from tests.runtimes.test_traffic import STRATEGIES, Yard, instance, plans, run, until

# Policies that change


@pytest.mark.parametrize("after", STRATEGIES)
@pytest.mark.parametrize("before", STRATEGIES)
def test_the_policy_changes_under_load(before: str, after: str) -> None:
    """What runs goes on running, what waits goes on waiting, counts and records go on."""

    async def work(yard: Yard) -> None:
        traffic = yard.traffic
        traffic.configure(plans("a", policy=before))
        traffic.admit("a", instance("i", 2))
        traffic.admit("a", instance("j", 1))
        yard.arrive(*(f"r{n}" for n in range(8)))
        assert len(yard.sent()) == 3
        lane, dispatcher = traffic.lanes["a"], traffic.lanes["a"].dispatcher
        traffic.configure(plans("a", policy=after))
        assert traffic.lanes["a"] is lane
        assert lane.dispatcher is dispatcher
        assert lane.dispatcher.strategy == after
        assert (lane.dispatcher.running, len(lane.dispatcher)) == (3, 8)
        assert {in_flight(lane.dispatcher, "i"), in_flight(lane.dispatcher, "j")} == {2, 1}
        ended: list[str] = []
        while len(ended) < 8:
            name = next(name for name in yard.sent() if name not in ended)
            ended.append(name)
            yard.end(name)
        assert sorted(yard.sent()) == [f"r{n}" for n in range(8)], "each was sent exactly once"
        assert yard.carrier.refused == []
        counters = lane.dispatcher.counters
        assert (counters.arrived, counters.outcomes) == (8, {"served": 8})
        assert {record.state for record in lane.dispatcher.records.newest()} == {"served"}
        used = {record.strategy for record in lane.dispatcher.records.newest()}
        assert used == {before, after}
        assert len(lane.dispatcher) == len(lane.dispatcher.ledger) == 0

    run(work)


def test_what_was_sent_by_the_old_policy_is_retried_by_the_new_one() -> None:
    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        yard.traffic.admit("a", instance("i"))
        yard.traffic.admit("a", instance("j"))
        yard.arrive("r")
        [(_, first)] = yard.carrier.sent
        yard.traffic.configure(plans("a", policy="priority"))
        yard.fail("r")
        [_, (name, second)] = yard.carrier.sent
        assert (name, {first, second}) == ("r", {"i", "j"})
        yard.traffic.configure(plans("a", policy="slo-aware"))
        yard.fail("r")
        assert len(yard.carrier.sent) == 3
        yard.fail("r")
        assert yard.carrier.refused == [("r", Outcome.EVICTED_OTHER)]

    run(work, max_tries=3)


def test_extractors_read_what_the_engine_reports_beside_its_metrics() -> None:
    watts: Attribute[float] = Attribute("power-watts")

    class Watts:
        def extract(self, source: Any, endpoint: Endpoint) -> Iterator[tuple[Attribute[Any], Any]]:
            yield watts, source.value("power_watts")

    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        yard.traffic.admit("a", instance("i"))
        dispatcher = yard.traffic.lanes["a"].dispatcher
        dispatcher.reconfigure(DispatchPlan(FIFOPolicy(), FlowControl, plugins=(Watts(),)), 0.0)
        yard.traffic.measured("a", "i", Metrics(), Samples(b"power_watts 350\n"))
        seen = dispatcher.fleet["i"].observed(watts)
        assert seen is not None
        assert seen.value == 350.0

    run(work)


def test_a_timer_survives_a_change_of_policy() -> None:
    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        yard.traffic.admit("a", instance("i"))
        yard.arrive("runs")
        yard.arrive("waits", timeout_s=0.05)
        yard.traffic.configure(plans("a", policy="priority"))
        await until(lambda: yard.carrier.refused)
        assert yard.carrier.refused == [("waits", Outcome.EVICTED_TTL)]
        yard.end("runs")
        assert len(yard.traffic.lanes["a"].dispatcher) == 0

    run(work)


def test_only_the_deployment_that_changed_is_reconfigured() -> None:
    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a", "b"))
        before = {name: lane.dispatcher._sender for name, lane in yard.traffic.lanes.items()}
        yard.traffic.configure((*plans("a", policy="priority"), *plans("b")))
        assert yard.traffic.lanes["a"].dispatcher._sender is not before["a"]
        assert yard.traffic.lanes["b"].dispatcher._sender is before["b"]

    run(work)


def test_other_changes_do_not_reconfigure_the_dispatcher() -> None:
    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        before = yard.traffic.lanes["a"].dispatcher._sender
        yard.traffic.configure(plans("a", aliases=["new-name"], price={"perMillionInputTokens": 1}))
        assert yard.traffic.lanes["a"].dispatcher._sender is before
        assert set(yard.traffic.by_model) == {"model-a", "new-name"}
        assert yard.traffic.lanes["a"].plan.price is not None

    run(work)


def test_policies_may_change_any_number_of_times() -> None:
    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        yard.traffic.admit("a", instance("i", 3))
        ended: set[str] = set()
        for turn in range(100):
            yard.arrive(f"r{turn}")
            yard.traffic.configure(plans("a", policy=STRATEGIES[turn % 5]))
            if turn % 2:
                name = next(name for name in yard.sent() if name not in ended)
                ended.add(name)
                yard.end(name)
        while len(ended) < 100:
            name = next(name for name in yard.sent() if name not in ended)
            ended.add(name)
            yard.end(name)
        assert len(yard.sent()) == 100
        assert yard.carrier.refused == []
        assert yard.traffic.lanes["a"].dispatcher.counters.outcomes == {"served": 100}

    run(work)
