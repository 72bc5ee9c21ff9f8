"""`plan` and `apply`: the file is checked here, then the plane is asked, then progress is shown."""

import json
from pathlib import Path
from typing import Any

import pytest

from pointsman.cli.main import main
from pointsman.runtimes.machine.detection import detect
from tests.cli.planes import (
    CHANGES,
    NO_CHANGES,
    READY,
    Plane,
    deployment,
    instance,
    not_ready_yet,
    pointsman,
    status,
    without_memory,
)

MANIFEST = """\
deployments:
- name: chat
  model: smollm2
  replicas: 2
  engine: {type: simulated}
  endpoints: [{url: "http://localhost:9", name: spare}]
gateway: {listen: "0.0.0.0:8080"}
"""
WARNING = "7: warning: gateway.listen: the gateway listens on 0.0.0.0:8080 and has no keys"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "m.yaml"
    file.write_text(MANIFEST)
    return file


# plan


def test_plan_shows_what_would_change_and_why(plane: Plane, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["POST", "plan"] = CHANGES
    assert main(["plan", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{CHANGES['text']}\n{file}:{WARNING}")
    [asked] = plane.asked
    assert asked.body == {"text": MANIFEST, "folder": str(file.parent), "file": str(file)}


def test_the_folder_is_absolute(plane: Plane, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plane.answers["POST", "plan"] = NO_CHANGES
    monkeypatch.chdir(file.parent)
    assert main(["plan", "m.yaml"]) == 0
    assert plane.asked[0].body == {"text": MANIFEST, "folder": str(file.parent), "file": "m.yaml"}


def test_plan_with_nothing_to_do(plane: Plane, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["POST", "plan"] = NO_CHANGES
    assert main(["plan", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "nothing would change"


def test_plan_in_json(plane: Plane, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["POST", "plan"] = CHANGES
    assert main(["plan", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["changes"] == CHANGES["changes"]
    assert [(one["file"], one["line"]) for one in told["warnings"]] == [(str(file), 7)]


def test_plan_without_a_plane_says_what_up_would_start(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "servers.yaml").write_text("- {name: more, url: 'http://localhost:10'}\n")
    file.write_text(MANIFEST.replace("  engine:", "  endpointsFile: servers.yaml\n  engine:"))
    assert main(["plan", str(file), "--state", str(tmp_path)]) == 0
    first, _, _, *rows = capsys.readouterr().out.splitlines()
    listens = "this would start one that listens on 0.0.0.0:8080"
    assert first == f"no plane is running in {tmp_path}; {listens}: pointsman up {file} --state {tmp_path}"
    assert [row.split()[:2] for row in rows[:5]] == [
        ["open", "chat"],
        ["start", "chat-1"],
        ["start", "chat-2"],
        ["add", "spare"],
        ["add", "more"],
    ]
    assert main(["plan", str(file), "--state", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [change["subject"] for change in told["changes"]] == ["chat", "chat-1", "chat-2", "spare", "more"]


def test_plan_without_a_plane_says_where_instances_would_go(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placed = "  placement: {resources: {gpus: 0, memory: 1Mi}}\n"
    file.write_text(MANIFEST.replace("  endpoints:", placed + "  endpoints:"))
    assert main(["plan", str(file), "--state", str(tmp_path)]) == 0
    _, head, _, opened, *started = capsys.readouterr().out.splitlines()[:6]
    assert head.split() == ["what", "subject", "why", "where"]
    assert opened.endswith('"smollm2"; slo-miss decides where they go')
    assert [row.partition(" there ")[2].strip() for row in started] == [f"{detect().name}: 1 MiB of memory"] * 2
    file.write_text(file.read_text().replace("1Mi", "9000Ti"))
    assert main(["plan", str(file), "--state", str(tmp_path), "--json"]) == 0
    _, first, second, spare = json.loads(capsys.readouterr().out)["changes"]
    assert first["where"].startswith("no place: ")
    assert (second["where"], "where" in spare) == (first["where"], False)


def test_plan_of_a_plane_elsewhere_that_does_not_answer_is_an_error(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POINTSMAN_ADMIN_KEY", "k")
    assert main(["plan", str(file), "--url", "http://127.0.0.1:1"]) == 1
    assert "no plane answers at http://127.0.0.1:1" in capsys.readouterr().err


# A bad file


@pytest.mark.parametrize("command", ["plan", "apply"])
def test_a_bad_file_reaches_nobody(command: str, plane: Plane, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(MANIFEST.replace("simulated", "simulatd").replace("replicas: 2", "replicas: -2"))
    assert main([command, str(file)]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        f"{file}:4: deployments[0].replicas: must be at least 0, found -2",
        f'{file}:5: deployments[0].engine.type: there is no engine "simulatd"; did you mean "simulated"?',
        "pointsman: 2 problems; nothing was applied",
    ]
    assert captured.out == ""
    assert main([command, str(file), "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert [problem["line"] for problem in error["problems"]] == [4, 5]
    assert plane.asked == []


@pytest.mark.parametrize("command", ["plan", "apply"])
def test_a_file_that_is_none(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path / "gone.yaml")]) == 1
    assert "gone.yaml: cannot be read: there is no such file" in capsys.readouterr().err
    for text, told in {
        "kind: EndpointPickerConfig\nplugins: []\n": "is an EndpointPickerConfig, which is part of a manifest",
        "schedulingProfiles: []\n": "is an EndpointPickerConfig, which is part of a manifest: write its fields under",
        "kind: Fleet\n": "is a fleet, which is not part of a manifest; use it with --fleet of the command place",
    }.items():
        (tmp_path / "other.yaml").write_text(text)
        assert main([command, str(tmp_path / "other.yaml")]) == 1
        [problem, last] = capsys.readouterr().err.splitlines()
        assert f"kind: this {told}" in problem
        assert last == "pointsman: 1 problem; nothing was applied"


def test_what_only_the_plane_finds_wrong_is_shown_in_the_same_way(
    plane: Plane, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = {"file": str(file), "line": 7, "field": "gateway.listen", "message": "in use"}
    error = {"message": f"{file}:7: gateway.listen: in use", "code": "invalid_manifest", "problems": [problem]}
    plane.answers["POST", "apply"] = (422, {"error": error})
    assert main(["apply", str(file)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"{file}:7: gateway.listen: in use",
        "pointsman: 1 problem; nothing was applied",
    ]


# apply


def chat(*phases: str, **facts: Any) -> dict[str, Any]:
    instances = [instance(f"chat-{number}", phase, **facts) for number, phase in enumerate(phases, 1)]
    return status(deployment("chat", 2, *instances), deployment("other", 1, instance("other-1")))


def test_apply_waits_and_says_how_it_goes(plane: Plane, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["POST", "apply"] = CHANGES
    failed = chat("ready", "backing off", reason="exit code 1: no memory")
    failed["deployments"][0]["instances"][0]["reason"] = ""
    plane.answers["GET", "status"] = [
        chat("starting", "starting"),
        chat("starting", "starting", **not_ready_yet("connection refused")),
        chat("ready", "starting"),
        chat("ready", "starting"),
        failed,
        chat("ready", "ready", "draining"),
        chat("ready", "ready"),
    ]
    assert main(["apply", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{CHANGES['text']}\n")
    assert out.splitlines()[-5:] == [
        "chat: 0 of 2 ready; chat-1 is starting; chat-2 is starting",
        "chat: 1 of 2 ready; chat-2 is starting",
        "chat: 1 of 2 ready; chat-2 is waiting to restart (exit code 1: no memory)",
        "chat: 2 of 2 ready; chat-3 is draining",
        "chat: 2 of 2 ready",
    ]


def test_an_instance_that_waits_for_a_place_is_reported_once(
    plane: Plane, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def waiting(free: float) -> dict[str, Any]:
        return chat("backing off", "backing off", **without_memory(free))

    plane.answers["POST", "apply"] = CHANGES
    plane.answers["GET", "status"] = [waiting(10.6), waiting(10.7), waiting(10.5), chat("ready", "ready")]
    assert main(["apply", str(file)]) == 0
    why = "(too little memory: needs 12.0 GiB, 10.6 GiB free)"
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"chat: 0 of 2 ready; chat-1 is waiting for a place {why}; chat-2 is waiting for a place {why}",
        "chat: 2 of 2 ready",
    ]


def test_apply_twice_says_that_nothing_has_changed(
    plane: Plane, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plane.answers["POST", "apply"] = NO_CHANGES
    assert main(["apply", str(file)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "warning" not in line] == ["nothing has changed"]


def test_apply_gives_up_waiting(plane: Plane, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["POST", "apply"] = CHANGES
    plane.answers["GET", "status"] = chat("ready", "starting")
    assert main(["apply", str(file), "--timeout", "300ms"]) == 1
    captured = capsys.readouterr()
    assert "chat: 1 of 2 ready; chat-2 is starting" in captured.out
    assert "pointsman: not everything is ready after 300ms; the plane keeps trying" in captured.err


def test_apply_need_not_wait(plane: Plane, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["POST", "apply"] = CHANGES
    assert main(["apply", str(file), "--no-wait"]) == 0
    assert [asked.target for asked in plane.asked] == ["apply"]


def test_apply_in_json(plane: Plane, file: Path) -> None:
    plane.answers["POST", "apply"] = CHANGES
    plane.answers["GET", "status"] = [chat("ready", "starting"), READY]
    result = pointsman("apply", file, "--json")
    assert result.returncode == 0
    told = json.loads(result.stdout)
    assert (told["ready"], told["status"], told["changes"]) == (True, READY, CHANGES["changes"])
    assert result.stderr == "chat: 1 of 2 ready; chat-2 is starting\nchat: 2 of 2 ready\n"
    at_once = pointsman("apply", file, "--json", "--no-wait")
    assert json.loads(at_once.stdout).keys() == {"changes", "warnings"}


@pytest.mark.parametrize("timeout", ["soon", "0", "-5s"])
def test_times_that_are_none(timeout: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["apply", str(file), f"--timeout={timeout}"])
    assert exited.value.code == 2
    assert "--timeout" in capsys.readouterr().err
