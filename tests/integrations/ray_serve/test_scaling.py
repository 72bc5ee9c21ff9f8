"""`pointsman_scaling` on real Serve applications: broken policies stop nothing, and the example scales by deadlines."""

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
    from pointsman.integrations.ray_serve import status

    def facts() -> dict[str, Any] | None:
        problem = scaled(name).get("reasons", {}).get("problem") or {}
        return problem["facts"] if problem.get("code") == code else None

    found: dict[str, Any] = until(facts, f"{name} reports {code}", lambda: status()["scaled"])
    return found


def running(application: str, deployment: str) -> int:
    """How many replicas run."""
    from ray import serve

    states = serve.status().applications[application].deployments[deployment].replica_states
    return int(states.get("RUNNING", 0))


def test_the_example_scales_by_deadlines_while_broken_policies_stop_nothing(cluster: Cluster) -> None:
    """One application after the other: a policy that fails in Serve's controller would stop the next ones."""
    from examples.ray_serve import sla
    from pointsman.integrations.ray_serve import explain, pointsman_scaling, status
    from tests.integrations.ray_serve.serve_apps import empty, raises, sleeps
    from tests.integrations.ray_serve.serve_apps import scaled as application

    cluster.run(application(pointsman_scaling(raises, interval_s=0.2)), "raises-scaling")
    cluster.run(application(pointsman_scaling(empty, interval_s=0.2)), "empty-scaling")
    cluster.run(application(pointsman_scaling(sleeps, interval_s=0.2, time_limit_s=0.2)), "sleeps-scaling")
    cluster.run(sla.application(), "summary")
    url = f"{cluster.url}/summary"

    def grown() -> bool:
        sla.load(url, 5)
        records = status()["scaled"].get("summary/Summary", {"records": []})["records"]
        return running("summary", "Summary") > 1 and any(one["after"] > one["before"] for one in records)

    until(grown, "missed deadlines add replicas", lambda: status()["scaled"])
    told = explain("r-0-0")
    assert told.data["strategy"] == "least-slack", "urgent requests overtake the others"
    assert told.data["deadline_ms"] == sla.DEADLINE_MS
    assert reports("raises-scaling", "policy-raised")["text"] == "raised ZeroDivisionError: of the scaling policy"
    assert reports("empty-scaling", "policy-answer-invalid")["found"] == "None"
    assert reports("sleeps-scaling", "policy-too-slow")["limit_s"] == 0.2
    broken = ("raises-scaling", "empty-scaling", "sleeps-scaling")
    for name in broken:
        assert running(name, "Working") == 1
        assert cluster.ask(f"/{name}").status == 200


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
