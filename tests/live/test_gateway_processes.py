"""Two gateway processes before one plane: requests, records, metrics and limits as of one; each may be killed."""

import json
import os
import re
import signal
import time
from typing import Any

import grpc
import httpx2 as httpx

import pointsman as pm
from bench.chaos.clients import Verdict
from bench.chaos.load import Load
from bench.chaos.planes import LivePlane
from pointsman.gateway.grpc.server import SERVICE, PredictRequest, PredictResponse
from tests.gateway.grpc.grpc_bed import request
from tests.live import pipeline_nodes as nodes
from tests.live.manifests import hashed, manifest, simulated
from tests.live.test_recovery import GRACE_S, free_port

CLIENTS = 12
KEY, ADMIN_KEY = "key-of-a-tenant", "key-of-an-operator"


def shared(*deployments: dict[str, Any], **gateway: Any) -> str:
    return manifest(*deployments, processes=2, listen=f"127.0.0.1:{free_port()}", **gateway)


def gateways(plane: LivePlane) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in plane.status()["gateways"]}


def are_connected(plane: LivePlane) -> bool:
    return all(one["connected"] and one["url"] for one in gateways(plane).values())


def up(plane: LivePlane, text: str | None = None) -> str:
    """Start it; where clients send requests."""
    plane.up(text)
    plane.until(lambda: are_connected(plane), "all gateways listen")
    return plane.url


def counted(url: str, name: str = "pointsman_requests_total") -> float:
    """The sum of all samples of a metric; every request is made on a connection of its own."""
    page = httpx.get(f"{url}/metrics", timeout=20)
    assert page.status_code == 200
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page.text, re.MULTILINE))


def test_requests_are_spread_and_one_picture_shows_all(plane: LivePlane) -> None:
    url = up(plane, shared(simulated("m", 2), adminKeySha256=hashed(ADMIN_KEY)))
    with Load(url, ["m"], clients=CLIENTS) as load:
        plane.until(lambda: len(load.samples) > 150, "load")
    assert load.unexpected() == []
    served = load.verdicts()["served"]

    def total() -> int:
        return sum(one["requests"] for one in gateways(plane).values())

    plane.until(lambda: total() == served, "all requests reported")
    each = {name: one["requests"] for name, one in gateways(plane).items()}
    print(f"\n{served} requests: {each}")
    assert min(each.values()) > 0
    assert [counted(url) for _ in range(6)] == [served] * 6, "whichever process answers"
    assert plane.status()["deployments"][0]["answered"] == served
    for sample in load.samples[-25:]:
        found = plane.admin.get("requests", sample.request.request_id)
        assert (found["state"], found["instance"]) == ("served", sample.instance)
    listed = plane.pointsman("requests", "--json").stdout
    assert all(sample.request.request_id in listed for sample in load.samples[-10:])
    status = plane.pointsman("status").stdout
    assert "gateway-1" in status
    assert "gateway-2" in status
    keyed = {"authorization": f"Bearer {ADMIN_KEY}", "x-pointsman-author": "Ada", "accept": "text/event-stream"}
    with httpx.stream("GET", f"{url}/admin/v1/events?after=0", headers=keyed, timeout=20) as stream:
        events = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
        assert next(events)["number"] == 1
        httpx.post(f"{url}/admin/v1/instances/none/drain", headers=keyed)
        asked = next(one for one in events if one["code"] == "operation")
    assert (asked["by"], asked["key"]) == ("Ada", hashed(ADMIN_KEY)[:8])


def test_a_gateway_that_is_killed_loses_what_it_had_in_flight_and_is_replaced(plane: LivePlane) -> None:
    url, before = up(plane, shared(simulated("m", 2))), gateways(plane)
    shown: list[float] = []
    with Load(url, ["m"], clients=CLIENTS) as load:
        plane.until(lambda: len(load.samples) > 60, "load")
        shown.append(counted(url))
        ours = [one.request.request_id for one in list(load.samples)[:40]]
        time_of_kill = time.monotonic()
        os.kill(before["gateway-1"]["pid"], signal.SIGKILL)
        plane.until(lambda: gateways(plane)["gateway-1"]["restarts"] == 1, "its end noticed")
        shown.append(counted(url))
        plane.until(lambda: are_connected(plane), "replaced")
        replaced_s = time.monotonic() - time_of_kill
        shown.append(counted(url))
        count = len(load.samples)
        plane.until(lambda: len(load.samples) > count + 60, "load after that")
        shown.append(counted(url))
    lost = [one for one in load.samples if one.verdict is not Verdict.SERVED]
    print(
        f"\nkill -9 of a gateway: {len(lost)} of {len(load.samples)} requests lost, replaced after {replaced_s:.2f} s"
    )
    assert load.unexpected(Verdict.LOST, Verdict.UNREACHABLE) == []
    assert len(lost) <= CLIENTS
    assert all(one.began <= time_of_kill + 0.5 for one in lost), "only those in flight"
    assert shown == sorted(shown), "counters never fall"
    after = gateways(plane)
    assert after["gateway-2"]["pid"] == before["gateway-2"]["pid"]
    assert after["gateway-1"]["pid"] != before["gateway-1"]["pid"]
    plane.until(lambda: plane.admin.get("requests", ours[0])["request_id"] == ours[0], "records of the one before")
    for name in ours:
        assert plane.admin.get("requests", name)["state"] == "served"


def test_a_plane_killed_under_load_fails_no_request_and_adopts_its_gateways(plane: LivePlane) -> None:
    url = up(plane, shared(simulated("m", 3)))
    before, engines = gateways(plane), plane.pids()
    with Load(url, ["m"], clients=CLIENTS) as load:
        plane.until(lambda: len(load.samples) > 60, "load")
        plane.kill()
        killed_at = time.monotonic()
        plane.until(lambda: sum(one.began > killed_at for one in list(load.samples)) > 20, "served without a plane")
        up(plane)
        adopted_s = time.monotonic() - killed_at
        count = len(load.samples)
        plane.until(lambda: len(load.samples) > count + 60, "load after that")
    in_time = adopted_s < GRACE_S - 1  # on a machine slower than that, everything is new
    judged = [one for one in load.samples if in_time or one.ended < killed_at + GRACE_S - 0.5]
    print(f"\nkill -9 of the plane: {len(judged)} requests judged; adopted after {adopted_s:.2f} s")
    assert [one for one in judged if one.verdict is not Verdict.SERVED] == []
    if not in_time:
        return
    assert {name: one["pid"] for name, one in gateways(plane).items()} == {
        name: one["pid"] for name, one in before.items()
    }
    assert plane.pids() == engines
    last = load.samples[-1].request.request_id
    assert plane.admin.get("requests", last)["state"] == "served"


def test_drains_scaling_down_and_changes_lose_nothing(plane: LivePlane) -> None:
    text = shared(simulated("m", 3))
    url = up(plane, text)
    with Load(url, ["m"], clients=CLIENTS, tokens=(20, 60)) as load:
        plane.until(lambda: len(load.samples) > 40, "load")
        first = plane.pids()
        plane.admin.post("instances", "m-1", "drain")
        plane.until(lambda: "m-1" not in plane.pids() and len(plane.pids()) == 3, "m-1 replaced")
        plane.write(
            text.replace('"replicas": 3', '"replicas": 1').replace('"model": "m"', '"model": "m", "aliases": ["n"]')
        )
        plane.pointsman("apply", "manifest.yaml", "--yes")
        plane.until(lambda: len(plane.instances()) == 1, "scaled down")
        load.models.append("n")
        count = len(load.samples)
        plane.until(lambda: len(load.samples) > count + 60, "load on what is left")
    assert load.unexpected() == []
    assert any(one.request.model == "n" for one in load.samples), "every process knows the alias"
    assert first.keys() != plane.pids().keys()


def test_every_process_serves_applications_over_http_and_grpc(plane: LivePlane) -> None:
    port = free_port()
    url = up(plane, shared(grpcListen=f"127.0.0.1:{port}"))
    text = pm.build(nodes.diamond(), name="diamond", folder=plane.folder).to_yaml()
    plane.admin.post("applications", body={"text": text, "folder": str(plane.folder)})
    plane.until(plane.is_settled, "replicas ready")

    def is_known() -> bool:
        return all(httpx.post(f"{url}/diamond", json=[1, 2, 3], timeout=30).status_code == 200 for _ in range(6))

    plane.until(is_known, "known to every process")
    answers = [httpx.post(f"{url}/diamond", json=[1, 2, 3], timeout=30) for _ in range(8)]
    assert [answer.json() for answer in answers] == [8] * 8
    found = plane.admin.get("requests", answers[0].headers["x-request-id"])
    assert (found["application"], found["state"], len(found["steps"])) == ("diamond", "served", 3)
    for number in range(6):  # a channel of its own, and so a connection
        with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            predict = channel.unary_unary(
                f"/{SERVICE}/Predict", PredictRequest.SerializeToString, PredictResponse.FromString
            )
            assert json.loads(predict(request("diamond", [1, 2, 3]), timeout=20).json) == 8, number


def test_handles_go_through_gateways_that_live_while_there_is_no_plane(plane: LivePlane) -> None:
    url = up(plane, shared())
    pipeline = nodes.Delegates.bind(nodes.Arrays.bind())
    text = pm.build(pipeline, name="delegates", folder=plane.folder).to_yaml()
    plane.admin.post("applications", body={"text": text, "folder": str(plane.folder)})
    plane.until(plane.is_settled, "replicas ready")

    def statuses(count: int) -> list[int]:
        return [httpx.post(f"{url}/delegates", json=100, timeout=30).status_code for _ in range(count)]

    plane.until(lambda: statuses(6) == [200] * 6, "known to every process")
    before = gateways(plane)
    plane.kill()
    killed_at = time.monotonic()
    alone = statuses(10)
    os.kill(before["gateway-1"]["pid"], signal.SIGKILL)
    with_one = statuses(10)
    took_s = time.monotonic() - killed_at
    plane.up(None)
    print(f"\nwithout a plane: {alone}; without one of two gateways, too: {with_one}; in {took_s:.2f} s")
    if took_s < GRACE_S - 1:  # else replicas have ended
        assert alone == with_one == [200] * 10
    plane.until(lambda: are_connected(plane), "both again")
    plane.until(lambda: statuses(6) == [200] * 6, "as before")


def test_limits_hold_for_all_processes_together(plane: LivePlane) -> None:
    tenant = {"name": "t", "requestsPerMinute": 30}
    keys = [{"tenant": "t", "sha256": hashed(KEY)}]
    url, began = up(plane, shared(simulated("m", 2), tenants=[tenant], keys=keys)), time.monotonic()
    body = {"model": "m", "prompt": "hello", "max_tokens": 1}
    statuses = [
        httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"}).status_code
        for _ in range(80)
    ]
    refilled = (time.monotonic() - began) * 30 / 60
    served = statuses.count(200)
    print(f"\n30 requests per minute: {served} of 80 served within {time.monotonic() - began:.1f} s")
    assert set(statuses) == {200, 429}
    assert 20 <= served <= 30 + refilled + 2
    [shown] = plane.status()["tenants"]
    assert shown["requests_left"] < 30 - served + refilled + 3


def test_a_stop_under_load_finishes_requests_and_leaves_nothing(plane: LivePlane) -> None:
    url = up(plane, shared(simulated("m", 2)))
    with Load(url, ["m"], clients=CLIENTS) as load:
        plane.until(lambda: len(load.samples) > 40, "load")
        assert plane.stop() == 0
    assert load.unexpected(Verdict.UNREACHABLE, Verdict.REFUSED, Verdict.LOST) == []
    begun = [one for one in load.samples if one.verdict is Verdict.LOST and one.first_at is not None]
    assert begun == [], "answers that had begun are complete"
    assert plane.processes() == {}


def test_a_plane_killed_for_good_leaves_nothing(plane: LivePlane) -> None:
    up(plane, shared(simulated("m", 1)))
    plane.kill()
    assert any("gateway.process" in command for command in plane.processes().values())
    plane.until(lambda: plane.processes() == {}, "nothing left", 30.0)
