"""A manifest cannot take a plane down by mistake: empty ones are refused, destructive ones are confirmed."""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bench.chaos.planes import LivePlane
from pointsman.cli.client import PlaneRefused
from tests.live.manifests import hashed, manifest, simulated

KEYS = {"tenants": [{"name": "alice"}], "keys": [{"tenant": "alice", "sha256": hashed("key-of-alice")}]}
BASE = manifest(simulated("m", 3), simulated("other", 1), **KEYS)
EMPTY = ["", "\n", "# nothing yet\n", "{}\n", "---\n"]


@pytest.fixture(scope="module")
def started(module_plane: LivePlane) -> LivePlane:
    module_plane.up(BASE)
    return module_plane


@pytest.fixture
def plane(started: LivePlane) -> Iterator[LivePlane]:
    """With BASE in force."""
    yield started
    planned = started.admin.post("plan", body=body(started, BASE))
    started.admin.post("apply", body=body(started, BASE, confirmation=planned.get("confirmation", "")))
    started.until(started.is_settled, "BASE in force")


def status_without_key(plane: LivePlane) -> int:
    """What a client without a key is answered."""
    address = urlsplit(plane.url)
    connection = HTTPConnection(address.hostname or "", address.port or 0, timeout=10)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status
    finally:
        connection.close()


def body(plane: LivePlane, text: str, **more: Any) -> dict[str, Any]:
    return {"text": text, "folder": str(plane.folder), "file": "m.yaml", **more}


def refused(plane: LivePlane, text: str, **more: Any) -> PlaneRefused:
    with pytest.raises(PlaneRefused) as caught:
        plane.admin.post("apply", body=body(plane, text, **more))
    return caught.value


@pytest.mark.parametrize("text", EMPTY)
def test_an_empty_manifest_is_refused_with_what_to_do(plane: LivePlane, text: str) -> None:
    file, before = plane.write(text, "empty.yaml"), plane.pids()
    error = refused(plane, text)
    assert (error.status, error.error["code"]) == (422, "invalid_manifest")
    if text == EMPTY[0]:  # the commands check the same
        for command in ("plan", "apply"):
            done = plane.pointsman(command, file)
            assert done.returncode == 1
            assert "the manifest is empty" in done.stderr
            assert "pointsman down" in done.stderr
        assert plane.pointsman("apply", file, "--yes").returncode == 1
        begun = plane.pointsman("up", file, POINTSMAN_STATE=str(plane.folder / "nowhere"))
        assert begun.returncode == 1
        assert "the manifest is empty" in begun.stderr
    assert status_without_key(plane) == 401
    assert plane.pids() == before


@pytest.mark.parametrize(
    ("text", "danger", "marked"),
    [
        (manifest(simulated("m", 3), simulated("other", 1)), "removes authentication", {("gateway", "gateway.keys")}),
        (manifest(**KEYS), "removes all 2 deployments", {("close", "m"), ("close", "other")}),
        (manifest(simulated("n", 3), **KEYS), "removes all 2 deployments", {("close", "m"), ("close", "other")}),
        (manifest(simulated("m", 1), **KEYS), "takes away 3 of 4 instances that run",
         {("stop", "m-2"), ("stop", "m-3"), ("stop", "other-1")}),
    ],
)  # fmt: skip
def test_a_destructive_change_is_marked_and_needs_yes(
    plane: LivePlane, text: str, danger: str, marked: set[tuple[str, str]]
) -> None:
    before = plane.pids()
    planned = plane.admin.post("plan", body=body(plane, text))
    assert any(danger in one for one in planned["destructive"])
    assert marked <= {(one["what"], one["subject"]) for one in planned["changes"] if one.get("destructive")}
    lines = [line.split()[1:3] for line in planned["text"].splitlines() if line.startswith("! ")]
    assert {subject for _, subject in marked} <= {subject for _, subject in lines}
    assert f"! destructive: it {danger}" in planned["text"]
    error = refused(plane, text)
    assert (error.status, error.error["code"]) == (409, "confirmation_needed")
    assert error.error["destructive"] == planned["destructive"]
    refused(plane, text, confirmation="0123456789abcdef")
    assert plane.pids() == before
    assert status_without_key(plane) == 401


def test_without_a_terminal_the_command_needs_yes(plane: LivePlane) -> None:
    file = plane.write(manifest(simulated("m", 3), simulated("other", 1)), "open.yaml")
    assert "! destructive: it removes authentication" in plane.pointsman("plan", file).stdout
    done = plane.pointsman("apply", file)
    assert done.returncode == 1
    assert "nothing was changed: it removes authentication" in done.stderr
    assert "run the same command with --yes" in done.stderr
    assert status_without_key(plane) == 401
    done = plane.pointsman("apply", file, "--yes", "--no-wait")
    assert (done.returncode, done.stderr) == (0, "")
    assert status_without_key(plane) == 200


def test_a_rollback_that_is_destructive_needs_yes_too(plane: LivePlane) -> None:
    file = plane.write(manifest(simulated("m", 3), simulated("other", 1)), "open.yaml")
    assert plane.pointsman("apply", file, "--yes", "--no-wait").returncode == 0
    plane.admin.post("apply", body=body(plane, BASE))
    done = plane.pointsman("rollback")
    assert done.returncode == 1
    assert "nothing was changed: it removes authentication" in done.stderr
    assert status_without_key(plane) == 401
    assert plane.pointsman("rollback", "--yes", "--no-wait").returncode == 0
    assert status_without_key(plane) == 200


def test_half_of_the_instances_may_go_without_a_question(plane: LivePlane) -> None:
    text = manifest(simulated("m", 2), **KEYS)
    assert plane.pointsman("apply", plane.write(text, "half.yaml")).returncode == 0


def test_exactly_the_confirmed_change_is_applied(plane: LivePlane) -> None:
    """A confirmation is of one change to one revision: it holds neither for another change nor after one."""
    smaller, open_ = manifest(simulated("m", 1), **KEYS), manifest(simulated("m", 3), simulated("other", 1))
    planned = plane.admin.post("plan", body=body(plane, smaller))["confirmation"]
    refused(plane, open_, confirmation=planned)
    with_limit = manifest(simulated("m", 3), simulated("other", 1), limits={"maxConnections": 500}, **KEYS)
    plane.admin.post("apply", body=body(plane, with_limit))
    again = refused(plane, smaller, confirmation=planned).error["confirmation"]
    assert again != planned
    assert plane.admin.post("apply", body=body(plane, smaller, confirmation=again))["changes"]


def on_terminal(plane: LivePlane, file: Path, answer: bytes) -> tuple[int, str]:
    """`pointsman apply` on a terminal, where this is typed when it asks."""
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "pointsman.cli.main", "apply", str(file), "--state", str(plane.state)]
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, cwd=plane.folder)
    os.close(theirs)
    shown, asked = b"", False
    with suppress(OSError):  # its end
        while piece := os.read(ours, 4096):
            shown += piece
            if not asked and b"Type yes" in shown:
                asked = os.write(ours, answer) > 0
    os.close(ours)
    return process.wait(60), shown.decode()


def test_on_a_terminal_the_operator_is_asked(plane: LivePlane) -> None:
    file = plane.write(manifest(simulated("m", 1), **KEYS), "smaller.yaml")
    code, shown = on_terminal(plane, file, b"no\n")
    assert code == 1
    assert "! destructive: it takes away 3 of 4 instances that run" in shown
    assert "nothing was changed" in shown
    assert len(plane.pids()) == 4
    code, shown = on_terminal(plane, file, b"yes\n")
    assert code == 0, shown
    plane.until(lambda: len(plane.instances()) == 1, "one instance left")


def test_secrets_are_never_shown(plane: LivePlane) -> None:
    other = {"tenants": KEYS["tenants"], "keys": [{"tenant": "alice", "sha256": hashed("another")}]}
    env = simulated("m", 3)
    text = manifest(env, simulated("other", 1), adminKeySha256=hashed("admin"), **other)
    planned = plane.pointsman("plan", plane.write(text, "keys.yaml"))
    assert "1 key of alice added, 1 key of alice removed" in planned.stdout
    for digest in (hashed("another"), hashed("admin"), hashed("key-of-alice")):
        assert digest not in planned.stdout


def test_scaling_that_is_added_starts_with_the_instances_that_run(plane: LivePlane) -> None:
    before = plane.pids()
    text = manifest(simulated("m", 3, scaling={"min": 1, "max": 8, "interval": "100ms"}), simulated("other", 1), **KEYS)
    text = text.replace('"replicas": 3', '"replicas": 1')
    planned = plane.admin.post("plan", body=body(plane, text))
    assert [one["what"] for one in planned["changes"]] == ["scaling"]
    assert plane.admin.post("apply", body=body(plane, text))["changes"] == planned["changes"]

    def scaling() -> dict[str, Any]:
        found: dict[str, Any] = plane.admin.get("deployments", "m", "scaling")
        return found

    plane.until(lambda: scaling()["wanted"] in (0, 1), "a policy that wants fewer")
    assert scaling()["desired"] == 3, "downDelay holds"
    assert plane.pids() == before
    assert "scaling begins with the 3 that run" in plane.pointsman("explain", "deployment", "m").stdout
