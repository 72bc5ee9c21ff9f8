"""Applying manifests under load: only what differs changes, and no request to a remaining model fails."""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest

from bench.chaos.load import Load
from bench.chaos.planes import LivePlane
from pointsman.cli.client import PlaneRefused
from tests.live.manifests import manifest, simulated

CUSTOM_POLICY = '''
from pointsman import ExecutionInstance, RequestMetadata, SchedulingDecision, SchedulingPolicy


class LastInstance(SchedulingPolicy):
    """Picks the last instance by name that has room."""

    def prioritize(self, requests: list[RequestMetadata]) -> list[RequestMetadata]:
        return requests

    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        room = {one.instance_id: (one.max_concurrency or 8) - one.current_load for one in instances}
        candidates = sorted((one.instance_id for one in instances if one.can_accept_request), reverse=True)
        decisions = []
        for request in requests:
            chosen = next((name for name in candidates if room[name] > 0), None)
            if chosen is not None:
                room[chosen] -= 1
                decisions.append(SchedulingDecision(request.request_id, chosen, reason="the last with room"))
        return decisions
'''
LATE_TENANT = "late"


@contextmanager
def under_load(plane: LivePlane, *models: str) -> Iterator[Load]:
    """Load on these models before, during and after the change; no request may fail."""
    with Load(plane.url, models, clients=8) as load:
        plane.until(lambda: len(load.samples) > 20, "load")
        yield load
        target = len(load.samples) + 20
        plane.until(lambda: len(load.samples) > target, "load afterwards")
    assert load.unexpected() == []
    print(f"\n{len(load.samples)} requests, all served")


def plan_and_apply(plane: LivePlane, text: str) -> list[dict[str, str]]:
    """Plan a manifest, apply it, wait until it is ready, and return the changes, which must equal the plan."""
    file = plane.write(text)
    planned = plane.pointsman("plan", file, "--json")
    assert planned.returncode == 0, planned.stderr
    done = plane.pointsman("apply", file, "--json", "--timeout", "60s")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["changes"] == json.loads(planned.stdout)["changes"]
    assert result["ready"] is True
    changes: list[dict[str, str]] = result["changes"]
    return changes


def kinds_and_subjects(changes: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(one["what"], one["subject"]) for one in changes]


def strategies_in_use(plane: LivePlane, load: Load) -> set[str]:
    """The strategies that decide requests sent from now on."""
    now = time.monotonic()
    plane.until(lambda: sum(one.began > now for one in list(load.samples)) > 10, "load")
    ids = [one.request.request_id for one in list(load.samples) if one.began > now]
    return {plane.admin.get("requests", one)["strategy"] for one in ids}


def test_a_policy_change_restarts_no_engine(plane: LivePlane) -> None:
    (plane.folder / "custom_policy.py").write_text(CUSTOM_POLICY, encoding="utf-8")
    plane.up(manifest(simulated("m", 2), simulated("other", 1)))
    before = plane.pids()
    with under_load(plane, "m", "other") as load:
        changes = plan_and_apply(
            plane, manifest(simulated("m", 2, scheduling={"policy": "slo-aware"}), simulated("other", 1))
        )
        assert kinds_and_subjects(changes) == [("policy", "m")]
        assert changes[0]["why"] == "slo-miss -> slo-aware"
        load.models = ["m"]
        assert strategies_in_use(plane, load) == {"slo-aware"}
        custom = simulated("m", 2, scheduling={"policy": "custom_policy:LastInstance"})
        changes = plan_and_apply(plane, manifest(custom, simulated("other", 1)))
        assert kinds_and_subjects(changes) == [("policy", "m")]
        [name] = strategies_in_use(plane, load)
        assert "last" in name.lower()
        load.models = ["m", "other"]
        changes = plan_and_apply(plane, manifest(simulated("m", 2), simulated("other", 1)))
        assert kinds_and_subjects(changes) == [("policy", "m")]
    assert plane.pids() == before


def test_changed_replicas_and_engine_parameters_affect_one_deployment(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 2), simulated("other", 1)))
    before = plane.pids()
    with under_load(plane, "m", "other"):
        changes = plan_and_apply(plane, manifest(simulated("m", 4), simulated("other", 1)))
        assert kinds_and_subjects(changes) == [("start", "m-3"), ("start", "m-4")]
        more = plane.pids()
        assert before.items() < more.items()

        changes = plan_and_apply(plane, manifest(simulated("m", 2), simulated("other", 1)))
        assert kinds_and_subjects(changes) == [("stop", "m-3"), ("stop", "m-4")]
        assert plane.pids() == before

        slower = simulated("m", 2, parameters={"tokensPerSecond": 150})
        changes = plan_and_apply(plane, manifest(slower, simulated("other", 1)))
        assert {("replace", "m-1"), ("replace", "m-2")} <= set(kinds_and_subjects(changes))
        assert "engine.tokensPerSecond 200 -> 150" in changes[0]["why"]
        after = plane.pids()
        assert len(after) == 3
        assert after["other-1"] == before["other-1"]
        assert not set(after.values()) & {before["m-1"], before["m-2"]}


def test_a_drained_instance_is_replaced(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 2)))
    before = plane.pids()
    with under_load(plane, "m"):
        assert plane.pointsman("drain", "m-1").returncode == 0
        plane.until(lambda: before["m-1"] not in plane.pids().values() and plane.is_settled(), "m-1 replaced")
        assert before["m-2"] in plane.pids().values()


def test_a_removed_deployment_finishes_its_requests(plane: LivePlane) -> None:
    """One request runs on its only instance; the others are queued."""
    other = simulated("other", 1, maxConcurrency=1, parameters={"tokensPerSecond": 100})
    plane.up(manifest(simulated("m", 2), other))
    statuses: list[int] = []
    with under_load(plane, "m", "other") as load:
        load.models = ["m"]
        waiting = [
            Thread(target=lambda: statuses.append(complete(plane, "other", 60, LATE_TENANT)[0])) for _ in range(4)
        ]
        for one in waiting:
            one.start()
        plane.until(lambda: late_requests(plane) == 4, "all four requests have arrived")
        without = {"text": manifest(simulated("m", 2)), "folder": str(plane.folder), "file": "without.yaml"}
        done = plane.admin.post("apply", body=without)
        assert kinds_and_subjects(done["changes"]) == [("close", "other"), ("stop", "other-1")]
        status, body = complete(plane, "other", 1)
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert statuses.count(200) < 4  # some were still in flight when it was removed
        for one in waiting:
            one.join()
        assert statuses == [200] * 4
        plane.until(plane.is_settled, "other is gone")
        assert list(plane.pids()) == ["m-1", "m-2"]


def late_requests(plane: LivePlane) -> int:
    """How many requests of LATE_TENANT the plane has recorded."""
    found: int = plane.admin.get("requests", tenant=LATE_TENANT)["found"]
    return found


def test_removing_a_deployment_refuses_the_requests_that_wait_for_its_first_instance(plane: LivePlane) -> None:
    never = simulated("never", 1, parameters={"startSeconds": 1000})
    plane.up(manifest(simulated("m", 1), never), wait=False)
    plane.until(lambda: "m-1" in plane.pids(), "m is ready")
    answers: list[tuple[int, Any]] = []
    waiting = Thread(target=lambda: answers.append(complete(plane, "never", 1)))
    waiting.start()
    plane.until(lambda: plane.status()["deployments"][1]["waiting"] == 1, "the request waits")
    assert plane.pointsman("apply", plane.write(manifest(simulated("m", 1)))).returncode == 0
    waiting.join()
    [(status, body)] = answers
    assert status == 503
    assert 'deployment "never" was removed' in body["error"]["message"]


def test_gateway_limits_change_without_a_restart(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 2)))
    large = "x" * 100_000
    with under_load(plane, "m"):
        assert complete(plane, "m", 1, prompt=large)[0] == 200
        changes = plan_and_apply(plane, manifest(simulated("m", 2), limits={"maxBodyBytes": "32Ki"}))
        assert kinds_and_subjects(changes) == [("gateway", "gateway.limits.maxBodyBytes")]
        assert complete(plane, "m", 1, prompt=large)[0] == 413


def test_invalid_and_unchanged_manifests_change_nothing(plane: LivePlane) -> None:
    text = manifest(simulated("m", 2))
    plane.up(text)
    pids, generation = plane.pids(), plane.status()["generation"]
    with under_load(plane, "m"):
        assert plan_and_apply(plane, text) == []
        result = plane.pointsman("apply", plane.folder / "manifest.yaml")
        assert result.stdout.strip() == "nothing has changed"

        wrong = text.replace('"replicas": 2', '"replicas": -2').replace('"simulated"', '"simulatd"')
        file = plane.write(wrong, "wrong.yaml")
        for command in ("plan", "apply"):
            result = plane.pointsman(command, file)
            assert result.returncode == 1
            assert (
                f"wrong.yaml:{line_of(wrong, 'replicas')}: deployments[0].replicas: must be at least 0" in result.stderr
            )
            assert f"wrong.yaml:{line_of(wrong, 'simulatd')}:" in result.stderr
            assert 'did you mean "simulated"?' in result.stderr
            assert "2 problems; nothing was applied" in result.stderr
        with pytest.raises(PlaneRefused) as refused:
            plane.admin.post("apply", body={"text": wrong, "folder": str(plane.folder), "file": "wrong.yaml"})
        assert refused.value.status == 422
        assert [one["line"] for one in refused.value.problems] == [
            line_of(wrong, "replicas"),
            line_of(wrong, "simulatd"),
        ]
        assert (plane.pids(), plane.status()["generation"]) == (pids, generation)


def line_of(text: str, word: str) -> int:
    return text[: text.index(word)].count("\n") + 1


def complete(plane: LivePlane, model: str, tokens: int, tenant: str = "team", prompt: str = "hello") -> tuple[int, Any]:
    """Status and body of a completion without streaming."""
    connection = http.client.HTTPConnection(urlsplit(plane.url).netloc, timeout=60.0)
    try:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"x-pointsman-tenant": tenant})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()
