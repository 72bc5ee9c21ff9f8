"""Deployments that are taken away, and instances that drain: waiting requests are served or refused, none is lost."""

import asyncio

import pytest

from pointsman.reasons import Reason
from pointsman.routing.events import Cancelled
from tests.runtimes.test_traffic import Yard, instance, plans, run, until

# Deployments that are taken away


def test_a_removed_deployment_still_serves_waiting_requests() -> None:
    async def work(yard: Yard) -> None:
        traffic = yard.traffic
        traffic.configure(plans("a", "b"))
        traffic.admit("a", instance("i"))
        yard.arrive("r0", "r1", "r2")
        traffic.configure(plans("b"))
        assert set(traffic.lanes) == {"b"}
        assert "model-a" not in traffic.by_model
        assert [lane.plan.name for lane in traffic.all_lanes()] == ["b", "a"]
        idle: list[str] = []
        traffic.when_idle("a", "i", lambda: idle.append("i"))
        traffic.update("a", instance("i", can_accept_request=False))  # it drains: what waits is served all the same
        for name in ("r0", "r1", "r2"):
            await asyncio.sleep(0)
            assert idle == [], "requests still wait or run"
            assert yard.sent()[-1] == name
            yard.end(name)
        await asyncio.sleep(0)
        assert idle == ["i"]
        traffic.withdraw("a", "i", Reason("stopped"))
        assert [lane.plan.name for lane in traffic.all_lanes()] == ["b"]
        assert yard.carrier.refused == []

    run(work)


@pytest.mark.parametrize("how", ["expires", "is cancelled"])
def test_an_instance_is_idle_when_the_last_waiting_request_expires_or_is_cancelled(how: str) -> None:
    """As the gateway tells it: it looks for idle instances after every refusal."""

    async def work(yard: Yard) -> None:
        traffic = yard.traffic
        traffic.configure(plans("a"))
        traffic.admit("a", instance("i", 0))  # it takes no requests
        yard.arrive("r", timeout_s=0.02 if how == "expires" else None)
        lane = traffic.lanes["a"]
        traffic.configure(())
        idle: list[str] = []
        traffic.when_idle("a", "i", lambda: idle.append("i"))
        await asyncio.sleep(0)
        assert idle == []
        if how == "expires":
            await until(lambda: yard.carrier.refused)
        else:
            lane.tell(Cancelled("r"))
        lane.look_for_idle()
        await asyncio.sleep(0)
        assert idle == ["i"]

    run(work)


def test_waiting_requests_are_refused_when_the_last_instance_of_a_removed_deployment_leaves() -> None:
    async def work(yard: Yard) -> None:
        traffic = yard.traffic
        traffic.configure(plans("a"))
        traffic.admit("a", instance("i"))
        yard.arrive("r0", "r1")
        traffic.configure(())
        traffic.withdraw("a", "i", Reason("it crashed"))
        assert {name for name, _ in yard.carrier.refused} == {"r0", "r1"}
        assert {outcome.value for _, outcome in yard.carrier.refused} <= {"EvictedNoEndpoints", "EvictedShuttingDown"}
        assert traffic.all_lanes() == []

    run(work)


def test_a_removed_deployment_without_instances_closes_at_once() -> None:
    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        yard.arrive("r")
        yard.traffic.configure(())
        assert [name for name, _ in yard.carrier.refused] == ["r"]
        assert yard.traffic.all_lanes() == []

    run(work)


def test_a_deployment_that_comes_back_keeps_its_lane() -> None:
    async def work(yard: Yard) -> None:
        traffic = yard.traffic
        traffic.configure(plans("a"))
        traffic.admit("a", instance("i"))
        yard.arrive("r0", "r1")
        lane = traffic.lanes["a"]
        traffic.configure(())
        traffic.configure(plans("a", policy="priority"))
        assert traffic.lanes["a"] is lane
        assert not lane.closed
        assert lane.dispatcher.strategy == "priority"
        assert traffic.by_model["model-a"] is lane
        traffic.update("a", instance("i", 5))
        assert sorted(yard.sent()) == ["r0", "r1"], "news of its instances is heard again"
        yard.end("r0", "r1")
        assert lane.dispatcher.counters.outcomes == {"served": 2}

    run(work)


def test_a_deployment_that_comes_back_after_closing_gets_a_new_lane() -> None:
    async def work(yard: Yard) -> None:
        traffic = yard.traffic
        traffic.configure(plans("a"))
        traffic.admit("a", instance("i"))
        traffic.configure(())
        traffic.withdraw("a", "i", Reason("stopped"))
        traffic.configure(plans("a"))
        traffic.admit("a", instance("i"))
        yard.arrive("r")
        yard.end("r")
        assert traffic.lanes["a"].dispatcher.counters.arrived == 1

    run(work)


# Idle instances


def test_the_idle_call_comes_once_and_from_the_loop() -> None:
    """The call comes from the loop, never from inside another call."""

    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        yard.traffic.admit("a", instance("i"))
        idle: list[int] = []
        yard.traffic.when_idle("a", "i", lambda: idle.append(1))
        assert idle == []
        await asyncio.sleep(0)
        assert idle == [1]
        yard.arrive("r")
        yard.end("r")
        await asyncio.sleep(0)
        assert idle == [1]

    run(work)


@pytest.mark.parametrize("how", ["end", "fail", "leave"])
def test_an_instance_is_idle_when_its_last_request_ends(how: str) -> None:
    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        yard.traffic.admit("a", instance("i", 2))
        yard.arrive("r0", "r1")
        idle: list[int] = []
        yard.traffic.when_idle("a", "i", lambda: idle.append(1))
        yard.traffic.update("a", instance("i", 2, can_accept_request=False))
        yard.end("r0")
        await asyncio.sleep(0)
        assert idle == []
        if how == "end":
            yard.end("r1")
        elif how == "fail":
            yard.fail("r1")
        else:
            yard.traffic.withdraw("a", "i", Reason("crashed"))
        await asyncio.sleep(0)
        assert idle == [1]

    run(work)


def test_other_requests_wait_while_an_instance_drains() -> None:
    """Only in a removed deployment are waiting requests served first."""

    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        yard.traffic.admit("a", instance("i"))
        yard.arrive("r0", "r1")
        idle: list[int] = []
        yard.traffic.update("a", instance("i", can_accept_request=False))
        yard.traffic.when_idle("a", "i", lambda: idle.append(1))
        yard.end("r0")
        await asyncio.sleep(0)
        assert idle == [1]
        assert yard.sent() == ["r0"]

    run(work)
