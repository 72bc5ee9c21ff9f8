"""What can never start is tried once: the status has the reason and the remedy, and clients are told at once.

What may start another time is tried again. `up` ends if nothing can start, or if its port is in use.
"""

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.planes import LivePlane
from tests.live.manifests import LIFECYCLE, TINY, llama, manifest, simulated
from tests.live.test_no_instances import ask, assert_told_at_once

APPLICATION = {
    "kind": "Application",
    "name": "shop",
    "nodes": [{"name": "sell", "function": "nodes.py:sell"}],
    "calls": [{"id": "sold", "node": "sell", "args": [{"$input": []}]}],
    "output": {"$step": "sold"},
}
LATE = "import pathlib, sys; sys.exit('no connection') if not pathlib.Path('late').exists() else None"
"""A server that may start another time, for all that is known."""


def command(name: str, *words: str, **fields: Any) -> dict[str, Any]:
    engine = {"type": "command", "parameters": {"command": [*words, "{port}"]}}
    return {"name": name, "model": name, "engine": engine, "lifecycle": LIFECYCLE, **fields}


def engine(name: str, kind: str, **parameters: Any) -> dict[str, Any]:
    deployment = {"name": name, "model": name, "engine": {"type": kind, "parameters": parameters}}
    return {**deployment, "lifecycle": LIFECYCLE, "placement": {"cpu": True}}


def scripts(folder: Path, taken_port: int) -> list[dict[str, Any]]:
    """Deployments of which each fails for another reason, in the order of `REASONS`."""
    (folder / "not-gguf.gguf").write_text("hello")
    (folder / "cut.gguf").write_bytes(TINY.read_bytes()[:5000])
    (folder / "plain.txt").write_text("not a program")
    binds = f"import socket; socket.create_server(('127.0.0.1', {taken_port}))"
    return [
        engine("vllm", "vllm", model="gpt2", executable="no-such-vllm"),
        engine("sglang", "sglang", model="gpt2"),
        command("path", "./nothing/here", replicas=2),
        command("plain", "./plain.txt"),
        command("shell", "sh", "-c", "exec no-such-program"),
        command("package", sys.executable, "-c", "import no_such_package"),
        command("options", sys.executable, "-m", "http.server", "--bogus"),
        command("port", sys.executable, "-c", binds),
        command("says", "sh", "-c", "echo its license is missing; exit 78"),
        llama("weights", 1, parameters={"model": str(folder / "not-gguf.gguf")}),
        llama("cut", 1, parameters={"model": str(folder / "cut.gguf")}),
        llama("option", 1, parameters={"extra": {"n_bach": 1}}),
    ]


REASONS = {
    "vllm-1": ("no-program", "no-such-vllm cannot be run (No such file or directory); run: pip install vllm"),
    "sglang-1": ("no-package", "sglang is not installed; run: "),
    "path-2": ("no-program", "./nothing/here cannot be run (No such file or directory); install it, or correct"),
    "plain-1": ("no-program", "./plain.txt cannot be run (Permission denied)"),
    "shell-1": ("no-program", "no-such-program"),
    "package-1": ("no-package", "the Python package no_such_package is not installed"),
    "options-1": ("wrong-options", "unrecognized arguments: --bogus"),
    "port-1": ("port-taken", "Address already in use"),
    "says-1": ("refuses-to-start", "its license is missing"),
    "weights-1": ("refuses-to-start", "not-gguf.gguf holds no GGUF weights"),
    "cut-1": ("refuses-to-start", "it is truncated"),
    "option-1": ("refuses-to-start", 'did you mean "n_batch"?'),
    "shop.sell-1": ("refuses-to-start", "No module named 'no_such_package'; install the package that has"),
}


@pytest.fixture(scope="module")
def plane(module_plane: LivePlane) -> Iterator[LivePlane]:
    """With one deployment that serves, one that fails and may start another time, and many that cannot start."""
    folder = module_plane.folder
    (folder / "nodes.py").write_text("import no_such_package\ndef sell(x): return x\n")
    (folder / "shop.yaml").write_text(json.dumps(APPLICATION))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        failing = scripts(folder, taken.getsockname()[1])
        late = command("late", sys.executable, "-c", LATE)
        (folder / "key").write_text("k")
        keyed = llama("keyed", 1)
        keyed["engine"]["apiKeyFile"] = str(folder / "key")
        text = manifest(simulated("m", 1), keyed, late, *failing, drainTimeout="1s")
        module_plane.up(json.dumps({**json.loads(text), "applications": ["shop.yaml"]}), wait=False)
        module_plane.until(
            lambda: (
                all(module_plane.instances()[name]["final"] for name in REASONS)
                and module_plane.instances()["late-1"]["restarts"] >= 2
                and {"m-1", "keyed-1"} <= module_plane.pids().keys()
            ),
            "everything was tried",
        )
        yield module_plane


def test_each_has_its_reason_and_was_tried_once(plane: LivePlane) -> None:
    found = plane.instances()
    for name, (code, words) in REASONS.items():
        one = found[name]
        assert one["cause"]["code"] == "cannot-start", one
        assert one["cause"]["facts"]["why"]["code"] == code, one
        assert words in one["reason"], one
        assert one["reason"].endswith("; then apply it again")
        assert (one["phase"], one["restarts"], one["until_s"]) == ("backing off", 0, None)
    assert not found["late-1"]["final"]


def test_the_status_has_each_reason_in_full_and_once(plane: LivePlane) -> None:
    problems = [one["text"] for one in plane.status()["problems"] if one["code"] == "given-up"]
    assert len(problems) == len(REASONS)
    assert [one for one in problems if one.startswith("path-1 and 1 more are given up: ./nothing/here cannot be run")]
    shown = plane.pointsman("status").stdout
    assert (
        "pip install vllm; or set executable or python of the engine to one that has it; then apply it again" in shown
    )
    assert "given up" in shown


def test_clients_get_the_reason_at_once_without_paths(plane: LivePlane) -> None:
    assert_told_at_once(plane, "vllm", "vllm-1 cannot start: its program is not installed; an operator must correct")
    assert_told_at_once(plane, "weights", "weights-1 cannot start: its server refuses to")
    answer, _ = ask(plane, "weights")
    assert "not-gguf" not in answer.text
    assert ask(plane, "m")[0].status_code == 200


def test_up_stays_and_says_what_cannot_start(plane: LivePlane) -> None:
    assert plane.process.poll() is None
    assert "vllm-1 is given up (no-such-vllm cannot be run" in plane.log()


def test_a_crash_is_tried_again_until_its_key_is_gone(plane: LivePlane) -> None:
    """An instance that was ready comes back after a crash; what it needs for that may be missing by then."""
    first = plane.pids()["keyed-1"]
    os.kill(first, signal.SIGKILL)
    plane.until(lambda: plane.pids().get("keyed-1", first) != first, "it is back")
    (plane.folder / "key").write_text("")
    os.kill(plane.pids()["keyed-1"], signal.SIGKILL)
    plane.until(lambda: plane.instances()["keyed-1"]["final"], "it is given up")
    told = f"there is no API key: file {plane.folder / 'key'} is empty; write the API key into it"
    assert plane.instances()["keyed-1"]["reason"] == f"{told}; then apply it again"
    (plane.folder / "key").write_text("k")


def test_applying_it_again_tries_it_again(plane: LivePlane) -> None:
    """Nothing else is restarted, and apply does not wait for what cannot start."""
    before = plane.pids()
    (plane.folder / "late").touch()
    planned = json.loads(plane.pointsman("plan", plane.folder / "manifest.yaml", "--json").stdout)["changes"]
    told = [(one["what"], one["subject"], one["reason"]["code"]) for one in planned]
    assert ("restart", "vllm-1", "tried-again") in told
    shutil.copy(TINY, plane.folder / "not-gguf.gguf")
    (plane.folder / "nodes.py").write_text("def sell(x): return x\n")
    done = plane.pointsman("apply", plane.folder / "manifest.yaml", "--no-wait")
    assert done.returncode == 0, done.stderr
    plane.until(lambda: {"weights-1", "shop.sell-1", "keyed-1"} <= set(plane.pids()), "what was corrected runs")
    plane.until(lambda: plane.instances()["vllm-1"]["final"], "it was tried")
    assert before.items() <= plane.pids().items()
    assert ask(plane, "weights")[0].status_code == 200
    text = manifest(simulated("m", 1), command("path", "./nothing/here"))
    done = plane.pointsman("apply", plane.write(text, "fewer.yaml"), "--yes", "--timeout", "50s")
    assert done.returncode == 1
    assert "not everything can start; see: " in done.stderr
    assert plane.process.poll() is None
    assert ask(plane, "m")[0].status_code == 200


def up(plane: LivePlane, text: str) -> tuple[int, str]:
    """The exit code and the output of an `up` that ends by itself. Nothing is left of it."""
    plane.write(text)
    done = plane.pointsman("up", plane.folder / "manifest.yaml")
    assert plane.processes() == {}
    return done.returncode, done.stdout + done.stderr


def test_up_ends_if_nothing_can_start(plane_of_its_own: LivePlane) -> None:
    plane, (where, what) = plane_of_its_own, ("path", "./nothing/here")
    code, output = up(plane, manifest(command(where, what, replicas=2), command("other", what)))
    assert code == 1, output
    assert "pointsman: nothing can start:\n  path-1 and 1 more are given up: ./nothing/here cannot be run" in output
    assert "other-1 is given up: " in output
    never = simulated("huge", 1, placement={"resources": {"gpus": 0, "memory": "100Ti"}})
    code, output = up(plane, manifest(command(where, what), never))
    assert code == 1, output
    assert "huge-1 is given up: no place" in output


def test_a_gateway_address_in_use_is_an_error_and_leaves_nothing(plane_of_its_own: LivePlane) -> None:
    plane = plane_of_its_own
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        for setting in ("listen", "grpcListen"):
            code, output = up(plane, manifest(simulated("m", 1), **{setting: address}))
            assert code == 1
            remedy = f"stop the program that listens there, or set gateway.{setting} to another address"
            assert output == f"pointsman: cannot listen on {address}: Address already in use; {remedy}\n"
    assert not (plane.state / "logs").exists(), "no process was started"


@pytest.fixture
def plane_of_its_own(tmp_path: Path) -> Iterator[LivePlane]:
    made = LivePlane(tmp_path)
    yield made
    made.close()
