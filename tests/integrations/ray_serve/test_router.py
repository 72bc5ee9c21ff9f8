"""`PointsmanRouter` on a real Serve application: order, affinity, and policies that fail."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import pytest

from tests.integrations.ray_serve.conftest import Cluster, until

pytestmark = pytest.mark.ray


def statuses(deployment: str) -> list[dict[str, Any]]:
    """What the routers of a deployment have last reported."""
    from pointsman.integrations.ray_serve import status

    return [one for one in status()["routers"] if one["deployment"] == deployment]


def waiting(deployment: str) -> int:
    return sum(one["waiting"] for one in statuses(deployment))


@pytest.mark.parametrize(
    ("policy", "header", "values", "expected"),
    [
        ("priority", "x-pointsman-priority", ["low", "normal", "critical", "high"], ["c", "d", "b", "a"]),
        ("slo-aware", "x-pointsman-deadline-ms", ["90000", "60000", "30000", "80000"], ["c", "b", "d", "a"]),
    ],
)
def test_the_policy_orders_waiting_requests(
    cluster: Cluster, policy: str, header: str, values: list[str], expected: list[str]
) -> None:
    import ray

    from pointsman.integrations.ray_serve import explain, pointsman_routing
    from tests.integrations.ray_serve.serve_apps import Gated, gate

    gated: Any = Gated
    cluster.run(gated.options(request_router_config=pointsman_routing(policy)).bind(policy), policy)
    names = [f"{policy}-{letter}" for letter in "abcd"]
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(cluster.ask, f"/{policy}", {"x-request-id": f"{policy}-first"})
        try:
            until(lambda: ray.get(gate().came.remote(policy)), "the first request runs")
            rest = [
                pool.submit(cluster.ask, f"/{policy}", {"x-request-id": name, header: value})
                for name, value in zip(names, values, strict=True)
            ]
            seen = partial(statuses, f"{policy}/Gated")
            until(lambda: waiting(f"{policy}/Gated") == len(values), "the others wait", seen)
        finally:
            ray.get(gate().open.remote(policy))
        assert [one.result().status for one in (first, *rest)] == [200] * 5
    assert ray.get(gate().came.remote(policy)) == [f"{policy}-{letter}" for letter in ("first", *expected)]
    told = explain(f"{policy}-c")
    assert "is served" in told
    assert told.data["strategy"] == policy
    assert told.data["waited_ms"] > 0
    refused = cluster.ask(f"/{policy}", {header: "soon"})
    assert (refused.status, "soon" in refused.text) == (503, True)


@pytest.fixture(scope="module")
def zoo(cluster: Cluster) -> Iterator[Cluster]:
    from tests.integrations.ray_serve.serve_apps import zoo

    cluster.run(zoo(), "zoo")
    yield cluster
    cluster.delete("zoo")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("raises", "ZeroDivisionError: of the policy"),
        ("sleeps", "was interrupted after"),
        ("empty", "chose no replica although one has room"),
    ],
)
def test_power_of_two_decides_where_a_policy_fails(zoo: Cluster, name: str, fault: str) -> None:
    answer = zoo.ask(f"/zoo?of={name}&count=24", {"x-request-id": f"{name}-1"})
    assert answer.status == 200
    assert len(json.loads(answer.text)) == 24
    from pointsman.integrations.ray_serve import explain

    told = explain(f"{name}-1", deployment=f"zoo/{name}")
    assert told.data["dropped"]["code"] == "stand-in-decided"
    assert told.data["strategy"] == "power-of-two"
    reported = until(
        lambda: [one for one in statuses(f"zoo/{name}") if fault in json.dumps([one["problems"], one["counters"]])],
        "the fault is reported",
        lambda: statuses(f"zoo/{name}"),
    )
    assert reported[0]["counters"]["outcomes"]["served"] == 24


def replicas(calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Counter[str]:
    """How many calls each replica has answered."""
    from ray import serve

    handle = serve.get_deployment_handle("affine", "zoo")
    return Counter(handle.remote(*args, **kwargs).result() for args, kwargs in calls)


def test_sessions_prefixes_models_and_stats_attract_requests(zoo: Cluster) -> None:
    import ray
    from ray import serve

    from tests.integrations.ray_serve.serve_apps import board

    full = min(until(lambda: len(ids := ray.get(board().ids.remote())) == 2 and ids, "both replicas report"))
    until(lambda: full not in replicas([((0,), {})] * 4), "the stats of replicas are known")
    # What a session or a prompt has used before outweighs the cache that is full, what is new does not.
    prompt = "The same long beginning. " * 60
    fresh: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((f"{number} " * 400,), {}) for number in range(8)]
    assert full not in replicas(fresh)
    handle = serve.get_deployment_handle("affine", "zoo")
    spread = {handle.remote(pointsman={"session": "s1"}).result() for _ in range(8)}
    assert len(spread) == 1
    known = {handle.remote(f"{prompt}{number}").result() for number in range(8)}
    assert len(known) == 1
    loading = handle.options(multiplexed_model_id="m1", method_name="infer")
    first = loading.remote("x").result()
    # Serve tells routers some time later which models a replica has loaded.
    until(lambda: {loading.remote("x").result() for _ in range(8)} == {first}, "the model is known")


def test_prompts_that_begin_alike_share_a_replica_while_it_has_room(cluster: Cluster) -> None:
    import ray

    from pointsman.integrations.ray_serve import pointsman_routing
    from tests.integrations.ray_serve.serve_apps import Held, gate

    held: Any = Held
    handle = cluster.run(held.options(request_router_config=pointsman_routing("prefix")).bind("prefix"), "prefix")
    shared = "You answer in one word, and you never say why. " * 30
    came = partial(lambda: ray.get(gate().came.remote("prefix")))
    running = []
    for number in range(8):
        running.append(handle.remote(f"{shared}Question {number}?"))
        until(lambda: len(came()) == len(running), "the request runs", came)
    first, *_ = ran = came()
    assert ran[:4] == [first] * 4, "it has room for four"
    assert first not in ran[4:], "it has no room"
    ray.get(gate().open.remote("prefix"))
    assert [one.result() for one in running] == ran
    other = "Translate the following text, word by word. " * 30
    assert len({handle.remote(f"{other}Text {number}.").result() for number in range(8)}) == 1
    [status] = until(lambda: statuses("prefix/Held"), "the router reports")
    assert (status["strategy"], status["problems"]) == ("prefix", [])


def test_the_router_and_the_scaling_can_be_removed_again(cluster: Cluster) -> None:
    """Serve's proxies keep the router of a deployment that they know, so one with another router has another name."""
    from ray import serve

    from pointsman.errors import UnknownName
    from pointsman.integrations.ray_serve import explain, pointsman_routing, pointsman_scaling
    from tests.integrations.ray_serve.serve_apps import Named

    named: Any = Named
    limits = {"min_replicas": 2, "max_replicas": 3}
    theirs = named.options(name="theirs", num_replicas="auto", autoscaling_config=limits)
    path = "pointsman.integrations.ray_serve.router.PointsmanRouter"
    kwargs = {"policy": "prefix", "parameters": {"maxImbalance": 20}}
    steps = [
        (theirs, ""),
        (theirs.options(name="ours", request_router_config=pointsman_routing("prefix")), "prefix"),
        (
            theirs.options(
                name="as-text",
                request_router_config={"request_router_class": path, "request_router_kwargs": kwargs},
            ),
            "prefix",
        ),
        (theirs.options(autoscaling_config=limits | {"policy": pointsman_scaling()}), ""),
        (theirs, ""),
    ]
    for number, (step, strategy) in enumerate(steps):
        cluster.run(step.bind(), "undone")
        name = f"step-{number}"
        until(lambda: cluster.ask("/undone").status == 200, "the application answers")
        assert cluster.ask("/undone", {"x-request-id": name}).status == 200
        if strategy:
            assert explain(name).data["strategy"] == strategy
        else:
            with pytest.raises(UnknownName):
                explain(name)
        details = serve.context._get_global_client().get_serve_details()["applications"]["undone"]
        [(deployed, found)] = details["deployments"].items()
        bounds = found["deployment_config"]["autoscaling_config"]
        assert (deployed, bounds["min_replicas"], bounds["max_replicas"]) == (step.name, 2, 3)
        assert ("pointsman" in bounds["policy"]["policy_function"]) == (number == 3)


def test_settings_that_cannot_be_read_are_refused(zoo: Cluster) -> None:
    from ray import serve

    from pointsman.integrations.ray_serve import RefusedByPolicy

    handle = serve.get_deployment_handle("affine", "zoo")
    with pytest.raises(RefusedByPolicy, match="priority"):
        handle.remote(pointsman={"priority": "soon"}).result()


def test_a_router_that_reports_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from pointsman.integrations.ray_serve import records

    monkeypatch.setattr(records, "REPORT_S", 0.1)
    monkeypatch.setattr(records, "EXPLAIN_S", 0.4)

    async def asked() -> tuple[Any, Any]:
        keeper = records.RecordsKeeper()

        async def report(**more: Any) -> list[str]:
            made = records.RouterReport(router="one", deployment="app/d", status={}, **more)
            return await keeper.report(msgspec.msgpack.encode(made))

        await report()
        explaining = asyncio.create_task(keeper.explain("r", "app/d"))
        await asyncio.sleep(1.0)
        assert await report() == ["r"]
        await asyncio.sleep(1.0)
        assert await report(explained={"r": {"text": "why"}}) == []
        found = await explaining
        explaining = asyncio.create_task(keeper.explain("s", "app/d"))
        await asyncio.sleep(0)
        assert await report() == ["s"]
        assert await report() == []
        return found, await asyncio.wait_for(explaining, records.SILENT_S / 2)

    assert asyncio.run(asked()) == ({"text": "why"}, None), "a router that has answered ends the wait"
