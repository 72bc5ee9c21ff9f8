"""Graphs of Ray on our runtimes, and pipelines of ours on Serve."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from typing import Any
from urllib.request import Request, urlopen

import pytest

import pointsman as pm
from bench.chaos.planes import LivePlane
from pointsman.errors import PointsmanError
from tests.integrations.ray_serve.conftest import Cluster
from tests.live.ray_clusters import LONG_S

pytestmark = pytest.mark.ray
HERE = Path(__file__).parent
PROGRAM = HERE / "published_pipeline.py"
OVER_HTTP = """
from urllib.request import Request, urlopen

with urlopen(Request(app_handle.url, b"[1, 2, 3]"), timeout=180) as answer:
    assert answer.read() == b"8"
"""


def run(program: Path, *args: str, address: str = "") -> None:
    done = subprocess.run(
        [sys.executable, program.name, *args],
        cwd=program.parent,
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=2 * LONG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_published_program_runs_on_plain_serve(cluster: Cluster, tmp_path: Path) -> None:
    from ray import serve

    run(Path(shutil.copy(PROGRAM, tmp_path / "published.py")), address=cluster.address)
    answer = cluster.ask("/published", body=b"[1, 2, 3]")
    assert (answer.status, answer.text) == (200, "8")
    deployments = serve.status().applications["published"].deployments
    replicas = {name: sum(one.replica_states.values()) for name, one in deployments.items()}
    assert replicas == {"m1": 3, "m2": 1, "ensemble": 1, "ingress": 10}


def test_both_programs_run_on_our_ray_runtime(cluster: Cluster, tmp_path: Path) -> None:
    published = tmp_path / "published.py"
    deployed_on_ray = PROGRAM.read_text(encoding="utf-8").replace("app.deploy()", 'app.deploy("ray")')
    published.write_text(deployed_on_ray + OVER_HTTP, encoding="utf-8")
    run(published, address=cluster.address)
    ours = tmp_path / "ours.py"
    ours.write_text((HERE / "our_program.py").read_text(encoding="utf-8") + indent(OVER_HTTP, "    "), encoding="utf-8")
    run(ours, cluster.address)
    plane = LivePlane(tmp_path, patience_s=LONG_S)
    plane.flags = ["--runtime", "ray", "--address", cluster.address]
    try:
        plane.up("kind: Pointsman\ngateway: {listen: '127.0.0.1:0'}\n")
        deployed = plane.pointsman("deploy", tmp_path / "deployment.yaml")
        assert deployed.returncode == 0, deployed.stdout + deployed.stderr
        with urlopen(Request(f"{plane.url}/published", b"[1, 2, 3]"), timeout=180) as answer:
            assert answer.read() == b"8"
        assert len(plane.pids("published.m1")) == 3
        assert len(plane.pids("published.ingress")) == 10
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


def test_our_program_runs_on_serve_with_its_options(cluster: Cluster) -> None:
    from ray import serve

    from tests.integrations.ray_serve import our_program

    app = pm.build(our_program.dag, name="ours", folder=HERE)
    app.m1.set_options(
        cpus=0.1,
        scheduling={"policy": "slo-aware"},
        scaling={"policy": "target-ongoing", "parameters": {"target": 2}, "min": 1, "max": 2},
    )
    handle = cluster.run(app.to_ray_serve(), "ours")
    assert handle.remote(1, 2, 3).result() == 8
    answer = cluster.ask("/ours", body=b"[1, 2, 3]")
    assert (answer.status, answer.text) == (200, "8")
    deployments = serve.status().applications["ours"].deployments
    replicas = {name: one.replica_states for name, one in deployments.items()}
    assert replicas == {name: {"RUNNING": 1} for name in ("m1", "m2", "ensemble", "ingress")}
    assert cluster.ask("/ours", body=b"[1]").status == 500


def test_nodes_call_each_other_on_serve(cluster: Cluster) -> None:
    from tests.integrations.ray_serve import our_pipeline

    app = pm.build(our_pipeline.dag, name="calling", folder=HERE)
    assert cluster.run(app.to_ray_serve(), "calling").remote(1, 2, 3).result() == 8
    answer = cluster.ask("/calling", body=json.dumps([1, 2, 3]).encode())
    assert (answer.status, answer.text) == (200, "8"), "without a preprocessor, the JSON is the input"


def test_what_serve_cannot_run_is_refused() -> None:
    with pm.InputNode() as given:
        dag = pm.model("llama").chat.bind(given)
    with pytest.raises(PointsmanError, match="model of a manifest"):
        pm.build(dag, name="chat").to_ray_serve()
