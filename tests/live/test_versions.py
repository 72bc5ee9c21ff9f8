"""Versions: manifests have a history to return to, and edited code is part of what is applied."""

import json
import os
import signal
from typing import Any

import httpx2 as httpx
import pytest

from bench.chaos.planes import LivePlane
from pointsman.cli.client import PlaneRefused
from pointsman.pipeline.sources import MAX_KEPT_BYTES
from tests.live.manifests import manifest, simulated

POLICY = """
from own_order import REASON
from pointsman import SchedulingDecision, SchedulingPolicy

class Mine(SchedulingPolicy):
    def prioritize(self, requests):
        return requests

    def schedule(self, requests, instances):
        return [SchedulingDecision(one.request_id, instances[0].instance_id, reason=REASON) for one in requests]
"""
MINE = manifest(
    simulated("m", 1, scheduling={"policy": "own_scheduling:Mine"}, parameters={"tokensPerSecond": 5000}),
    simulated("other", 1, scheduling={"policy": "fifo"}),
)
APP = """
kind: Application
name: shop
nodes: [{name: one, function: "own_nodes.py:answer"}]
calls: [{id: a, node: one, args: [{$input: []}]}]
output: {$step: a}
"""


@pytest.fixture(scope="module")
def plane(module_plane: LivePlane) -> LivePlane:
    module_plane.write(POLICY, "own_scheduling.py")
    module_plane.write("REASON = 'first'\n", "own_order.py")
    module_plane.write("from own_words import WORD\ndef answer(given): return WORD\n", "own_nodes.py")
    module_plane.write("WORD = 'one'\n", "own_words.py")
    module_plane.up(MINE)
    return module_plane


def body(plane: LivePlane, text: str, **more: Any) -> dict[str, Any]:
    return {"text": text, "folder": str(plane.folder), "file": "m.yaml", **more}


def reason(plane: LivePlane) -> str:
    """Why the policy sent a request to its instance."""
    asked = {"model": "m", "prompt": "x", "max_tokens": 1}
    answer = httpx.post(f"{plane.url}/v1/completions", json=asked, timeout=30)
    assert answer.status_code == 200
    record = plane.admin.get("requests", answer.headers["x-request-id"])
    return str(record["decision"]["reason"]["text"])


def changes(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["what"], one["subject"]) for one in answer["changes"]]


def test_an_edited_module_of_a_policy_is_taken_up(plane: LivePlane) -> None:
    assert reason(plane) == "first"
    file = plane.write(MINE, "m.yaml")
    assert plane.pointsman("apply", file).stdout.startswith("nothing has changed")
    pids = plane.pids()
    plane.write("REASON = 'other'\n", "own_order.py")  # of the same length, and imported by the policy only
    assert reason(plane) == "first"
    planned = plane.admin.post("plan", body=body(plane, MINE))
    assert changes(planned) == [("policy", "m")]
    assert planned["changes"][0]["why"].endswith("its code has changed")
    assert reason(plane) == "first", "planning changes nothing"
    assert changes(plane.admin.post("apply", body=body(plane, MINE))) == [("policy", "m")]
    assert reason(plane) == "other"
    assert changes(plane.admin.post("apply", body=body(plane, MINE))) == []
    assert plane.pids() == pids


def test_code_that_does_not_load_changes_nothing(plane: LivePlane) -> None:
    before = reason(plane)
    plane.write("raise RuntimeError('broken')\n", "own_order.py")
    with pytest.raises(PlaneRefused, match="broken"):
        plane.admin.post("apply", body=body(plane, MINE))
    assert reason(plane) == before
    plane.write("REASON = 'again'\n", "own_order.py")
    plane.admin.post("apply", body=body(plane, MINE))
    assert reason(plane) == "again"


def word(plane: LivePlane) -> str:
    answer = httpx.post(f"{plane.url}/shop", json=None, timeout=30)
    assert answer.status_code == 200, answer.text
    return str(answer.json())


def test_edited_code_of_an_application_is_taken_up_and_a_rollback_brings_the_code_back(plane: LivePlane) -> None:
    plane.admin.post("applications", body=body(plane, APP))
    plane.until(plane.is_settled, "shop ready")
    assert word(plane) == "one"
    assert changes(plane.admin.post("applications", body=body(plane, APP))) == []
    plane.write("WORD = 'two'\n", "own_words.py")
    done = plane.admin.post("applications", body=body(plane, APP))
    assert ("replace", "shop.one-1") in changes(done)
    assert done["changes"][0]["why"].startswith("code version ")
    plane.until(lambda: plane.is_settled() and word(plane) == "two", "the new code")
    (plane.folder / "own_words.py").unlink()
    restored = plane.pointsman("rollback", "shop")
    assert restored.returncode == 0, restored.stderr
    assert word(plane) == "one", "from a file that is gone"
    plane.write("WORD = 'one'\n", "own_words.py")


def test_what_runs_is_what_was_deployed_after_edits_crashes_and_restarts(plane: LivePlane) -> None:
    plane.admin.post("applications", body=body(plane, APP))
    plane.until(plane.is_settled, "shop ready")
    before = word(plane)
    plane.write("WORD = 'new'\n", "own_words.py")
    plane.write("from own_words import WORD\ndef answer(given): return WORD + '!'\n", "own_nodes.py")
    [(name, process)] = plane.pids("shop.one").items()
    os.kill(process, signal.SIGKILL)
    plane.until(lambda: plane.pids("shop.one").get(name, process) != process, "it is back")
    assert word(plane) == before
    plane.stop()
    plane.up()
    plane.until(plane.is_settled, "the plane is back")
    assert word(plane) == before
    assert plane.status()["problems"] == []
    done = plane.admin.post("applications", body=body(plane, APP))
    assert ("replace", "shop.one-1") in changes(done)
    plane.until(lambda: plane.is_settled() and word(plane) == "new!", "the edited code is in force")


def test_code_that_is_too_large_to_be_kept_is_named_and_not_rolled_back(plane: LivePlane) -> None:
    """A replica that crashed after an edit starts with the edited code then."""
    large = f"TABLE = {os.urandom(MAX_KEPT_BYTES).hex()!r}\n"
    plane.write(large + "WORD = 'large'\n", "own_words.py")
    plane.admin.post("applications", body=body(plane, APP))
    plane.until(lambda: plane.is_settled() and word(plane).startswith("large"), "shop ready")
    plane.write(large + "WORD = 'edited'\n", "own_words.py")
    [(name, process)] = plane.pids("shop.one").items()
    os.kill(process, signal.SIGKILL)
    plane.until(lambda: plane.pids("shop.one").get(name, process) != process, "it is back")
    assert word(plane).startswith("edited")
    [problem] = plane.status()["problems"]
    assert problem["text"].startswith(
        f"{name} runs code that was edited since it was deployed; to put the edited code in force"
    )
    plane.admin.post("applications", body=body(plane, APP))
    plane.until(lambda: plane.is_settled() and plane.status()["problems"] == [], "the edited code is in force")
    refused = plane.pointsman("rollback", "shop")
    assert refused.returncode == 1
    assert "the code of that version is no longer available" in refused.stderr
    assert f" rollback shop --state {plane.state}\n" in refused.stderr.partition("Restore them, and use: ")[2]
    plane.write("from own_words import WORD\ndef answer(given): return WORD\n", "own_nodes.py")
    plane.write("WORD = 'one'\n", "own_words.py")


def test_manifests_have_a_history_and_are_rolled_back(plane: LivePlane) -> None:
    limited = [
        manifest(*json.loads(MINE)["deployments"], tenants=[{"name": "alice", "tokensPerMinute": most}])
        for most in (500, 600, 700)
    ]
    generations = []
    for text in limited:
        plane.admin.post("apply", body=body(plane, text))
        generations.append(plane.status()["generation"])
    newest = plane.admin.get("history")["manifests"][0]
    assert (newest["generation"], newest["in_force"]) == (generations[-1], True)
    assert newest["summary"] == "gateway gateway.tenants.alice.tokensPerMinute"
    done = plane.pointsman("rollback")
    assert done.returncode == 0, done.stderr
    assert "700 -> 600" in done.stdout
    again = plane.admin.post("rollback")
    assert "600 -> 500" in again["text"], "a second one goes further back"
    shown = plane.pointsman("history").stdout.splitlines()
    assert f"back to {generations[0]}: " in shown[2]
    assert "(in force)" in shown[2]
    done = plane.pointsman("rollback", "--to", str(generations[2]), "--json")
    assert done.returncode == 0, done.stderr
    assert "500 -> 700" in json.loads(done.stdout)["changes"][0]["why"]
    with pytest.raises(PlaneRefused, match="there is no manifest of generation 9999"):
        plane.admin.post("rollback", body={"generation": 9999})
    plane.write("REASON = 'not of any of them'\n", "own_order.py")
    with pytest.raises(PlaneRefused, match=f"no longer available.* rollback --to {generations[0]}"):
        plane.admin.post("rollback", body={"generation": generations[0]})
