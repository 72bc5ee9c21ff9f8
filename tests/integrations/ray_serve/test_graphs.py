"""Graphs of Ray on our runtimes, and pipelines of ours on Serve."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

import pointsman as pm
from bench.chaos.planes import LivePlane
from pointsman.errors import PointsmanError
from tests.integrations.ray_serve.conftest import Cluster

pytestmark = pytest.mark.ray
PROGRAM = Path(__file__).with_name("published_pipeline.py")


def run(program: Path, *args: str, address: str = "") -> str:
    done = subprocess.run(
        [sys.executable, program.name, *args],
        cwd=program.parent,
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The program, with fewer processes than it asks for: ten replicas of an ingress take long to start."""
    made = tmp_path / "published.py"
    made.write_text(PROGRAM.read_text(encoding="utf-8").replace("num_replicas=10", "num_replicas=2"), encoding="utf-8")
    return made


def test_the_published_program_runs_on_plain_serve(cluster: Cluster, program: Path) -> None:
    from ray import serve

    run(program, "deployment.yaml", address=cluster.address)
    answer = cluster.ask("/published", body=b"[1, 2, 3]")
    assert (answer.status, answer.text) == (200, "8")
    deployments = serve.status().applications["published"].deployments
    replicas = {name: sum(one.replica_states.values()) for name, one in deployments.items()}
    assert replicas == {"m1": 3, "m2": 1, "ensemble": 1, "ingress": 2}
    cluster.delete("published")


def test_the_published_program_runs_on_our_local_runtime(cluster: Cluster, program: Path) -> None:
    run(program, "deployment.yaml", "local", address=cluster.address)
    text = program.with_name("deployment.yaml").read_text(encoding="utf-8")
    assert "replicas: 3" in text
    assert "replicas: 2" in text
    plane = LivePlane(program.parent)
    try:
        plane.up("kind: Pointsman\ngateway: {listen: '127.0.0.1:0'}\n")
        deployed = plane.pointsman("deploy", program.with_name("deployment.yaml"))
        assert deployed.returncode == 0, deployed.stdout + deployed.stderr
        with urlopen(Request(f"{plane.url}/published", b"[1, 2, 3]"), timeout=60) as answer:
            assert answer.read() == b"8"
    finally:
        plane.close()


def test_a_graph_of_ray_becomes_a_pipeline(tmp_path: Path) -> None:
    import ray
    from ray.dag import InputNode

    from tests.integrations.ray_serve.ray_nodes import Model, ensemble

    model: Any = Model
    with InputNode() as given:
        m1 = model.bind(1)
        m2 = model.options(name="second", num_cpus=0.5, num_gpus=1).bind(2)
        dag = ray.remote(ensemble).bind(m1.forward.bind(given[0]), m2.forward.bind(given.x), given["c"])
    ours = pm.from_ray_dag(dag)
    assert ours.execute({0: 1, "x": 2, "c": 3}) == 8
    graph = pm.build(ours, folder=tmp_path).graph
    assert {node.name for node in graph.nodes} == {"m1", "second", "ensemble"}
    assert (graph.node("second").options.cpus, graph.node("second").options.gpus) == (0.5, 1)


def test_what_has_no_counterpart_is_refused() -> None:
    from tests.integrations.ray_serve.ray_nodes import Model

    model: Any = Model
    bound = model.options(max_restarts=3).bind(1)
    with pytest.raises(PointsmanError, match="max_restarts"):
        pm.from_ray_dag(bound.forward.bind(1))
    with pytest.raises(PointsmanError, match="expected what bind"):
        pm.from_ray_dag(3)


def test_our_pipeline_runs_on_serve_with_its_options(cluster: Cluster) -> None:
    from ray import serve

    from tests.integrations.ray_serve import our_pipeline

    app = pm.build(our_pipeline.dag, name="ours", folder=Path(our_pipeline.__file__).parent)
    app.m1.set_options(
        cpus=0.1,
        scheduling={"policy": "slo-aware"},
        scaling={"policy": "target-ongoing", "parameters": {"target": 2}, "min": 1, "max": 2},
    )
    handle = cluster.run(app.to_ray_serve(), "ours")
    assert handle.remote(1, 2, 3).result() == 8
    answer = cluster.ask("/ours", body=json.dumps([1, 2, 3]).encode())
    assert (answer.status, answer.text) == (200, "8")
    m1 = serve.status().applications["ours"].deployments["m1"]
    assert m1.replica_states == {"RUNNING": 1}
    bad = cluster.ask("/ours", body=b"[1]")
    assert bad.status == 500
    cluster.delete("ours")


def test_what_serve_cannot_run_is_refused() -> None:
    with pm.InputNode() as given:
        dag = pm.model("llama").chat.bind(given)
    with pytest.raises(PointsmanError, match="model of a manifest"):
        pm.build(dag, name="chat").to_ray_serve()
