"""What an `Application` document builds."""

import os
from pathlib import Path
from typing import Any

import pytest

from pointsman.config import load, load_application, load_manifest
from pointsman.config.application import TAKEN
from pointsman.config.plan import ApplicationPlan, DeploymentPlan
from pointsman.errors import ConfigError
from pointsman.pipeline import FromStep, NodeKind

DIAMOND = """\
kind: Application
name: diamond
nodes:
- name: m1
  class: diamond.py:Model
  args: [1]
  replicas: 3
- {name: m2, class: "diamond.py:Model", args: [2]}
- {name: ensemble, function: "diamond.py:ensemble"}
calls:
- {id: one, node: m1, method: forward, args: [{$input: [0]}]}
- {id: two, node: m2, method: forward, args: [{$input: [1]}]}
- {id: dag, node: ensemble, args: [{$step: one}, {$step: two}, {$input: [2]}]}
output: {$step: dag}
"""
MODELS = """\
kind: Pointsman
deployments:
- {name: chat, model: smollm2, aliases: [small], engine: {type: simulated}}
"""


def node(more: str = "", kind: str = "class: a.py:B") -> str:
    """An application of one node."""
    nodes = f"nodes:\n- name: n\n  {kind}\n{more}"
    return f"kind: Application\nname: app\n{nodes}calls: [{{id: c, node: n}}]\noutput: {{$step: c}}\n"


def of_node(more: str = "", kind: str = "class: a.py:B") -> DeploymentPlan:
    [plan] = load_application(node(more, kind)).deployments
    return plan


def parameters(plan: DeploymentPlan) -> dict[str, Any]:
    assert plan.desired.engine is not None
    assert plan.desired.engine.type == "python"
    return dict(plan.desired.engine.parameters)


def test_each_node_is_a_deployment_of_its_own(tmp_path: Path) -> None:
    plan = load_application(DIAMOND, tmp_path)
    assert isinstance(plan, ApplicationPlan)
    assert [one.name for one in plan.deployments] == ["diamond.m1", "diamond.m2", "diamond.ensemble"]
    assert [one.desired.replicas for one in plan.deployments] == [3, 1, 1]
    assert all(one.internal and one.model == one.name for one in plan.deployments)
    assert all(one.policy is not None and one.policy.name == "fifo" for one in plan.deployments)
    first = parameters(plan.deployments[0])
    assert first["app"] == "diamond"
    assert (first["node"], first["kind"], first["code"]) == ("m1", "class", "diamond.py:Model")
    assert first["args"] == [1]
    assert first["folder"] == str(tmp_path)
    assert [step.id for step in plan.flow.steps] == ["one", "two", "dag"]
    assert plan.graph.output == FromStep("dag")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text(DIAMOND)
    plan = load_application(file)
    assert plan.folder == str(tmp_path)
    assert parameters(plan.deployments[0])["folder"] == str(tmp_path)


def test_options_set_how_it_runs() -> None:
    plan = of_node(
        "  maxConcurrency: 3\n  startTimeout: 5s\n  healthCheckPeriod: 1s\n  healthCheckTimeout: 500ms\n"
        "  gracefulShutdown: 1m\n  threads: 4\n  env: {A: b}\n  version: abc\n"
    )
    wanted = plan.desired
    assert wanted.max_concurrency == 3
    limits = wanted.lifecycle
    assert (limits.start_timeout_s, limits.probe_interval_s, limits.probe_timeout_s) == (5.0, 1.0, 0.5)
    assert limits.drain_timeout_s == 60.0
    params = parameters(plan)
    assert (params["threads"], params["env"], params["version"]) == (4, {"A": "b"}, "abc")
    assert wanted.ask is None


@pytest.mark.parametrize("change", ["maxConcurrency: 2", "userConfig: {a: 1}", "replicas: 5", "startTimeout: 1s"])
def test_changes_that_need_no_restart_keep_the_recipe(change: str) -> None:
    assert of_node(f"  {change}\n").desired.recipe == of_node().desired.recipe


@pytest.mark.parametrize("change", ["args: [1]", "kwargs: {a: 1}", "version: b", "threads: 2", "env: {A: b}"])
def test_changes_of_the_program_change_the_recipe(change: str) -> None:
    assert of_node(f"  {change}\n").desired.recipe != of_node().desired.recipe


def test_resources_become_an_ask() -> None:
    ask = of_node("  cpus: 2\n  memory: 1Gi\n  labels: {disk: fast}\n").desired.ask
    assert ask is not None
    assert (ask.cpus, ask.need.host_bytes, ask.cpu) == (2.0, 2**30, True)
    assert ask.selector.matches({"disk": "fast"})
    assert not ask.selector.matches({})
    ask = of_node("  gpus: 2\n  gpuMemory: 8Gi\n  gpuShare: 0.5\n").desired.ask
    assert ask is not None
    assert (ask.need.weight_bytes, ask.need.tensor_parallel_sizes, ask.gpu_share, ask.cpu) == (
        16 * 2**30,
        (2,),
        0.5,
        False,
    )


def test_each_shard_is_a_deployment_that_knows_its_rank() -> None:
    plan = load_application(node("  shards: 2\n  joins: true\n  userConfig: {a: 1}\n"))
    assert [one.name for one in plan.deployments] == ["app.n.0", "app.n.1"]
    assert [parameters(one).get("rank") for one in plan.deployments] == [0, 1]
    assert all(parameters(one)["shards"] == 2 for one in plan.deployments)
    assert plan.user_configs == {"app.n.0": {"a": 1}, "app.n.1": {"a": 1}}


def test_the_ingress_is_a_deployment_if_it_has_something_to_do() -> None:
    plan = load_application(node() + "ingress: {preprocessor: 'a.py:f', schema: 'b:Model', replicas: 2, version: v}\n")
    ingress = plan.deployments[-1]
    assert (ingress.name, ingress.desired.replicas) == ("app.ingress", 2)
    params = parameters(ingress)
    assert (params["kind"], params["preprocessor"], params["schema"], params["version"]) == (
        "ingress",
        "a.py:f",
        "b:Model",
        "v",
    )
    assert len(load_application(node() + "ingress: {replicas: 2}\n").deployments) == 1


def test_handles_name_a_node_or_a_model() -> None:
    text = DIAMOND.replace("args: [2]", "args: [{$handle: m1}, {deep: [{$handle: llm}]}]").replace(
        "calls:", "- {name: llm, model: smollm2}\ncalls:"
    )
    plan = load_application(text)
    assert [one.name for one in plan.deployments] == ["diamond.m1", "diamond.m2", "diamond.ensemble"]
    assert parameters(plan.deployments[1])["args"] == [{"$handle": "m1"}, {"deep": [{"$model": "smollm2"}]}]
    assert plan.graph.node("llm").kind is NodeKind.MODEL


def test_nodes_are_scheduled_like_deployments() -> None:
    plan = of_node("  scheduling: {policy: slo-aware, parameters: {urgentBelowMs: 5}}\n")
    assert plan.policy is not None
    assert plan.policy.name == "slo-aware"
    assert of_node("  scheduling: {config: {plugins: [{type: queue-scorer}]}}\n").picker is not None


def test_the_content_of_code_is_part_of_its_version(tmp_path: Path) -> None:
    def version(text: str) -> str:
        [plan] = load_application(text, tmp_path).deployments
        assert plan.desired.engine is not None
        return str(plan.desired.engine.parameters["version"])

    code, helper = tmp_path / "a.py", tmp_path / "helper.py"
    code.write_text("import helper\nclass B: ...\n")
    helper.write_text("LIMIT = 1\n")
    first = version(node(""))
    assert version(node("")) == first
    helper.write_text("LIMIT = 2\n")
    second = version(node(""))
    assert second != first
    (tmp_path / "unrelated.py").write_text("")
    assert version(node("")) == second
    package = tmp_path / "lib" / "a"
    package.mkdir(parents=True)
    (package / "b.py").write_text("")
    named = node("  version: x\n", kind="class: a.b:C") + "pythonPath: [lib]\n"
    assert version(named).startswith("x.")
    code.unlink()
    assert [one.message for one in load_application(node(""), tmp_path).warnings] == [f"there is no file {code}"]


def test_python_path_adds_folders_of_modules(tmp_path: Path) -> None:
    [plan] = load_application(node("  env: {PYTHONPATH: /own}\n") + "pythonPath: [lib, ../b]\n", tmp_path).deployments
    assert parameters(plan)["env"]["PYTHONPATH"].split(os.pathsep) == [
        str(tmp_path / "lib"), str(tmp_path.parent / "b"), "/own",
    ]  # fmt: skip


def test_a_manifest_names_its_applications(tmp_path: Path) -> None:
    (tmp_path / "apps").mkdir()
    (tmp_path / "apps" / "diamond.yaml").write_text(DIAMOND)
    file = tmp_path / "all.yaml"
    file.write_text(MODELS + "applications: [apps/diamond.yaml]\n")
    plan = load_manifest(file)
    assert [one.name for one in plan.applications] == ["diamond"]
    assert [one.name for one in plan.deployments] == ["chat", "diamond.m1", "diamond.m2", "diamond.ensemble"]
    assert plan.applications[0].folder == str(tmp_path / "apps")
    assert plan.models() == ["smollm2", "small"]
    assert plan.summary() == (
        "1 deployment: chat (1 x simulated, slo-miss); application diamond of diamond.m1 (3 x python, fifo), "
        "diamond.m2 (1 x python, fifo), diamond.ensemble (1 x python, fifo); gateway on 127.0.0.1:8080"
    )
    assert not plan.application_alone


def test_an_application_alone_has_a_plan() -> None:
    plan = load_manifest(DIAMOND)
    assert plan.application_alone
    assert [one.name for one in plan.deployments] == ["diamond.m1", "diamond.m2", "diamond.ensemble"]
    assert load(DIAMOND).summary() == plan.summary()
    assert plan.summary().startswith("application diamond of diamond.m1 (3 x python, fifo)")


def test_problems_of_the_applications_of_a_manifest_have_the_lines_of_their_files(tmp_path: Path) -> None:
    app = tmp_path / "app.yaml"
    app.write_text(DIAMOND.replace("replicas: 3", "replicas: -3"))
    twice = tmp_path / "twice.yaml"
    twice.write_text(DIAMOND)
    model = tmp_path / "model.yaml"
    model.write_text(node(kind="model: smollm3").replace("name: app", "name: talk"))
    file = tmp_path / "all.yaml"
    file.write_text(MODELS + "applications: [app.yaml, none.yaml]\n")
    with pytest.raises(ConfigError) as caught:
        load_manifest(file)
    found = [str(problem) for problem in caught.value.problems]
    assert f"{app}:7: nodes[0].replicas: must be at least 0, found -3" in found
    assert f"{file}:4: applications[1]: there is no file {tmp_path / 'none.yaml'}" in found
    file.write_text(MODELS + "applications:\n- twice.yaml\n- twice.yaml\n")
    with pytest.raises(ConfigError, match=r':6: applications\[1\]: there is already an application "diamond"'):
        load_manifest(file)
    file.write_text(MODELS + "applications: [model.yaml]\n")
    with pytest.raises(ConfigError, match=r'node "n": there is no model "smollm3"; did you mean "smollm2"\?'):
        load_manifest(file)


def test_names_of_gateway_pages_are_taken() -> None:
    for name in ("v1", "admin", "metrics", "health", "ready", "pipelines"):
        assert name in TAKEN
        with pytest.raises(ConfigError, match=f'"{name}" is taken'):
            load_application(node().replace("name: app", f"name: {name}"))
