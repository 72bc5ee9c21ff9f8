"""`build`, `deploy`, `rollback`, `delete` and `status APP`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pointsman.cli.main import main
from pointsman.config import load_application
from pointsman.reasons import Reason
from tests.cli.planes import Plane, deployment, instance, pointsman

PIPELINE = """\
import pointsman as pm

@pm.deployment
class Model:
    def __init__(self, factor):
        self.factor = factor

    def forward(self, x):
        return self.factor * x

with pm.InputNode() as given:
    m1 = Model.bind(2)
    dag = m1.forward.bind(given)

app = pm.build(dag, name="named")
"""
OPENED = {
    "changes": [{"what": "open", "subject": "shop", "why": "new"}],
    "text": "what  subject  why\nopen  shop     new",
}
NOTHING: dict[str, Any] = {"changes": [], "text": ""}
READY = {"name": "shop", "path": "/shop", "nodes": [{"name": "m1", "kind": "class", "deployments": ["shop.m1"]}]}
STOPPED = "rollout stopped: exit code 1; the earlier version still serves; deploy again to retry"


def seen(*instances: dict[str, Any], desired: int = 1, **facts: Any) -> dict[str, Any]:
    return {**READY, "yaml": "", "deployments": [deployment("shop.m1", desired, *instances, **facts)]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a pipeline in it."""
    (tmp_path / "shop.py").write_text(PIPELINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    return tmp_path


def test_build_writes_what_can_be_deployed(folder: Path) -> None:
    done = pointsman("build", "shop.py:dag", "-o", "deployment.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("deployment.yaml: application shop of m1\n")
    plan = load_application(folder / "deployment.yaml")
    assert [one.name for one in plan.deployments] == ["shop.m1"]
    assert plan.warnings == ()
    assert plan.text == (folder / "deployment.yaml").read_text()
    (folder / "shop.py").write_text(f"{PIPELINE}# changed\n")
    changed = load_application(folder / "deployment.yaml")
    assert (changed.text, changed.code != plan.code) == (plan.text, True)


def test_files_are_relative_to_where_it_is_written(folder: Path) -> None:
    (folder / "deploy").mkdir()
    done = pointsman("build", "shop:dag", "-o", "deploy/shop.yaml", "--name", "other")
    assert done.returncode == 0, done.stderr
    plan = load_application(folder / "deploy" / "shop.yaml")
    assert (plan.name, plan.graph.nodes[0].code) == ("other", "../shop.py:Model")
    done = pointsman("build", "shop.py:app", "--json")
    told = json.loads(done.stdout)
    assert (told["name"], told["file"], yaml.safe_load(told["yaml"])["name"]) == ("named", None, "named")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("shop.py:dg", 'shop.py has no "dg"; did you mean "dag"?'),
        ("shop.py", '"shop.py" names no pipeline; write module:name or path/file.py:name'),
        ("shp.py:dag", 'cannot read shp.py: there is no such file; did you mean "shop.py"?'),
        ("shp:dag", 'there is no module "shp"; it must be installed, or be in the current directory or PYTHONPATH'),
        ("shop.py:pm.RequestMetadata", "shop.py:pm.RequestMetadata is a class, not a pipeline; decorate it with"),
        ("shop.py:pm", "shop.py:pm is a module, not a pipeline"),
        ("shop.py:Model", "bind"),
        ("broken.py:dag", 'module "broken.py" cannot be imported: ZeroDivisionError: division by zero'),
    ],
)
def test_pipelines_that_cannot_be_built(
    named: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    assert main(["build", named]) == 1
    assert said in capsys.readouterr().err


@pytest.fixture
def built(folder: Path) -> Path:
    assert pointsman("build", "shop.py:dag", "-o", "shop.yaml").returncode == 0
    return folder / "shop.yaml"


def test_deploy_waits_until_all_is_ready(plane: Plane, built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["POST", "applications"] = OPENED
    plane.answers["GET", "applications/shop"] = [seen(instance("shop.m1-1", "starting")), seen(instance("shop.m1-1"))]
    assert main(["deploy", str(built)]) == 0
    out = capsys.readouterr().out
    assert "open  shop     new" in out
    assert "shop.m1: 0 of 1 ready; shop.m1-1 is starting\nshop.m1: 1 of 1 ready\n" in out
    assert plane.asked[0].body["folder"] == str(built.parent)
    plane.answers["POST", "applications"] = NOTHING
    assert main(["deploy", str(built)]) == 0
    assert capsys.readouterr().out == "no changes: this version of shop is already deployed\n"


def test_deploy_says_that_a_rollout_was_stopped(plane: Plane, built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["POST", "applications"] = OPENED
    failed = instance("shop.m1-2", "backing off", reason=STOPPED, halted=True)
    plane.answers["GET", "applications/shop"] = seen(instance("shop.m1-1"), failed)
    assert main(["deploy", str(built)]) == 1
    assert f"shop.m1: {STOPPED}" in capsys.readouterr().err
    assert main(["deploy", str(built), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["ready"], told["problem"]) == (False, f"shop.m1: {STOPPED}")


def test_deploy_gives_up_a_node_that_never_started_with_its_traceback(
    plane: Plane, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plane.answers["POST", "applications"] = OPENED
    why = "exit code 1: no weights"
    plane.answers["GET", "applications/shop"] = seen(instance("shop.m1-1", "backing off", reason=why, restarts=3))
    log = "Traceback (most recent call last):\n  old\nTraceback (most recent call last):\nRuntimeError: no weights\n"
    plane.answers["GET", "instances/shop.m1-1/logs?lines=200"] = {
        "text": f"{log}the replica cannot start: x\n[pointsman] ended\n"
    }
    assert main(["deploy", str(built)]) == 1
    told = capsys.readouterr()
    assert "shop.m1: exit code 1: no weights; it is tried again, and has failed 3 times" in told.err
    lines = [line for line in told.out.splitlines() if line.startswith("shop.m1-1: ")]
    assert lines == ["shop.m1-1: Traceback (most recent call last):", "shop.m1-1: RuntimeError: no weights"]


def test_a_refused_user_config_fails_the_deployment_and_is_in_the_status(
    plane: Plane, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plane.answers["POST", "applications"] = OPENED
    problem = Reason("user-config-refused", {"instance": "shop.m1-1", "error": "ValueError: bad"})
    refused = {"awaited": 0, "problems": [problem.as_dict()]}
    plane.answers["GET", "applications/shop"] = seen(instance("shop.m1-1"), user_config=refused)
    assert main(["deploy", str(built)]) == 1
    assert "shop.m1: shop.m1-1 refused its user config: ValueError: bad" in capsys.readouterr().err
    assert main(["status", "shop"]) == 0
    assert "refused its user config: ValueError: bad" in capsys.readouterr().out
    plane.answers["GET", "applications/shop"] = seen(instance("shop.m1-1"), user_config={"awaited": 1, "problems": []})
    assert main(["deploy", str(built), "--wait", "300ms"]) == 1, "it is not configured yet"


def test_deploy_waits_for_a_limited_time(plane: Plane, built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["POST", "applications"] = OPENED
    plane.answers["GET", "applications/shop"] = seen(instance("shop.m1-1", "starting"))
    assert main(["deploy", str(built), "--wait", "300ms"]) == 1
    assert "not every node is ready after 300ms" in capsys.readouterr().err
    assert main(["deploy", str(built), "--no-wait", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == OPENED["changes"]


def test_without_a_plane_deploy_says_how_to_start_one(
    built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POINTSMAN_STATE", str(built.parent / "nobody"))
    assert main(["deploy", str(built)]) == 1
    assert f"start one with it: pointsman up {built}" in capsys.readouterr().err


def test_manifests_are_applied_and_not_deployed(plane: Plane, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "manifest.yaml"
    file.write_text("kind: Pointsman\n")
    assert main(["deploy", str(file)]) == 1
    assert f"is a manifest, not an application; use: pointsman apply {file}" in capsys.readouterr().err
    file.write_text("kind: Application\nname: v1\n")
    assert main(["deploy", str(file)]) == 1
    assert '"v1" is taken' in capsys.readouterr().err
    assert plane.asked == []


def test_plan_takes_applications_as_well(plane: Plane, built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["POST", "plan"] = OPENED
    assert main(["plan", str(built)]) == 0
    assert "open  shop     new" in capsys.readouterr().out


def test_plan_without_a_plane_says_what_would_start(
    built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POINTSMAN_STATE", str(built.parent / "nobody"))
    assert main(["plan", str(built), "--json"]) == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert [(one["what"], one["subject"]) for one in changes] == [
        ("open", "shop"), ("open", "shop.m1"), ("start", "shop.m1-1"),
    ]  # fmt: skip


def test_rollback_and_delete(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["POST", "applications/shop/rollback"] = OPENED
    plane.answers["GET", "applications/shop"] = seen(instance("shop.m1-1"))
    assert main(["rollback", "shop"]) == 0
    assert "open  shop" in capsys.readouterr().out
    plane.answers["DELETE", "applications/shop"] = OPENED
    assert main(["delete", "shop"]) == 0
    assert capsys.readouterr().out.endswith("shop is deleted; its replicas stop when their calls have ended\n")
    assert main(["delete", "shop", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"changes": OPENED["changes"]}
    none = {"error": {"message": 'there is no version of "shop" before the one in force', "type": "x"}}
    plane.answers["POST", "applications/shop/rollback"] = (400, none)
    assert main(["rollback", "shop"]) == 1
    assert "there is no version" in capsys.readouterr().err


def test_the_status_of_an_application(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    failed = instance("shop.m1-2", "backing off", reason=STOPPED, halted=True)
    counts = {"waiting": 3, "running": 2, "answered": 17, "errors": 1, "mean_ms": 12.3}
    plane.answers["GET", "applications/shop"] = seen(instance("shop.m1-1"), failed, desired=2, **counts)
    assert main(["status", "shop"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("application shop at /shop\n")
    row = next(line for line in out.splitlines() if line.startswith("m1 "))
    assert row.split() == ["m1", "class", "1", "of", "2", "3", "2", "17", "1", "12", "ms"]
    assert "given up" in out
    assert main(["status", "shop", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "shop"


def test_the_status_of_all_lists_applications(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["GET", "status"] = {
        "ready": True, "state_dir": "/x", "generation": 1, "uptime_s": 1.0, "worker": {}, "problems": [],
        "deployments": [deployment("shop.m1", 1, instance("shop.m1-1"), model="shop.m1", internal=True)],
        "applications": [READY],
    }  # fmt: skip
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert "shop         /shop  m1     1 of 1" in out
    assert "shop.m1     shop.m1" not in out, "clients cannot name it"
