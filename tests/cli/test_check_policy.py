"""`pointsman check policy`, as it is typed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman.cli.main import main

OWN = """
import os
import time
from pointsman.strategies import FIFOPolicy, SchedulingPolicy
from pointsman.types import SchedulingDecision


class Good(FIFOPolicy):
    pass


class Bad(SchedulingPolicy):
    def __init__(self, target: str = "i0") -> None:
        self.target = target

    def schedule(self, requests, instances):
        return [SchedulingDecision(request.request_id, self.target) for request in requests]


def fewer(view, by: int = 1):
    return view.replicas - by


def prints(view):
    print("seen", view.now)
    os.write(1, b"written")
    return 2


def interrupts(view):
    raise KeyboardInterrupt


def waits(view):
    print("asked", os.getpid(), flush=True)
    while True:
        time.sleep(1)


def of_all(view):
    return {node: 2 for node in view.deployments}
"""


@pytest.fixture
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the current directory, as a user has one."""
    (tmp_path / "my_checked_policies.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield "my_checked_policies"
    sys.modules.pop("my_checked_policies", None)


def test_the_command_finds_a_module_in_the_current_directory(
    own_directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "policy", f"{own_directory}:Good", "--examples", "5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "this scheduling policy keeps all its promises"
    bad = ["check", "policy", f"{own_directory}:Bad", "--examples", "20"]
    assert main([*bad, "--parameters", '{"target": "moon"}']) == 1
    out = capsys.readouterr().out
    assert "BROKEN  decides only what may be done" in out
    assert 'there is no instance "moon"' in out


def test_scaling_policies_are_checked_too(own_directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "policy", "target-ongoing", "--parameters", '{"target": 4}', "--examples", "5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "this scaling policy keeps all its promises"
    negative = ["check", "policy", f"{own_directory}:fewer", "--parameters", '{"by": 3}', "--examples", "20"]
    assert main(negative) == 1
    assert "BROKEN  wants a whole number of replicas\n  it returned -2;" in capsys.readouterr().out


def test_json_output(own_directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "policy", f"{own_directory}:Bad", "--json", "--examples", "20"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["roles"] == ["scheduling policy"]
    assert "answers in every situation" in report["kept"]
    broken = {one["promise"]: one for one in report["broken"]}
    assert broken["decides only what may be done"].keys() == {"promise", "what", "example"}


def test_output_of_the_policy_stays_out_of_the_report(own_directory: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "policy", f"{own_directory}:prints", "--json", "--examples", "5"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["broken"] == []
    assert "seen 1741176000.0" in captured.err
    assert "written" in captured.err


def test_a_policy_that_exits_is_reported(own_directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "policy", f"{own_directory}:interrupts", "--examples", "5"]) == 1
    assert "BROKEN  answers in every situation\n  it raised KeyboardInterrupt\n" in capsys.readouterr().out


def test_an_application_policy_is_recognised(own_directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "policy", f"{own_directory}:of_all", "--examples", "5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "this application's scaling policy keeps all its promises"


def test_ctrl_c_ends_the_command_and_the_policy(own_directory: str) -> None:
    argv = [sys.executable, "-m", "pointsman", "check", "policy", f"{own_directory}:waits"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, start_new_session=True) as command:
        assert command.stderr is not None
        asked, pid = command.stderr.readline().split()
        assert asked == "asked"
        os.killpg(command.pid, signal.SIGINT)  # as a terminal does: to both processes
        assert command.wait(30) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fifa"], 'unknown policy or plugin "fifa"; did you mean "fifo"?'),
        (["no_such_module:Policy"], 'there is no module "no_such_module"'),
        (["pointsman.strategies:Fifi"], 'has no "Fifi"'),
        (
            ["argparse:Action"],
            '"argparse:Action" is not a policy or plugin: it has neither the method desired_replicas',
        ),
        (["fifo", "--parameters", '{"prise": 3}'], "prise"),
        (["cost-optimized", "--parameters", '{"pricePerGpuHour": -1}'], "pricePerGpuHour must be positive, found -1"),
    ],
)
def test_a_policy_that_cannot_be_built_is_a_message(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["check", "policy", *args]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--parameters", "{"], '"{" is not JSON'),
        (["--parameters", "limit=3"], '"limit=3" is not JSON'),
        (["--parameters", "[1]"], '"[1]" is not a JSON object'),
        (["--parameters", "3"], '"3" is not a JSON object'),
        (["--examples", "0"], '"0" is not a whole number of at least 1'),
        (["--examples", "-5"], '"-5" is not a whole number of at least 1'),
        (["--examples", "many"], '"many" is not a whole number of at least 1'),
    ],
)
def test_wrong_usage_is_a_message_and_exits_with_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["check", "policy", "fifo", *args])
    assert exited.value.code == 2
    assert message in capsys.readouterr().err
