"""Commands find the plane, and say clearly when there is none."""

import json
import os
import socket
from pathlib import Path

import pytest

from pointsman.cli.client import Client, NoPlane, PlaneRefused, PlaneSilent, Remote
from pointsman.cli.main import main
from pointsman.cli.options import state_folder
from pointsman.errors import PointsmanError
from tests.cli.planes import READY, LocalServer, OpenServer, Plane, pointsman


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ("/a", {"POINTSMAN_STATE": "/b"}, "/a"),
        (None, {"POINTSMAN_STATE": "/b", "XDG_STATE_HOME": "/c"}, "/b"),
        (None, {"POINTSMAN_STATE": "~/b"}, "/home/me/b"),
        (None, {"POINTSMAN_STATE": "b"}, "{here}/b"),
        (None, {"XDG_STATE_HOME": "/c"}, "/c/pointsman"),
        (None, {"XDG_STATE_HOME": "not/absolute"}, "/home/me/.local/state/pointsman"),
        (None, {}, "/home/me/.local/state/pointsman"),
    ],
)
def test_where_the_state_is(
    given: str | None, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("POINTSMAN_STATE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert state_folder(Path(given) if given else None) == Path(expected.format(here=Path.cwd()))


ASKING = [
    ["status"],
    ["explain", "r"],
    ["requests"],
    ["logs", "chat-1"],
    ["drain", "chat-1"],
    ["down"],
]


@pytest.mark.parametrize("args", ASKING, ids=lambda args: args[0])
def test_without_a_plane_every_command_says_so(
    args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*args, "--state", str(tmp_path)]) == 1
    captured, start = capsys.readouterr(), f"start one with: pointsman up FILE --state {tmp_path}"
    assert captured.err == f"pointsman: no plane is running in {tmp_path}; {start}\n"
    assert captured.out == ""
    assert main([*args, "--state", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["error"]["message"].startswith(f"no plane is running in {tmp_path}")


def test_a_socket_that_a_plane_left_behind_is_no_plane(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "admin.sock"))
    left.close()
    with pytest.raises(NoPlane):
        Client(tmp_path).get("status")


def test_the_path_of_the_socket_may_be_long(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 20) / ("longer" * 20)
    folder.mkdir(parents=True)
    plane = Plane()
    plane.answers["GET", "status"] = READY
    with plane.on(LocalServer, str(folder / "admin.sock")):
        assert Client(folder).get("status") == READY
    with pytest.raises(NoPlane):
        Client(folder).get("status")


@pytest.mark.skipif(os.getuid() == 0, reason="nothing is forbidden to root")
def test_somebody_elses_plane_is_not_no_plane(plane: Plane, tmp_path: Path) -> None:
    (tmp_path / "admin.sock").chmod(0)
    with pytest.raises(PlaneSilent, match="Permission denied"):
        Client(tmp_path).get("status")


def test_names_are_quoted_and_what_is_left_out_is_not_asked(plane: Plane, tmp_path: Path) -> None:
    client = Client(tmp_path)
    plane.answers["GET", "requests/a%2Fb%20c"] = {"found": "it"}
    assert client.get("requests", "a/b c") == {"found": "it"}
    with pytest.raises(PlaneRefused):
        client.get("requests", model="a&b", tenant=None)
    assert plane.asked[-1].target == "requests?model=a%26b"


@pytest.mark.parametrize("args", ASKING[1:-1], ids=lambda args: args[0])
def test_errors_of_the_plane_are_printed_as_they_are(
    args: list[str], plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"message": "nothing is known of that", "type": "invalid_request_error", "code": "not_found"}
    plane.answers = {}
    plane.answer = lambda method, target: (404, json.dumps({"error": error}).encode())  # type: ignore[method-assign]
    assert main(args) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "pointsman: nothing is known of that\n")
    assert main([*args, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"error": error}


@pytest.mark.parametrize("answer", [(200, b"<html>"), (502, b"bad gateway"), (500, b"")])
def test_an_answer_that_is_none_is_shown(plane: Plane, answer: tuple[int, bytes], tmp_path: Path) -> None:
    plane.answers["GET", "status"] = answer
    with pytest.raises(PointsmanError, match=f"expected a plane's answer, found status {answer[0]}: "):
        Client(tmp_path).get("status")


def test_over_tcp_the_key_goes_along(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plane = Plane()
    plane.answers["GET", "status"] = READY
    with plane.on(OpenServer, ("127.0.0.1", 0)) as (host, port):
        monkeypatch.setenv("POINTSMAN_ADMIN_KEY", "secret")
        assert main(["status", "--json", "--url", f"http://{host}:{port}"]) == 0
        assert json.loads(capsys.readouterr().out) == READY
        assert plane.asked[0].key == "Bearer secret"
    assert main(["status", "--url", f"http://{host}:{port}"]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"pointsman: no plane answers at http://{host}:{port} (Connection refused)")


def test_over_tcp_there_must_be_a_key_and_an_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("POINTSMAN_ADMIN_KEY", raising=False)
    assert main(["status", "--url", "http://localhost:1"]) == 1
    assert "--url needs the admin key of the plane in the environment" in capsys.readouterr().err
    for url in ("localhost:1", "http://", "http://a:b", "http://a:1/v1", "ftp://a:1"):
        with pytest.raises(PointsmanError, match="--url must be http://host:port"):
            Remote(url, "key")


def test_state_and_url_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["status", "--state", "/x", "--url", "http://localhost:1"])
    assert exited.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_a_command_in_a_process_of_its_own(plane: Plane, tmp_path: Path) -> None:
    result = pointsman("status", "--state", tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("plane ready, up for 5m, generation 3\n")
    assert "\x1b" not in result.stdout
