"""Explaining live requests: the commands, the admin API and the metrics agree."""

import http.client
import json
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from shutil import which
from typing import Any
from urllib.parse import urlsplit

import pytest

from bench.chaos.faults import inject_fault
from bench.chaos.planes import LivePlane
from pointsman.engines import Samples
from tests.live.manifests import hashed, manifest, simulated

ADMIN_KEY = "pm-admin-of-this-test"

Send = Callable[..., tuple[int, dict[str, str], Any]]


@pytest.fixture(scope="module")
def live(module_plane: LivePlane) -> LivePlane:
    module_plane.up(manifest(simulated("m", 3), simulated("other", 1), adminKeySha256=hashed(ADMIN_KEY)))
    return module_plane


@pytest.fixture
def send(live: LivePlane) -> Send:
    """(method, path, body, headers...) -> (status, headers, JSON or text)"""

    def send(method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
        connection = http.client.HTTPConnection(urlsplit(live.url).netloc, timeout=30.0)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        received = {name.lower(): value for name, value in response.getheaders()}
        return response.status, received, json.loads(content) if "json" in received["content-type"] else content

    return send


def complete(send: Send, request_id: str, **more: Any) -> tuple[int, dict[str, str], Any]:
    body = {"model": "m", "prompt": f"explain {request_id}", "max_tokens": 4, **more}
    return send("POST", "/v1/completions", body, x_request_id=request_id)


def test_a_served_request_shows_its_trace(live: LivePlane, send: Send) -> None:
    status, headers, _ = complete(send, "served-1")
    assert status == 200
    record = live.admin.get("requests", "served-1")
    assert record["state"] == "served"
    assert record["instance"] == headers["x-pointsman-instance"]
    assert (record["tries"], record["failed_tries"], record["refusal"]) == (1, [], None)
    assert record["output_tokens"] == 4
    assert record["total_ms"] >= record["waited_ms"] >= 0
    [profile] = record["trace"]["profiles"]
    assert profile["profile"] == "default"
    assert profile["candidates"] == 3
    assert {one["candidate"] for one in profile["scored"]} == {"m-1", "m-2", "m-3"}
    for one in profile["scored"]:
        weighted = [profile["weights"][name] * score for name, score in one["scores"].items()]
        assert one["total"] == pytest.approx(sum(weighted))
    assert profile["targets"] == [record["instance"]]

    result = live.pointsman("explain", "served-1")
    assert result.returncode == 0
    assert result.stdout.strip() == record["text"].strip()
    assert 'request "served-1" is served' in result.stdout
    for word in ("m-1", "m-2", "m-3", "slo-miss-scorer", "total", "chosen", "4 out"):
        assert word in result.stdout
    print("\n" + result.stdout)
    decoded = json.loads(live.pointsman("explain", "served-1", "--json").stdout)
    assert decoded["trace"] == record["trace"]


def test_requests_between_two_measurements_are_spread(live: LivePlane, send: Send) -> None:
    """Scorers of measurements alone would send all of them to the same instance."""
    with ThreadPoolExecutor(30) as clients:
        answers = list(clients.map(lambda number: complete(send, f"spread-{number}", max_tokens=40), range(30)))
    taken = Counter(headers["x-pointsman-instance"] for _, headers, _ in answers)
    assert {status for status, *_ in answers} == {200}
    assert set(taken) == {"m-1", "m-2", "m-3"}
    assert max(taken.values()) <= 15, taken


def test_a_retried_request_shows_its_failed_tries(live: LivePlane, send: Send) -> None:
    for name, instance in live.instances("m").items():
        if name != "m-3":
            inject_fault(instance["url"], {"fault": "status", "status": 503, "count": 1})
    failed: list[dict[str, Any]] = []
    for number in range(60):
        if len(failed) == 2:
            break
        status, headers, _ = complete(send, f"again-{number}")
        assert status == 200
        record = live.admin.get("requests", f"again-{number}")
        assert record["tries"] == 1 + len(record["failed_tries"])
        assert headers["x-pointsman-instance"] not in [one["instance"] for one in record["failed_tries"]]
        failed += record["failed_tries"]
        if record["failed_tries"]:
            text = live.pointsman("explain", f"again-{number}").stdout
            assert f"tried {record['failed_tries'][0]['instance']}: it answered 503" in text
            assert "is served" in text
    assert sorted(one["instance"] for one in failed) == ["m-1", "m-2"]
    metrics = Samples(send("GET", "/metrics")[2])
    assert metrics.value("pointsman_failed_tries_total") == 2


def test_a_refused_request_shows_why_each_instance_rejected_it(live: LivePlane, send: Send) -> None:
    status, _, body = complete(send, "refused-1", pointsman={"cost_budget": 1e-12, "timeout_s": 0.3})
    assert status == 429
    record = live.admin.get("requests", "refused-1")
    assert record["state"] == "refused"
    assert record["refusal"]["reason"] == body["error"]["reason"]
    assert record["refusal"]["reason"]["text"] == body["error"]["message"]
    assert set(record["rejected"]) == {"m-1", "m-2", "m-3"}
    assert {one["reason"]["code"] for one in record["rejected"].values()} == {"over-budget"}
    assert "refused (RejectedUnschedulable)" in live.pointsman("explain", "refused-1").stdout


def test_a_running_request_can_be_explained(live: LivePlane, send: Send) -> None:
    connection = http.client.HTTPConnection(urlsplit(live.url).netloc, timeout=30.0)
    body = {"model": "other", "prompt": "long", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"x-request-id": "running-1"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    record = live.admin.get("requests", "running-1")
    assert (record["state"], record["instance"], record["total_ms"]) == ("running", "other-1", None)
    assert record["first_token_ms"] > 0
    assert live.instances()["other-1"]["in_flight"] == 1
    connection.close()
    response.close()
    live.until(lambda: live.admin.get("requests", "running-1")["state"] == "abandoned", "the disconnect is noticed")
    assert "client went away" in live.pointsman("explain", "running-1").stdout


def test_requests_are_listed_and_filtered(live: LivePlane, send: Send) -> None:
    complete(send, "listed-1")
    complete(send, "listed-2", model="other")
    newest = live.admin.get("requests", limit=2)["requests"]
    assert [one["request_id"] for one in newest] == ["listed-2", "listed-1"]
    assert {one["model"] for one in live.admin.get("requests", model="other")["requests"]} == {"other"}
    assert "listed-2" in live.pointsman("requests", "--instance", "other-1", "-n", "1").stdout
    assert "listed-1" not in live.pointsman("requests", "--model", "other").stdout
    assert live.pointsman("requests", "--only", "waiting").stdout.strip() == 'no requests found with state "waiting"'


def test_explaining_an_unknown_request_fails(live: LivePlane) -> None:
    result = live.pointsman("explain", "never-sent")
    assert result.returncode == 1
    assert 'there is no record of a request "never-sent"' in result.stderr


def test_a_name_of_another_kind_is_recognised(live: LivePlane) -> None:
    for words, told in {
        ("rollback", "other"): '"other" is a deployment, not an application; there is no application',
        ("explain", "m-1"): '"m-1" is an instance, not a request',
        ("logs", "other"): '"other" is a deployment, not an instance; use: other-1',
        ("explain", "deployment", "othr"): 'unknown deployment "othr"; did you mean "other"?',
    }.items():
        done = live.pointsman(*words)
        assert done.returncode == 1
        assert told in done.stderr


def test_status_shows_every_instance(live: LivePlane) -> None:
    result = live.pointsman("status")
    assert result.returncode == 0
    for word in ("plane ready", "3 of 3", "1 of 1", "m-1", "m-2", "m-3", "other-1", live.url):
        assert word in result.stdout
    decoded = json.loads(live.pointsman("status", "--json").stdout)
    assert decoded["ready"] is True
    assert decoded["pid"] == live.process.pid
    assert all(one["metrics_age_s"] < 30 for one in live.instances().values())


class TestAdminOverHttp:
    def test_requires_the_admin_key(self, send: Send) -> None:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {ADMIN_KEY}"}):
            status, _, body = send("GET", "/admin/v1/status", **headers)
            assert status == 401
            assert body["error"]["type"] == "authentication_error"

    def test_returns_the_same_as_the_local_socket(self, live: LivePlane, send: Send) -> None:
        complete(send, "over-http")
        status, _, body = send("GET", "/admin/v1/requests/over-http", authorization=f"Bearer {ADMIN_KEY}")
        local = live.admin.get("requests", "over-http")
        assert status == 200
        assert {**body, "arrived": ""} == {**local, "arrived": ""}

    def test_commands_connect_by_url(self, live: LivePlane, send: Send) -> None:
        complete(send, "by-address")
        result = live.pointsman("explain", "by-address", "--url", live.url, POINTSMAN_ADMIN_KEY=ADMIN_KEY)
        assert (result.returncode, 'request "by-address" is served' in result.stdout) == (0, True)
        result = live.pointsman("explain", "by-address", "--url", live.url, POINTSMAN_ADMIN_KEY="wrong")
        assert result.returncode == 1
        assert "key" in result.stderr

    def test_returns_logs_of_an_instance(self, send: Send) -> None:
        path = "/admin/v1/instances/m-1/logs?lines=5"
        status, _, body = send("GET", path, authorization=f"Bearer {ADMIN_KEY}")
        assert status == 200
        assert "started as process" in body["text"]


def test_metrics_count_requests_and_tokens(live: LivePlane, send: Send) -> None:
    before = Samples(send("GET", "/metrics")[2])
    complete(send, "metered-1")
    complete(send, "metered-2", stream=True)
    after = Samples(send("GET", "/metrics")[2])

    def grown(name: str) -> float:
        return (after.value(f"pointsman_{name}") or 0) - (before.value(f"pointsman_{name}") or 0)

    assert grown("requests_total") == 2
    assert grown("decisions_total") == 2
    assert grown("queue_seconds_count") == 2
    assert grown("request_seconds_count") == 2
    assert grown("first_token_seconds_count") == 1
    assert grown("between_tokens_seconds_count") >= 1
    assert grown("tokens_total") >= 8
    assert after.value("pointsman_instances") == 4
    assert after.value("pointsman_waiting_requests") == after.value("pointsman_running_requests") == 0
    strategies = {labels["strategy"] for labels in after.labels("pointsman_decisions_total")}
    assert strategies == {"slo-miss"}
    ready = [labels for labels in after.labels("pointsman_instance_phases_total") if labels["phase"] == "ready"]
    assert {labels["deployment"] for labels in ready} == {one["name"] for one in live.status()["deployments"]}
    assert after.value("pointsman_replicas") == after.value("pointsman_replicas_desired") == 4


@pytest.mark.skipif(which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_prometheus_finds_nothing_to_complain_about(send: Send) -> None:
    checked = subprocess.run(["promtool", "check", "metrics"], input=send("GET", "/metrics")[2], capture_output=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
