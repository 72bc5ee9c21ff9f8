"""Scheduling policies of users on a real plane: what they do wrong costs only their own deployment, and shows."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.request import Request, urlopen

import pytest

from bench.chaos.planes import LivePlane
from pointsman.routing.user_code import STRIKES
from tests.live.manifests import manifest, simulated

SLEEP_S = 60.0
POLICIES = f"""
import time

from pointsman.strategies import SchedulingPolicy
from pointsman.types import ParallelismType, RequestMetadata, SchedulingDecision


class Moody(SchedulingPolicy):
    def __init__(self):
        super().__init__("Moody")

    def schedule(self, requests, instances):
        for request in requests:
            prompt = bytes(request.prompt)
            if b"sleep" in prompt:
                try:
                    time.sleep({SLEEP_S})
                except Exception:
                    pass
            if b"spin" in prompt:
                while True:
                    pass
            if b"raise" in prompt:
                raise LookupError("no idea")
            if b"forget" in prompt:
                return None
        return self.herd(requests, instances)

    def herd(self, requests, instances):
        first = min(instances, key=lambda one: one.instance_id)
        return [SchedulingDecision(one.request_id, first.instance_id, ParallelismType.NONE) for one in requests]


class OwnScorer:
    def scores(self, cycle, candidates):
        if b"too few" in bytes(cycle.request.prompt):
            return []
        if b"sleep" in bytes(cycle.request.prompt):
            time.sleep({SLEEP_S})
        return [1.0 for _ in candidates]
"""
PICKER = {
    "plugins": [{"type": "my_policies:OwnScorer", "name": "own-scorer"}],
    "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "own-scorer"}]}],
}


@pytest.fixture(scope="module")
def live(module_plane: LivePlane) -> LivePlane:
    (module_plane.folder / "my_policies.py").write_text(POLICIES, encoding="utf-8")
    slots = {"parameters": {"maxNumSeqs": 4, "tokensPerSecond": 20}}
    module_plane.up(
        manifest(
            simulated("moody", 2, maxConcurrency=4, scheduling={"policy": "my_policies:Moody"}, **slots),
            simulated("scored", 1, scheduling={"config": PICKER, "timeLimit": "10ms"}),
            simulated("other", 1),
            simulated("slo", 1, maxConcurrency=1, scheduling={"policy": "slo-aware"}, **slots),
        )
    )
    return module_plane


def complete(
    live: LivePlane, model: str, prompt: str, request_id: str, max_tokens: int = 2, deadline_ms: str = "60000"
) -> int:
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": max_tokens}).encode()
    headers = {"content-type": "application/json", "x-request-id": request_id, "x-pointsman-deadline-ms": deadline_ms}
    with urlopen(Request(f"{live.url}/v1/completions", body, headers), timeout=50.0) as response:
        response.read()
        return int(response.status)


def policies(live: LivePlane, deployment: str) -> dict[str, Any]:
    [one] = [one for one in live.status()["deployments"] if one["name"] == deployment]
    [told] = one["policies"]
    return dict(told)


def in_service(live: LivePlane) -> bool:
    """Whether the policy is asked again, and has answered."""
    complete(live, "moody", "a trial", f"trial-{time.monotonic_ns()}")
    return policies(live, "moody")["suspended_s"] is None


def test_a_burst_of_a_policy_that_herds_leaves_no_instance_idle(live: LivePlane) -> None:
    """Two instances with four slots, eight requests, and a policy that sends all of them to the first."""
    with ThreadPoolExecutor(8) as pool:
        served = [pool.submit(complete, live, "moody", "hello", f"burst-{n}", 60) for n in range(8)]
        live.until(lambda: sum(on_instances(live)) == 8, "all eight run")
        assert on_instances(live) == [4, 4]
        assert [one.result() for one in served] == [200] * 8
    records = [live.admin.get("requests", f"burst-{n}") for n in range(8)]
    again = [one for one in records if one["dropped"] is not None]
    assert [one["strategy"] for one in again] == ["fifo"] * 4
    assert {one["dropped"]["code"] for one in again} == {"decision-dropped"}
    assert {one["strategy"] for one in records} == {"Moody", "fifo"}


def on_instances(live: LivePlane) -> list[int]:
    return [one["in_flight"] for one in live.instances("moody").values()]


@pytest.mark.parametrize("how", ["sleep", "spin"])
def test_a_policy_that_blocks_holds_up_no_other_deployment(live: LivePlane, how: str) -> None:
    live.until(lambda: in_service(live), "the policy is in service")
    before = policies(live, "moody")["count"]
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        blocked = pool.submit(complete, live, "moody", how, f"{how}-1")
        assert complete(live, "other", "hello", f"{how}-beside") == 200
        assert blocked.result() == 200
    assert time.monotonic() - began < SLEEP_S / 2
    told = policies(live, "moody")
    assert (told["policy"], told["count"]) == ("Moody", before + 1)
    assert told["message"] == "was interrupted after 50 ms"
    assert told["last_s"] is not None
    record = live.admin.get("requests", f"{how}-1")
    assert (record["strategy"], record["dropped"]["code"]) == ("fifo", "stand-in-decided")
    assert record["dropped"]["facts"]["cause"]["code"] == "policy-blocked"


def test_a_policy_that_raises_is_suspended_shown_and_tried_again(live: LivePlane) -> None:
    live.until(lambda: in_service(live), "the policy is in service")
    for number in range(STRIKES):
        assert complete(live, "moody", "raise", f"raise-{number}") == 200
    told = policies(live, "moody")
    assert told["message"] == "raised LookupError: no idea"
    assert told["suspended_s"] > 0
    [problem] = [one["text"] for one in live.status()["problems"] if one["facts"].get("policy") == "Moody"]
    assert problem.startswith('deployment "moody": Moody raised LookupError: no idea (')
    assert "a stand-in decides, and it is tried again in" in problem
    explained = shown(live, "explain", "raise-0")
    assert "fifo decided, not Moody, which raised LookupError: no idea" in explained
    assert "Moody raised LookupError: no idea" in shown(live, "status")
    live.until(lambda: in_service(live), "the policy is in service again")
    assert complete(live, "moody", "hello", "after") == 200
    record = live.admin.get("requests", "after")
    assert (record["strategy"], record["dropped"]) == ("Moody", None)


def test_a_scorer_that_blocks_is_replaced(live: LivePlane) -> None:
    assert complete(live, "scored", "hello", "scored-1") == 200
    assert live.admin.get("requests", "scored-1")["dropped"] is None
    assert complete(live, "scored", "sleep", "scored-2") == 200
    record = live.admin.get("requests", "scored-2")
    assert (record["strategy"], record["dropped"]["facts"]["policy"]) == ("fifo", "own-scorer")
    assert policies(live, "scored")["message"] == "was interrupted after 100 ms"


def test_answers_of_the_wrong_form_are_shown(live: LivePlane) -> None:
    live.until(lambda: in_service(live), "the policy is in service")
    assert complete(live, "moody", "forget", "forgotten") == 200
    assert policies(live, "moody")["message"] == "returned None from schedule(), not a list of decisions"
    assert "not Moody, which returned None from schedule()" in shown(live, "explain", "forgotten")
    live.until(lambda: policies(live, "scored")["suspended_s"] is None, "the scorer may be tried again")
    assert complete(live, "scored", "too few", "too-few") == 200
    [problem] = [one["text"] for one in live.status()["problems"] if one["code"] == "answers-useless"]
    assert problem == (
        'deployment "scored": answers of its scheduling code could not be used (1 times, the last: '
        'plugin "own-scorer" gave 0 scores for 1 candidates); a stand-in decided; correct the code, and apply it again'
    )


def test_an_overdue_request_leaves_the_only_place_to_one_that_can_be_saved(live: LivePlane) -> None:
    with ThreadPoolExecutor(3) as pool:
        tasks = [pool.submit(complete, live, "slo", "hello", "slo-first", 20)]
        live.until(lambda: sum(one["in_flight"] for one in live.instances("slo").values()) == 1, "the first runs")
        for number, deadline_ms in enumerate(("1", "50000")):
            tasks.append(pool.submit(complete, live, "slo", "hello", f"slo-{deadline_ms}", 2, deadline_ms))
            live.until(partial(waits, live, "slo", number + 1), "it waits")
        assert [one.result() for one in tasks] == [200] * 3
    overdue, saved = (live.admin.get("requests", f"slo-{one}") for one in ("1", "50000"))
    assert overdue["waited_ms"] > saved["waited_ms"], "it came first and went last"


def waits(live: LivePlane, deployment: str, number: int) -> bool:
    found: int = sum(one["waiting"] for one in live.status()["deployments"] if one["name"] == deployment)
    return found == number


def shown(live: LivePlane, *command: str) -> str:
    """What a command of ours prints about this plane."""
    called = [sys.executable, "-m", "pointsman.cli.main", *command, "--state", str(live.state)]
    return subprocess.run(called, capture_output=True, text=True, check=False, timeout=60).stdout
