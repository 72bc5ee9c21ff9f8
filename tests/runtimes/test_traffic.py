"""Lanes: requests on their way while instances come and go, policies change and deployments are taken away."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec
import pytest

from pointsman.config import DeploymentPlan, load_manifest
from pointsman.errors import UnknownName
from pointsman.reasons import Reason
from pointsman.routing.endpoints import Metrics
from pointsman.routing.events import Arrived, Cancelled, Ended, Failed, Outcome, Refuse, Revoke, Send
from pointsman.routing.routes import DispatcherSettings
from pointsman.runtimes.tasks import LoopClock
from pointsman.runtimes.traffic import Lane, Traffic, in_flight, only_lane, prefix_producers, scheduling_problems
from pointsman.types import ExecutionInstance, RequestMetadata

STRATEGIES = ["fifo", "priority", "slo-aware", "cost-optimized", "adaptive", "prefix"]


def plans(*names: str, policy: str = "fifo", **fields: Any) -> tuple[DeploymentPlan, ...]:
    """Deployments as a manifest says them, each with a model of its own."""
    told = [
        {
            "name": name,
            "model": f"model-{name}",
            "aliases": [f"alias-{name}"],
            "endpoints": [{"url": "http://127.0.0.1:1"}],
            "scheduling": {"policy": policy},
            **fields,
        }
        for name in names
    ]
    return load_manifest(json.dumps({"deployments": told})).deployments


def instance(name: str, limit: int | None = 1, model: str = "model-a", **facts: Any) -> ExecutionInstance:
    return ExecutionInstance(
        instance_id=name, model_name=model, host="127.0.0.1", port=1, max_concurrency=limit, **facts
    )


class Ledger:
    """A carrier that carries nothing: it writes down what it was told."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        self.refused: list[tuple[str, Outcome]] = []
        self.revoked: list[str] = []

    def send(self, lane: Lane, command: Send) -> None:
        self.sent.append((command.request.request_id, command.decision.target_instance_id))

    def refuse(self, lane: Lane, command: Refuse) -> None:
        self.refused.append((command.request.request_id, command.refusal.outcome))

    def revoke(self, lane: Lane, command: Revoke) -> None:
        self.revoked.append(command.request.request_id)


class Yard:
    """Traffic with a carrier, and short ways to talk to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, **settings: Any) -> None:
        self.carrier = Ledger()
        self.traffic = Traffic(LoopClock(loop), self.carrier, DispatcherSettings(**settings))

    def arrive(self, *names: str, deployment: str = "a", **facts: Any) -> None:
        for name in names:
            lane = self.traffic.by_model[f"model-{deployment}"]
            told = {"prompt": "hello", "model_name": f"model-{deployment}", "arrival_time": time.monotonic(), **facts}
            lane.tell(Arrived((RequestMetadata(name, **told),)))

    def end(self, *names: str, deployment: str = "a") -> None:
        """As the gateway tells it: to the dispatcher, then to the lane."""
        for name in names:
            lane = self.traffic._lane(deployment)
            where = dict(self.carrier.sent)[name]
            lane.tell(Ended(name, 1))
            lane.worked(where)

    def fail(self, name: str, why: str = "oops", deployment: str = "a") -> None:
        lane = self.traffic._lane(deployment)
        where = dict(self.carrier.sent)[name]
        lane.tell(Failed(name, Reason(why)))
        lane.failed(where, Reason(why))

    def sent(self) -> list[str]:
        return [name for name, _ in self.carrier.sent]


def run(work: Callable[[Yard], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run a test on a loop; whatever goes wrong on the loop is an error."""

    async def on_loop() -> None:
        loop = asyncio.get_running_loop()
        trouble: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: trouble.append(context))
        yard = Yard(loop, **settings)
        await work(yard)
        await asyncio.sleep(0)
        assert trouble == []
        for lane in yard.traffic.all_lanes():
            lane.stop_timer()

    asyncio.run(on_loop())


async def until(condition: Callable[[], object], patience_s: float = 20.0) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "waited for nothing"
        await asyncio.sleep(0.002)


# Deployments


def test_a_lane_for_each_deployment_by_all_its_names() -> None:
    async def work(yard: Yard) -> None:
        traffic = yard.traffic
        traffic.configure(plans("a", "b"))
        assert set(traffic.lanes) == {"a", "b"}
        assert {model: lane.plan.name for model, lane in traffic.by_model.items()} == {
            "model-a": "a", "alias-a": "a", "model-b": "b", "alias-b": "b"
        }  # fmt: skip
        before = dict(traffic.lanes)
        traffic.configure(plans("a", "b"))
        assert traffic.lanes == before, "nothing has changed"
        assert all(lane.dispatcher is before[name].dispatcher for name, lane in traffic.lanes.items())

    run(work)


def test_deployments_of_pipelines_are_hidden_from_clients() -> None:
    async def work(yard: Yard) -> None:
        traffic = yard.traffic
        known, hidden = plans("a", "b")
        traffic.configure([known, msgspec.structs.replace(hidden, internal=True)])
        assert set(traffic.lanes) == {"a", "b"}
        assert traffic.by_model.keys() == {"model-a", "alias-a"}
        assert only_lane(traffic) is traffic.lanes["a"]
        traffic.configure([known, hidden])
        assert only_lane(traffic) is None
        assert traffic.by_model["alias-b"] is traffic.lanes["b"]

    run(work)


def test_status_of_a_lane() -> None:
    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        yard.traffic.admit("a", instance("i"))
        yard.arrive("r0", "r1")
        yard.traffic.measured("a", "i", Metrics(waiting_queue_size=3, running_requests_size=1, kv_cache_usage=0.5))
        told = yard.traffic.status("a")
        assert told is not None
        assert (told["strategy"], told["waiting"], told["running"]) == ("fifo", 1, 1)
        [(name, one)] = told["instances"].items()
        assert (name, one["in_flight"], one["max_concurrency"], one["waiting"]) == ("i", 1, 1, 3)
        assert one["metrics_age_s"] >= 0
        json.dumps(told)

    run(work)


def test_an_unknown_deployment_is_an_error() -> None:
    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        for call in (
            partial(yard.traffic.admit, "b", instance("i")),
            partial(yard.traffic.update, "b", instance("i")),
            partial(yard.traffic.withdraw, "b", "i", Reason("left")),
        ):
            with pytest.raises(UnknownName, match="b"):
                call()
        assert yard.traffic.status("b") is None

    run(work)


def test_events_of_unknown_instances_are_ignored() -> None:
    """News of an instance may come after it has gone."""

    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        idle: list[str] = []
        yard.traffic.update("a", instance("unknown"))
        yard.traffic.measured("a", "unknown", Metrics())
        yard.traffic.withdraw("a", "unknown", Reason("gone"))
        yard.traffic.withdraw("a", "unknown", Reason("gone"))
        yard.traffic.when_idle("a", "unknown", lambda: idle.append("unknown"))
        assert in_flight(yard.traffic.lanes["a"].dispatcher, "unknown") == 0
        await asyncio.sleep(0)
        assert idle == ["unknown"]
        assert len(yard.traffic.lanes["a"].dispatcher.fleet) == 0

    run(work)


# Failures


def test_three_failures_in_a_row_are_reported_and_a_success_resets_the_count() -> None:
    async def work(yard: Yard) -> None:
        told: list[tuple[str, Reason]] = []
        yard.traffic.hooks.failing = lambda name, why: told.append((name, why))
        yard.traffic.configure(plans("a", "b"))
        yard.traffic.admit("a", instance("i", None))
        yard.traffic.admit("b", instance("k", None, "model-b"))

        def fail(number: int) -> None:
            yard.arrive(f"f{number}")
            yard.fail(f"f{number}", f"why {number}")

        fail(1)
        fail(2)
        yard.arrive("other", deployment="b")
        yard.fail("other", deployment="b")
        assert told == []
        yard.arrive("good")
        yard.end("good")
        fail(3)
        fail(4)
        assert told == []
        fail(5)
        assert told == [("i", Reason("why 5"))]
        fail(6)
        fail(7)
        assert len(told) == 1
        fail(8)
        assert told[1:] == [("i", Reason("why 8"))]

    run(work, max_tries=1)


def test_an_instance_that_comes_back_begins_without_failures() -> None:
    async def work(yard: Yard) -> None:
        told: list[str] = []
        yard.traffic.hooks.failing = lambda name, why: told.append(name)
        yard.traffic.configure(plans("a"))
        for turn in range(3):
            yard.traffic.admit("a", instance("i", None))
            for number in range(2):
                yard.arrive(f"r{turn}-{number}")
                yard.fail(f"r{turn}-{number}")
            yard.traffic.withdraw("a", "i", Reason("restarted"))
        assert told == []

    run(work, max_tries=1)


@pytest.mark.parametrize("event", ["joins", "comes back"])
def test_results_of_the_time_before_an_instance_joined_are_not_compared(event: str) -> None:
    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        for name in ("i", "k"):
            yard.traffic.admit("a", instance(name, None))
        yard.traffic.update("a", instance("k", None, can_accept_request=False))
        yard.arrive("r")
        yard.end("r")
        good = yard.traffic.by_model["model-a"].outliers.good
        assert good == {"i": 1}
        if event == "joins":
            yard.traffic.admit("a", instance("new", None))
        else:
            yard.traffic.update("a", instance("k", None))
        assert good == {}

    run(work)


def test_hooks_are_optional() -> None:
    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        yard.traffic.admit("a", instance("i", None))
        for number in range(4):
            yard.arrive(f"r{number}")
            yard.fail(f"r{number}")
        assert len(yard.carrier.refused) == 4

    run(work, max_tries=1)


# Time


def test_requests_that_wait_too_long_are_refused_in_time() -> None:
    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        yard.traffic.admit("a", instance("i"))
        yard.arrive("runs")
        yard.arrive("short", timeout_s=0.03)
        yard.arrive("long", timeout_s=0.06)
        await until(lambda: len(yard.carrier.refused) == 2)
        assert [name for name, _ in yard.carrier.refused] == ["short", "long"]
        yard.end("runs")

    run(work)


def test_a_stopped_timer_does_not_fire() -> None:
    async def work(yard: Yard) -> None:
        yard.traffic.configure(plans("a"))
        yard.traffic.admit("a", instance("i", 0))
        yard.arrive("r", timeout_s=0.01)
        yard.traffic.lanes["a"].stop_timer()
        await asyncio.sleep(0.05)
        assert yard.carrier.refused == []
        yard.traffic.lanes["a"].tell(Cancelled("r"))

    run(work)


# Deployments without instances


def test_a_request_without_an_available_instance_is_reported_at_once() -> None:
    async def work(yard: Yard) -> None:
        wanted: list[str] = []
        yard.traffic.hooks.wanted = wanted.append
        yard.traffic.configure(plans("a", "b"))
        yard.arrive("first")
        assert wanted == ["a"]
        yard.traffic.admit("a", instance("a-1"))
        assert yard.sent() == ["first"]
        yard.arrive("second")
        assert wanted == ["a"]  # it waits for room on an instance
        yard.end("first")
        yard.end("second")
        yard.traffic.update("a", instance("a-1", can_accept_request=False))
        yard.arrive("third")
        assert wanted == ["a", "a"]  # the last one is on its way out
        yard.traffic.withdraw("a", "a-1", Reason("gone"))
        yard.traffic.admit("a", instance("a-2"))
        assert yard.sent() == ["first", "second", "third"]

    run(work)


def test_listeners_hear_of_every_end_also_after_a_change_of_policy() -> None:
    async def work(yard: Yard) -> None:
        heard: list[tuple[str, str, bool | None]] = []
        yard.traffic.configure(plans("a"))
        yard.traffic.admit("a", instance("a-1", 2))
        yard.traffic.lanes["a"].dispatcher.listen(
            lambda one: heard.append((one.request_id, one.state, one.met_deadline))
        )
        yard.arrive("r1", "r2", "r3", slo_deadline_ms=900_000)
        yard.end("r1")
        yard.traffic.configure(plans("a", policy="priority"))
        yard.end("r2")
        yard.traffic.lanes["a"].tell(Cancelled("r3"))
        assert heard == [("r1", "served", True), ("r2", "served", True), ("r3", "abandoned", False)]

    run(work)


# Prefix indexes


def test_the_memory_for_prefix_indexes_is_shared_and_status_says_when_it_is_full() -> None:
    picker: dict[str, Any] = {"scheduling": {"config": {"plugins": [{"type": "prefix-cache-scorer"}]}}}

    async def story(yard: Yard) -> None:
        yard.traffic.prefix_index_bytes = 480 * 1024
        yard.traffic.configure(plans("a", "b", "c", **picker)[:2])
        indexes = [producer.index for lane in yard.traffic.all_lanes() for producer in prefix_producers(lane)]
        assert [index.memory.max_entries for index in indexes] == [1024, 1024]
        assert scheduling_problems(yard.traffic.lanes.values()) == []
        yard.traffic.admit("a", instance("i", limit=None))
        yard.traffic.measured("a", "i", Metrics(block_size=16, num_blocks=10**12))
        for number in range(300):
            yard.arrive(f"r{number}", prompt=f"{number:08d}" * 500)
            yard.end(f"r{number}")
        assert len(indexes[0]) <= 1024
        [problem] = scheduling_problems(yard.traffic.lanes.values())
        assert "gateway.maxPrefixIndexBytes" in str(problem)
        yard.traffic.prefix_index_bytes *= 8
        yard.traffic.configure(plans("a", **picker))
        assert scheduling_problems(yard.traffic.lanes.values()) == []

    run(story)
