"""`drain`, `scale`, `down` and `key`."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from pointsman.cli.main import main
from pointsman.config import load_manifest
from pointsman.errors import command
from tests.cli.planes import Plane


def test_drain(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["POST", "instances/chat-1/drain"] = {"instance": "chat-1", "draining": True}
    assert main(["drain", "chat-1"]) == 0
    assert capsys.readouterr().out == f"chat-1 is being drained and replaced; see: {command('status')}\n"
    assert main(["drain", "chat-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"instance": "chat-1", "draining": True}


SCALING = {"deployment": "chat", "desired": 4, "policy": "target-ongoing"}


def test_scale(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["POST", "deployments/diamond%2Fm1/scale"] = SCALING
    plane.answers["POST", "deployments/chat/scale"] = SCALING
    assert main(["scale", "chat", "--replicas", "4", "--for", "2h"]) == 0
    status, auto = command("status"), command("scale", "chat", "--auto")
    back = f"to let target-ongoing decide again: {auto}\n"
    assert capsys.readouterr().out == f"chat: target 4, for 2h; see: {status}\n{back}"
    assert main(["scale", "diamond/m1", "--replicas", "0"]) == 0
    assert capsys.readouterr().out == f"chat: target 4, until further notice; see: {status}\n{back}"
    assert main(["scale", "chat", "--auto"]) == 0
    assert capsys.readouterr().out == "chat: target-ongoing decides; the target is now 4\n"
    assert main(["scale", "chat", "--auto", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == SCALING
    asked = [(one.body["replicas"], one.body["for_s"]) for one in plane.asked]
    assert asked == [(4, 7200.0), (0, None), (None, None), (None, None)]
    assert main(["scale", "chat", "--auto", "--for", "2h"]) == 2
    assert "--for goes with --replicas" in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["--replicas", "-1"], ["--replicas", "x"], ["--replicas", "1", "--auto"]])
def test_scale_needs_one_number(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["scale", "chat", *args])
    assert "usage: pointsman scale" in capsys.readouterr().err


def test_down_waits_until_the_plane_is_gone(plane: Plane, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["POST", "down"] = {"stopping": True}
    assert main(["down"]) == 0
    assert capsys.readouterr().out == "the plane has stopped\n"
    assert not (tmp_path / "admin.sock").exists()
    assert main(["down"]) == 1
    assert "no plane is running" in capsys.readouterr().err


def test_down_need_not_wait(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["POST", "down"] = {"stopping": True}
    assert main(["down", "--no-wait", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"stopping": True, "stopped": False}


def test_down_gives_up_waiting(
    plane: Plane, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.answers["POST", "down"] = {"stopping": True}
    monkeypatch.setattr(plane, "stop", lambda: None)
    assert main(["down", "--timeout", "200ms"]) == 1
    assert "the plane is still stopping" in capsys.readouterr().err
    monkeypatch.undo()


def test_a_key_and_its_line_fit_into_a_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "--tenant", "red", "--name", "laptop"]) == 0
    _, key, where, line = map(str.strip, capsys.readouterr().out.splitlines())
    assert where == "under gateway.keys of the manifest:"
    [spec] = load_manifest(f"gateway:\n  tenants: [{{name: red}}]\n  keys:\n  {line}\n").gateway.keys
    assert (spec.tenant, spec.name, spec.sha256) == ("red", "laptop", sha256(key.encode()).hexdigest())


def test_an_admin_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "--admin", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    hashed = load_manifest(f"gateway:\n  {told['manifest']}\n").gateway.admin_key_sha256
    assert hashed == told["sha256"] == sha256(told["key"].encode()).hexdigest()


def test_no_two_keys_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(10):
        assert main(["key", "--json"]) == 0
    keys = {line for line in capsys.readouterr().out.splitlines() if '"key"' in line}
    assert len(keys) == 10
    assert all(len(line) > 50 for line in keys)


@pytest.mark.parametrize("args", [["--tenant", "a, b"], ["--name", "x}"], ["--admin", "--tenant", "red"]])
def test_keys_for_nobody(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["key", *args])
    assert exited.value.code == 2
    assert "usage: pointsman key" in capsys.readouterr().err
