"""Changes of a running plane under load: only what differs is touched, and no request of a model that stays fails."""

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

OWN_POLICY = '''
from pointsman import ExecutionInstance, RequestMetadata, SchedulingDecision, SchedulingPolicy


class LastInstance(SchedulingPolicy):
    """Whoever comes last in the alphabet and has room."""

    def prioritize(self, requests: list[RequestMetadata]) -> list[RequestMetadata]:
        return requests

    def schedule(self, requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[SchedulingDecision]:
        room = {one.instance_id: (one.max_concurrency or 8) - one.current_load for one in instances}
        able = sorted((one.instance_id for one in instances if one.can_accept_request), reverse=True)
        made = []
        for request in requests:
            chosen = next((name for name in able if room[name] > 0), None)
            if chosen is not None:
                room[chosen] -= 1
                made.append(SchedulingDecision(request.request_id, chosen, reason="the last with room"))
        return made
'''


LATE = "late"


@contextmanager
def under_load(plane: LivePlane, *models: str) -> Iterator[Load]:
    """Load on these models before, during and after; no request may fail."""
    with Load(plane.url, models, clients=8) as load:
        plane.until(lambda: len(load.samples) > 20, "load")
        yield load
        enough = len(load.samples) + 20
        plane.until(lambda: len(load.samples) > enough, "load afterwards")
    assert load.bad() == []
    print(f"\n{len(load.samples)} requests, all served")


def applied(plane: LivePlane, text: str) -> list[dict[str, str]]:
    """Plan and apply a manifest; what changed, which is what was planned. It waits until everything is ready."""
    file = plane.write(text)
    planned = plane.pointsman("plan", file, "--json")
    assert planned.returncode == 0, planned.stderr
    done = plane.pointsman("apply", file, "--json", "--timeout", "60s")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["changes"] == json.loads(planned.stdout)["changes"]
    assert told["ready"] is True
    changes: list[dict[str, str]] = told["changes"]
    return changes


def whats(changes: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(one["what"], one["subject"]) for one in changes]


def decided_by(plane: LivePlane, load: Load) -> set[str]:
    """Who decides about requests that come from now on."""
    now = time.monotonic()
    plane.until(lambda: sum(one.began > now for one in list(load.samples)) > 10, "load")
    ids = [one.ask.request_id for one in list(load.samples) if one.began > now]
    return {plane.admin.get("requests", one)["strategy"] for one in ids}


def test_policies(plane: LivePlane) -> None:
    (plane.folder / "house_policy.py").write_text(OWN_POLICY, encoding="utf-8")
    plane.up(manifest(simulated("m", 2), simulated("other", 1)))
    before = plane.pids()
    with under_load(plane, "m", "other") as load:
        changes = applied(plane, manifest(simulated("m", 2, scheduling={"policy": "slo-aware"}), simulated("other", 1)))
        assert whats(changes) == [("policy", "m")]
        assert changes[0]["why"] == "endpoint picker -> slo-aware"
        load.models = ["m"]
        assert decided_by(plane, load) == {"slo-aware"}
        own = simulated("m", 2, scheduling={"policy": "house_policy:LastInstance"})
        changes = applied(plane, manifest(own, simulated("other", 1)))
        assert whats(changes) == [("policy", "m")]
        [name] = decided_by(plane, load)
        assert "last" in name.lower()
        load.models = ["m", "other"]
        changes = applied(plane, manifest(simulated("m", 2), simulated("other", 1)))
        assert whats(changes) == [("policy", "m")]
    assert plane.pids() == before  # no engine was touched


def test_replicas_and_engine_parameters(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 2), simulated("other", 1)))
    before = plane.pids()
    with under_load(plane, "m", "other"):
        changes = applied(plane, manifest(simulated("m", 4), simulated("other", 1)))
        assert whats(changes) == [("start", "m-3"), ("start", "m-4")]
        more = plane.pids()
        assert before.items() < more.items()

        changes = applied(plane, manifest(simulated("m", 2), simulated("other", 1)))
        assert whats(changes) == [("stop", "m-3"), ("stop", "m-4")]
        assert plane.pids() == before

        slower = simulated("m", 2, parameters={"tokensPerSecond": 150})
        changes = applied(plane, manifest(slower, simulated("other", 1)))
        assert {("replace", "m-1"), ("replace", "m-2")} <= set(whats(changes))
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


def test_a_removed_deployment_finishes_what_it_has(plane: LivePlane) -> None:
    """One request is under way on its only instance, and others wait for it."""
    other = simulated("other", 1, maxConcurrency=1, parameters={"tokensPerSecond": 100})
    plane.up(manifest(simulated("m", 2), other))
    statuses: list[int] = []
    with under_load(plane, "m", "other") as load:
        load.models = ["m"]
        waiting = [Thread(target=lambda: statuses.append(complete(plane, "other", 60, LATE)[0])) for _ in range(4)]
        for one in waiting:
            one.start()
        plane.until(lambda: late_ones(plane) == 4, "all four have come")
        without = {"text": manifest(simulated("m", 2)), "folder": str(plane.folder), "file": "without.yaml"}
        done = plane.admin.post("apply", body=without)
        assert whats(done["changes"]) == [("close", "other"), ("stop", "other-1")]
        status, said = complete(plane, "other", 1)
        assert (status, said["error"]["code"]) == (404, "model_not_found")
        assert statuses.count(200) < 4  # some were still under way when it was removed
        for one in waiting:
            one.join()
        assert statuses == [200] * 4
        plane.until(plane.is_settled, "other is gone")
        assert list(plane.pids()) == ["m-1", "m-2"]


def late_ones(plane: LivePlane) -> int:
    """Requests with a tenant of that name."""
    found: int = plane.admin.get("requests", tenant=LATE)["found"]
    return found


def test_who_waits_for_a_removed_deployment_without_instances_is_told(plane: LivePlane) -> None:
    never = simulated("never", 1, parameters={"startSeconds": 1000})
    plane.up(manifest(simulated("m", 1), never), wait=False)
    plane.until(lambda: "m-1" in plane.pids(), "m is ready")
    answers: list[tuple[int, Any]] = []
    waiting = Thread(target=lambda: answers.append(complete(plane, "never", 1)))
    waiting.start()
    plane.until(lambda: plane.status()["deployments"][1]["waiting"] == 1, "it waits")
    assert plane.pointsman("apply", plane.write(manifest(simulated("m", 1)))).returncode == 0
    waiting.join()
    [(status, said)] = answers
    assert status == 503
    assert 'deployment "never" was removed' in said["error"]["message"]


def test_limits_of_the_gateway(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 2)))
    large = "x" * 100_000
    with under_load(plane, "m"):
        assert complete(plane, "m", 1, prompt=large)[0] == 200
        changes = applied(plane, manifest(simulated("m", 2), limits={"maxBodyBytes": "32Ki"}))
        assert whats(changes) == [("gateway", "gateway.limits.maxBodyBytes")]
        assert complete(plane, "m", 1, prompt=large)[0] == 413


def test_mistakes_and_repetitions_change_nothing(plane: LivePlane) -> None:
    text = manifest(simulated("m", 2))
    plane.up(text)
    pids, generation = plane.pids(), plane.status()["generation"]
    with under_load(plane, "m"):
        assert applied(plane, text) == []
        said = plane.pointsman("apply", plane.folder / "manifest.yaml")
        assert said.stdout.strip() == "nothing has changed"

        wrong = text.replace('"replicas": 2', '"replicas": -2').replace('"simulated"', '"simulatd"')
        file = plane.write(wrong, "wrong.yaml")
        for command in ("plan", "apply"):
            said = plane.pointsman(command, file)
            assert said.returncode == 1
            assert (
                f"wrong.yaml:{line_of(wrong, 'replicas')}: deployments[0].replicas: must be at least 0" in said.stderr
            )
            assert f"wrong.yaml:{line_of(wrong, 'simulatd')}:" in said.stderr
            assert 'did you mean "simulated"?' in said.stderr
            assert "2 problems; nothing of it was applied" in said.stderr
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


def complete(
    plane: LivePlane, model: str, tokens: int, tenant: str = "somebody", prompt: str = "hello"
) -> tuple[int, Any]:
    """A plain completion."""
    connection = http.client.HTTPConnection(urlsplit(plane.url).netloc, timeout=60.0)
    try:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"x-pointsman-tenant": tenant})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()
