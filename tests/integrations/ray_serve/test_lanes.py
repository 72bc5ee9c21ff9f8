"""The lane of a router, without Ray: what Serve would tell, and what the dispatcher decides."""

import asyncio
import pickle
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import wraps
from typing import Any

import pytest

from pointsman.errors import ConfigError
from pointsman.integrations.ray_serve.lanes import (
    Replica,
    ReplicaLane,
    RequestRefused,
    RouterSettings,
    ThreadWatch,
    lane_of,
    metrics_of,
)
from pointsman.reasons import Reason
from pointsman.routing.user_code import Stalled
from pointsman.strategies import SchedulingPolicy
from pointsman.types import ExecutionInstance, RequestMetadata, SchedulingDecision

HERE = "tests.integrations.ray_serve.test_lanes"


class Spins(SchedulingPolicy):
    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        while True:
            pass


class LeavesOut(SchedulingPolicy):
    """Decides about all requests but one."""

    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        to = instances[0].instance_id
        return [SchedulingDecision(one.request_id, to) for one in requests if one.request_id != "left out"]


class RejectsAll:
    """A filter that leaves no candidate."""

    def rejections(self, cycle: Any, candidates: Iterable[Any]) -> Iterable[tuple[Any, str]]:
        return [(one, "not today") for one in candidates]


REJECTING = {
    "plugins": [{"type": f"{HERE}:RejectsAll", "name": "none"}],
    "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "none"}]}],
}


def lane(*replicas: Replica, made: SchedulingPolicy | None = None, **settings: Any) -> ReplicaLane:
    one = ReplicaLane("app/d", RouterSettings(**settings), asyncio.get_running_loop(), made)
    one.update(replicas or [Replica(name="a", max_ongoing=1), Replica(name="b", max_ongoing=1)])
    return one


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def request(name: str, **facts: Any) -> RequestMetadata:
    return RequestMetadata(name, arrival_time=time.monotonic(), **facts)


@in_a_loop
async def test_requests_wait_in_the_order_of_the_policy() -> None:
    one = lane(policy="priority")
    running = [one.choose(request(f"running-{number}")) for number in range(2)]
    assert sorted([await chosen for chosen in running]) == ["a", "b"]
    low, high = one.choose(request("low", priority=-1)), one.choose(request("high", priority=1))
    assert one.is_blocked
    one.ended("running-0")
    await high
    assert not low.done()
    one.ended("running-1")
    await low
    assert one.status()["running"] == 2


@pytest.mark.parametrize(
    ("parameters", "together"),
    [({}, 4), ({"maxImbalance": None}, 4), ({"maxImbalance": 1}, 2), ({"maxImbalance": 0}, 1), ({"minMatch": 1.0}, 1)],
)
@in_a_loop
async def test_prompts_that_begin_alike_share_a_replica(parameters: dict[str, Any], together: int) -> None:
    replicas = [Replica(name=name, max_ongoing=4) for name in "ab"]
    one = lane(*replicas, policy="prefix", parameters=parameters)
    shared = "You answer in one word. " * 40
    chosen = [await one.choose(request(f"r{number}", prompt=f"{shared}{number:099}")) for number in range(8)]
    assert [one == chosen[0] for one in chosen[: together + 1]] == [True] * together + [False]
    assert sorted(chosen) == list("aaaabbbb"), "all of them have room for four"
    record = one.dispatcher.records.get(f"r{together}")
    assert record is not None
    assert record.strategy == "prefix"


@in_a_loop
async def test_a_replica_that_others_have_filled_is_left_out_until_it_says_otherwise() -> None:
    one = lane(Replica(name="a", max_ongoing=2))
    ours = request("ours")
    assert await one.choose(ours) == "a"
    again = one.choose_again(ours)  # the replica did not take it: it is full
    assert not again.done()
    assert one.replicas.used_by_others() == ["a"]
    one.replicas.reported("a", 2)
    assert not again.done()
    one.replicas.reported("a", 1)
    assert await again == "a"
    record = one.dispatcher.records.get("ours")
    assert record is not None
    assert record.failures == (("a", Reason("replica-full")),)
    one.replicas.reported("a", 1)
    assert one.replicas.used_by_others() == [], "the one request on it is ours"


@in_a_loop
async def test_a_lost_replica_ends_its_requests_and_serve_may_ask_again() -> None:
    one = lane()
    ours = request("ours")
    name = await one.choose(ours)
    one.lost(name)
    record = one.dispatcher.records.get("ours")
    assert record is not None
    assert record.refusal is not None
    assert record.refusal.reason.code == "instance-failed"
    other = await one.choose_again(ours)
    assert {name, other} == {"a", "b"}


@in_a_loop
async def test_a_request_that_its_caller_gave_up_leaves() -> None:
    one = lane()
    for name in "xy":
        await one.choose(request(name))
    waits = one.choose(request("z"))
    waits.cancel()
    one.cancelled("z")
    one.ended("x")
    one.ended("y")
    assert one.status()["waiting"] == one.status()["running"] == 0


@pytest.mark.parametrize(
    ("settings", "policy"),
    [({"config": REJECTING}, None), ({"time_limit": 0.02}, Spins())],
    ids=["rejects all", "spins"],
)
@in_a_loop
async def test_power_of_two_decides_where_the_users_code_does_not(
    settings: dict[str, Any], policy: SchedulingPolicy | None
) -> None:
    one = lane(Replica(name="a", max_ongoing=8), Replica(name="b", max_ongoing=8), made=policy, **settings)
    chosen = [await one.choose(request(f"r{number}")) for number in range(12)]
    assert set(chosen) == {"a", "b"}
    record = one.dispatcher.records.get("r0")
    assert record is not None
    assert record.dropped is not None
    assert record.dropped.code == "stand-in-decided"
    status = one.status()
    assert status["counters"]["policy_errors"] or status["problems"]


@in_a_loop
async def test_no_request_is_left_out_for_ever() -> None:
    one = lane(made=LeavesOut())
    left_out, other = one.choose(request("left out")), one.choose(request("other"))
    assert {await left_out, await other} == {"a", "b"}


@in_a_loop
async def test_requests_that_wait_too_long_are_refused_with_a_reason() -> None:
    one = lane(wait_s=0.01)
    for name in "xy":
        await one.choose(request(name))
    with pytest.raises(RequestRefused, match="EvictedTTL"):
        await one.choose(request("z"))


@in_a_loop
async def test_the_model_of_a_request_attracts_it_and_others_can_load_it() -> None:
    loaded = Replica(name="a", max_ongoing=2, models=frozenset({"m1"}))
    one = lane(loaded, Replica(name="b", max_ongoing=2), policy="fifo")
    assert [await one.choose(request(f"r{number}", model_name="m1")) for number in range(3)] == ["a", "a", "b"]
    assert await one.choose(request("new", model_name="m2")) == "b"


def test_what_replicas_report_becomes_metrics() -> None:
    stats = {"kv_cache_usage": 0.5, "block_size": 16, "num_blocks": "many", "other": 1, "waiting_queue_size": 3}
    found = metrics_of(Replica(name="a", max_ongoing=1, stats=stats, models=frozenset({"m"})))
    assert (found.kv_cache_usage, found.block_size, found.num_blocks) == (0.5, 16, 0)
    assert (found.waiting_queue_size, found.active_models) == (3.0, frozenset({"m"}))


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"policy": "not_here:Policy"}, 'there is no module "not_here"'),
        ({"polcy": "fifo"}, "polcy"),
        ({"pickled": "bm90aGluZw=="}, "UnpicklingError"),
    ],
)
@in_a_loop
async def test_settings_that_cannot_be_used_here_leave_it_to_power_of_two(kwargs: dict[str, Any], why: str) -> None:
    one = lane_of("app/d", kwargs, asyncio.get_running_loop(), pickle.loads)
    one.update([Replica(name="a", max_ongoing=1)])
    assert await one.choose(request("r")) == "a"
    status = one.status()
    assert status["strategy"] == "power-of-two"
    assert any(why in problem["text"] for problem in status["problems"])


@in_a_loop
async def test_problems_of_settings_are_found_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="slo-aware"):
        lane(policy="slo-awar")


def test_a_thread_that_hangs_is_left_behind_and_used_again_once_it_answers() -> None:
    watch = ThreadWatch(time.monotonic)
    assert watch.call(1.0, lambda *about: about, (1, 2))[0] == (1, 2)
    with pytest.raises(ZeroDivisionError):
        watch.call(1.0, lambda: 1 / 0, ())
    gate: list[int] = []
    with pytest.raises(Stalled):
        watch.call(0.05, lambda: _spin(gate), ())
    end = time.monotonic() + 30
    while True:  # it is interrupted as soon as it runs Python
        try:
            assert watch.call(1.0, lambda: "again", ())[0] == "again"
            break
        except Stalled:
            assert time.monotonic() < end
            time.sleep(0.01)


def _spin(gate: list[int]) -> None:
    while not gate:
        pass
