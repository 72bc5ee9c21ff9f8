"""`pointsman_scaling` on a real Serve application: it scales by deadlines, and policies that fail stop nothing."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from pointsman.errors import ConfigError
from tests.integrations.ray_serve.conftest import Cluster, until

pytestmark = pytest.mark.ray


def scaled(name: str) -> dict[str, Any]:
    """What the scaling policy of an application has last reported."""
    from pointsman.integrations.ray_serve import status

    found: dict[str, Any] = status()["scaled"].get(f"{name}/Working", {})
    return found


def reports(name: str, code: str) -> dict[str, Any]:
    """Wait for a problem and return its facts. On a busy machine, any policy may sometimes be too slow instead."""

    def facts() -> dict[str, Any] | None:
        problem = scaled(name).get("reasons", {}).get("problem") or {}
        return problem["facts"] if problem.get("code") == code else None

    found: dict[str, Any] = until(facts, f"{name} reports {code}")
    return found


def running(name: str) -> int:
    from ray import serve

    states = serve.status().applications[name].deployments["Working"].replica_states
    return int(states.get("RUNNING", 0))


def test_missed_deadlines_scale_an_application_and_broken_policies_stop_nothing(cluster: Cluster) -> None:
    """One application after the other: a policy that fails in Serve's controller would stop the next ones."""
    from pointsman.integrations.ray_serve import pointsman_scaling
    from tests.integrations.ray_serve.serve_apps import Overloaded, empty, raises, sleeps
    from tests.integrations.ray_serve.serve_apps import scaled as application

    cluster.run(application(pointsman_scaling(raises, interval_s=0.2)), "raises-scaling")
    cluster.run(application(pointsman_scaling(empty, interval_s=0.2)), "empty-scaling")
    cluster.run(application(pointsman_scaling(sleeps, interval_s=0.2, time_limit_s=0.2)), "sleeps-scaling")
    policy = pointsman_scaling(Overloaded(), interval_s=0.5)
    cluster.run(application(policy, policy="slo-aware"), "deadlines")
    stop = Event()

    def load() -> None:
        while not stop.is_set():
            assert cluster.ask("/deadlines", {"x-pointsman-deadline-ms": "60"}).status == 200

    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(load) for _ in range(6)]
        try:
            until(lambda: running("deadlines") == 3, "missed deadlines add replicas", 90)
        finally:
            stop.set()
        for client in clients:
            client.result()
    records = scaled("deadlines")["records"]
    assert [(one["before"], one["after"]) for one in records if one["after"] != one["before"]] == [(1, 2), (2, 3)]
    assert reports("raises-scaling", "policy-raised")["text"] == "raised ZeroDivisionError: of the scaling policy"
    assert reports("empty-scaling", "policy-answer-invalid")["found"] == "None"
    assert reports("sleeps-scaling", "policy-too-slow")["limit_s"] == 0.2
    broken = ("raises-scaling", "empty-scaling", "sleeps-scaling")
    for name in broken:
        assert running(name) == 1
        assert cluster.ask(f"/{name}").status == 200
    for name in (*broken, "deadlines"):
        cluster.delete(name)


def test_none_is_an_answer_of_a_policy() -> None:
    from pointsman.integrations.ray_serve.scaling import NOT_YET, PolicyCall
    from pointsman.scaling.policy import TooSlow
    from tests.scaling.views import view

    def late(about: Any) -> None:
        release.wait(60)

    release = Event()
    call = PolicyCall(lambda about: None, view())
    assert until(lambda: [answer for answer in [call.answer(60)] if answer is not NOT_YET], "it answers") == [None]
    call = PolicyCall(late, view())
    assert call.answer(60) is NOT_YET
    assert isinstance(call.answer(0), TooSlow)
    release.set()
    assert until(lambda: not isinstance(found := call.answer(0), TooSlow) and [found], "it answers late") == [None]


def test_problems_are_found_where_the_application_is_written() -> None:
    from pointsman.integrations.ray_serve import pointsman_scaling

    with pytest.raises(ConfigError, match="slo-attainment"):
        pointsman_scaling("slo-attainmen")
    with pytest.raises(ConfigError, match="target"):
        pointsman_scaling("slo-attainment", parameters={"target": 2})
    with pytest.raises(ConfigError, match="not a scaling policy"):
        pointsman_scaling("fifo")
    with pytest.raises(ConfigError, match="AutoscalingConfig"):
        pointsman_scaling(parameters={"target": 2})
