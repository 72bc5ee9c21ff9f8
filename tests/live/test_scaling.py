"""Scaling on a real plane under load: instances come and go, and every request is served."""

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx

import pointsman as pm
from bench.chaos.clients import check_token_count
from bench.chaos.load import Load
from bench.chaos.planes import LivePlane
from pointsman.runtimes.machine.detection.system import this_machine
from tests.live.manifests import llama, manifest, simulated
from tests.live.pipeline_nodes import Watched

QUICK = {"max": 3, "downDelay": "1s", "idleTimeout": "1s", "interval": "200ms"}
TWO_PER_REPLICA = {"target": 2, "lookBack": "1s"}
"""Parameters of target-ongoing."""


def scaled(deployment: dict[str, Any], **scaling: Any) -> dict[str, Any]:
    """The deployment with a `scaling` block of short delays."""
    return {key: value for key, value in deployment.items() if key != "replicas"} | {
        "scaling": {**QUICK, "parameters": TWO_PER_REPLICA, **scaling}
    }


def ready(plane: LivePlane, deployment: str) -> Callable[[int], bool]:
    """A function that tells whether exactly this many instances exist and all are ready."""
    return lambda count: len(plane.pids(deployment)) == count == len(plane.instances(deployment))


def changes(plane: LivePlane, deployment: str) -> list[tuple[int, int]]:
    records = plane.admin.get("deployments", deployment, "scaling")["records"]
    return [(one["before"], one["after"]) for one in records if one["before"] != one["after"]]


def complete(plane: LivePlane, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": "hello", "max_tokens": 3, **more}
    return httpx.post(f"{plane.url}/v1/completions", json=body, timeout=60)


def test_a_burst_scales_real_engines_from_one_to_three_and_back(plane: LivePlane) -> None:
    plane.up(manifest(scaled(llama("tiny"))))
    has_ready = ready(plane, "tiny")
    assert has_ready(1)
    with Load(plane.url, ["tiny"], clients=12, tokens=(20, 60), check=check_token_count) as load:
        plane.until(lambda: has_ready(3), "three instances")
        three_at = len(load.samples)
        plane.until(lambda: len(load.samples) > three_at + 30, "load on all three instances")
    assert load.unexpected() == []
    with Load(plane.url, ["tiny"], clients=1, check=check_token_count) as load:  # instances stop while this load runs
        plane.until(lambda: has_ready(1), "one instance again")
        plane.until(lambda: len(load.samples) > 5, "load on the last instance")
    assert load.unexpected() == []
    steps = changes(plane, "tiny")
    assert steps[0][0] == 1
    assert max(after for _, after in steps) == 3
    assert steps[-1][1] == 1
    text = plane.pointsman("explain", "deployment", "tiny").stdout
    print(f"\n{text}")
    assert "tiny: target 1 (1 to 3), decided by target-ongoing" in text
    assert "requests (mean of 1 s), 2 per replica" in text
    assert plane.status()["problems"] == []


def test_the_first_request_starts_a_deployment_from_zero(plane: LivePlane) -> None:
    plane.up(manifest(scaled(simulated("m"), min=0), scaled(llama("tiny"), min=0)))
    assert plane.instances() == {}
    assert httpx.get(f"{plane.url}/ready").status_code == 200
    for model in ("tiny", "m"):
        began = time.monotonic()
        answer = complete(plane, model)
        assert (answer.status_code, answer.json()["model"]) == (200, model)
        print(f"\n{model}: the first request was answered after {time.monotonic() - began:.2f} s, including the start")
        plane.until(lambda: not plane.instances(), "no instance without requests")
        assert changes(plane, model) == [(0, 1), (1, 0)]
    with Load(plane.url, ["m"], clients=6) as load:
        plane.until(lambda: len(load.samples) > 60, "load from zero")
    assert load.unexpected() == []


def test_two_busy_models_that_do_not_fit_together_take_turns(plane: LivePlane) -> None:
    most = {"cpus": this_machine().cpus * 0.75, "resources": {"gpus": 0, "memory": "64Mi"}}
    turns = {"min": 0, "max": 1, "turn": "1s"}
    names = ("one", "two")
    plane.up(manifest(*(scaled(llama(name) | {"placement": most}, **turns) for name in names)))
    assert plane.instances() == {}

    def reasons(name: str) -> list[str]:
        return [one["why"] for one in plane.admin.get("deployments", name, "scaling")["records"]]

    loads = [
        Load(plane.url, [name], clients=3, seed=seed, tokens=(20, 60), check=check_token_count)
        for seed, name in enumerate(names)
    ]
    with loads[0], loads[1]:
        plane.until(lambda: all(any(f"{name}-1 makes room" in why for why in reasons(name)) for name in names), "turns")
    assert [load.unexpected() for load in loads] == [[], []]
    assert [changes(plane, name)[0] for name in names] == [(0, 1), (0, 1)]


def test_scaling_down_lets_streams_outlast_the_drain_timeout(plane: LivePlane) -> None:
    slow = simulated("m", parameters={"tokensPerSecond": 10, "maxNumSeqs": 1})
    slow["lifecycle"] = {**slow["lifecycle"], "drainTimeout": "500ms"}
    plane.up(manifest(scaled(slow, initial=2, downDelay="1h")))
    plane.until(lambda: ready(plane, "m")(2), "two instances")
    with Load(plane.url, ["m"], clients=2, tokens=(20, 25)) as load:
        plane.until(
            lambda: plane.admin.get("deployments", "m", "scaling")["ongoing"] == 2, "one stream on each instance"
        )
        assert plane.pointsman("scale", "m", "--replicas", "1").returncode == 0
        plane.until(lambda: ready(plane, "m")(1), "one instance")
    assert load.unexpected() == []


def test_a_request_that_waits_too_long_for_a_first_instance_gets_retry_after(plane: LivePlane) -> None:
    flow = {
        "featureGates": ["flowControl"],
        "flowControl": {"noEndpointRequestTTL": "500ms"},
    }
    slow = simulated("m", parameters={"startSeconds": 5}, scheduling={"config": flow})
    plane.up(manifest(scaled(slow, min=0)))
    answer = complete(plane, "m")
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert "no instance is running" in answer.json()["error"]["message"]
    plane.until(lambda: plane.pids("m"), "the instance starts nevertheless")
    assert complete(plane, "m").status_code == 200


def test_a_failing_engine_is_reported_to_clients_without_its_output_and_to_operators_with_it(plane: LivePlane) -> None:
    broken = {
        "name": "broken",
        "model": "broken",
        "engine": {
            "type": "command",
            "parameters": {"command": ["sh", "-c", "echo cannot load the weights at {port} >&2; exit 7"]},
        },
        "lifecycle": {"backoff": "5s"},
        "scheduling": {"config": {"featureGates": ["flowControl"], "flowControl": {"noEndpointRequestTTL": "1s"}}},
    }
    plane.up(manifest(scaled(broken, min=0, max=3)))
    with ThreadPoolExecutor() as clients:
        answers = list(clients.map(lambda _: complete(plane, "broken"), range(4)))
    assert {answer.status_code for answer in answers} == {503}
    assert 1 < int(answers[0].headers["retry-after"]) <= 5, "until the next restart"
    message = answers[0].json()["error"]["message"]
    assert re.search(r"no instance is running; .*; broken-1 has failed once, and restarts in [1-5] s", message)
    assert "weights" not in message, "clients do not see the output of the engine"
    plane.until(
        lambda: "exit code 7" in plane.pointsman("explain", "deployment", "broken").stdout, "the failure in explain"
    )
    why = plane.pointsman("explain", "deployment", "broken").stdout
    assert "problem: broken-1 does not run: exit code 7: cannot load the weights at" in why
    assert changes(plane, "broken")[0] == (0, 1)
    assert max(after for _, after in changes(plane, "broken")) == 1, "further instances would fail as well"
    began = time.monotonic()
    timed_out = httpx.post(
        f"{plane.url}/v1/completions",
        json={"model": "broken", "prompt": "hello"},
        headers={"x-pointsman-timeout-s": "0.3"},
        timeout=60,
    )
    assert (timed_out.status_code, time.monotonic() - began < 1.0) == (503, True)
    assert "its own deadline allowed 0.3 s" in timed_out.json()["error"]["message"]


def test_a_second_plane_in_the_same_directory_leaves_the_first_running(plane: LivePlane) -> None:
    plane.up(manifest(scaled(simulated("m"))))
    again = plane.pointsman("up", plane.folder / "manifest.yaml")
    assert again.returncode == 1
    assert "a plane runs in" in again.stderr
    assert plane.pointsman("status").returncode == 0, "the admin API of the first plane still responds"
    assert complete(plane, "m").status_code == 200


PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


def write_policy_from_docs(plane: LivePlane, file: str) -> None:
    """Write a policy that docs/scaling.md shows."""
    found = re.search(rf"^```python\n(# file: {file}\n.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert found is not None, f"{PAGE} has no {file}"
    (plane.folder / file).write_text(found[1], encoding="utf-8")


def utc_offset_of_a_wednesday_noon() -> float:
    """The UTC offset, in hours, of a clock that now shows noon on a Wednesday."""
    noon = 6 * 86400 + 12 * 3600  # of the first Wednesday after the epoch
    return (noon - time.time()) / 3600


BROKEN_POLICIES = """\
import time

def raises(view):
    raise RuntimeError("no idea")

def negative(view):
    return -3

def text(view):
    return "many"

def slow(view):
    time.sleep(1)
    return 3
"""


def test_broken_policies_are_reported_and_affect_no_other_deployment(plane: LivePlane) -> None:
    write_policy_from_docs(plane, "business_hours.py")
    (plane.folder / "broken.py").write_text(BROKEN_POLICIES)
    in_hours = {"replicas": 2, "utcOffsetH": utc_offset_of_a_wednesday_noon()}  # whenever this test runs
    names = ("raises", "negative", "text", "slow")
    plane.up(
        manifest(
            scaled(simulated("hours"), policy="business_hours:business_hours", parameters=in_hours),
            *(scaled(simulated(name), policy=f"broken:{name}", parameters={}, initial=1) for name in names),
        ),
        wait=False,
    )
    plane.until(lambda: ready(plane, "hours")(2), "two instances in business hours")
    plane.until(lambda: len(plane.status()["problems"]) == len(names), "a problem for each broken policy")
    problems = "\n".join(one["text"] for one in plane.status()["problems"])
    assert "broken:raises" in problems
    assert "raised RuntimeError: no idea" in problems
    assert "returned -3" in problems
    assert "returned 'many'" in problems
    assert " 0.5 s (timeLimit)" in problems
    assert " 0.5 s (timeLimit)" in plane.pointsman("explain", "deployment", "slow").stdout
    assert any("timeLimit" in one["problem"] for one in plane.admin.get("deployments", "slow", "scaling")["records"])
    with Load(plane.url, list(names), clients=4) as load:
        plane.until(lambda: len(load.samples) > 40, "load")
    assert load.unexpected() == []
    assert all(ready(plane, name)(1) for name in names)
    metrics = httpx.get(f"{plane.url}/metrics").text
    assert 'pointsman_scaling_target{deployment="hours",policy="business_hours:business_hours"} 2' in metrics
    assert 'pointsman_scaling_policy_errors_total{deployment="raises",policy="broken:raises"}' in metrics
    assert "business_hours:business_hours" in plane.pointsman("status").stdout


def test_a_policy_reads_metrics_that_a_node_records(plane: LivePlane) -> None:
    plane.up(manifest(simulated("m", 1)))
    write_policy_from_docs(plane, "pages_waiting.py")
    scaling = {**QUICK, "policy": "pages_waiting:PagesWaiting", "parameters": {"pagesPerReplica": 10}}
    with pm.InputNode() as value:
        root = Watched.options(scaling=scaling).bind().look.bind(value)
    text = pm.build(root, name="camera", folder=plane.folder).to_yaml()
    plane.admin.post("applications", body={"text": text, "folder": str(plane.folder)})
    plane.until(plane.is_settled, "one replica")
    assert httpx.post(f"{plane.url}/camera", json=20, timeout=30).json() == 20
    plane.until(lambda: ready(plane, "camera.watched")(2), "two replicas for twenty pages")
    plane.until(
        lambda: plane.admin.get("deployments", "camera/watched", "scaling")["wanted"] == 2, "the policy wants two"
    )
    from_zero = {**QUICK, "min": 0, "parameters": TWO_PER_REPLICA}
    with pm.InputNode() as value:
        root = Watched.options(scaling=from_zero).bind().look.bind(value)
    text = pm.build(root, name="rare", folder=plane.folder).to_yaml()
    plane.admin.post("applications", body={"text": text, "folder": str(plane.folder)})
    assert plane.instances("rare.watched") == {}
    assert httpx.post(f"{plane.url}/rare", json=7, timeout=30).json() == 7
    plane.until(lambda: not plane.instances("rare.watched"), "no instance without requests")
    assert "rare.watched" in plane.pointsman("status", "rare").stdout


def test_a_temporary_override_survives_a_restart_of_the_plane_and_expires(plane: LivePlane) -> None:
    plane.up(manifest(scaled(simulated("m"))))
    assert plane.pointsman("scale", "m", "--replicas", "9").returncode == 1
    done = plane.pointsman("scale", "m", "--replicas", "3", "--for", "6s")
    assert done.stdout.startswith("m: target 3, for 6s; see: ")
    plane.until(lambda: ready(plane, "m")(3), "three instances")
    pids = plane.pids("m")
    plane.kill()
    plane.up()
    assert plane.pids("m") == pids
    scaling = plane.admin.get("deployments", "m", "scaling")
    assert (scaling["desired"], scaling["override"]["by"]) == (3, "pointsman scale")
    plane.until(lambda: ready(plane, "m")(1), "one instance when the override expires")
    plane.pointsman("scale", "m", "--replicas", "2")
    plane.until(lambda: ready(plane, "m")(2), "two instances")
    assert plane.pointsman("apply", plane.folder / "manifest.yaml").returncode == 0
    assert ready(plane, "m")(2)
    assert "target-ongoing decides" in plane.pointsman("scale", "m", "--auto").stdout
    plane.until(lambda: ready(plane, "m")(1), "one instance")
    explained = json.loads(plane.pointsman("explain", "deployment", "m", "--json").stdout)
    assert explained["override"] is None
    assert changes(plane, "m") == [(1, 3), (3, 1), (1, 2), (2, 1)]
