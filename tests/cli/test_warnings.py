"""What a document has without effect is said by `check config`, `plan` and `up`, with the line."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pointsman.cli.main import main

MANIFEST = """\
deployments:
- name: chat
  model: m
  replicas: 1
  engine: {type: simulated}
  scheduling:
    config:
      plugins:
      - type: queue-scorer
      - type: openai-parser
gateway: {listen: "127.0.0.1:0"}
"""
FIELD = "deployments[0].scheduling.config.plugins[1]"
MESSAGE = "openai-parser has no effect: requests are read by the gateway"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "m.yaml"
    file.write_text(MANIFEST)
    return file


def test_check_config(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "config", str(file)]) == 0
    assert f"{file}:10: warning: {FIELD}: {MESSAGE}" in capsys.readouterr().out.splitlines()


def test_plan(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(file), "--state", str(tmp_path)]) == 0
    assert f"{file}:10: warning: {FIELD}: {MESSAGE}" in capsys.readouterr().out.splitlines()
    assert main(["plan", str(file), "--state", str(tmp_path), "--json"]) == 0
    [warning] = json.loads(capsys.readouterr().out)["warnings"]
    assert warning == {"file": str(file), "line": 10, "field": FIELD, "message": MESSAGE}


@contextmanager
def running(*args: str) -> Iterator[subprocess.Popen[str]]:
    """`pointsman up --json`, from its first status on."""
    command = [sys.executable, "-m", "pointsman", "up", "--json", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up:
        try:
            assert up.stdout is not None
            assert json.loads(up.stdout.readline())["event"] == "status"
            yield up
        finally:
            up.terminate()
            up.communicate(timeout=120)


def test_up_and_up_again_from_what_is_stored(file: Path, tmp_path: Path) -> None:
    for given in ([str(file)], []):
        with running(*given, "--state", str(tmp_path / "state")) as up:
            assert up.stderr is not None
            assert up.stderr.readline() == f"{file}:10: warning: {FIELD}: {MESSAGE}\n"
