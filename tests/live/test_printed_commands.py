"""Commands that the product prints work as printed: they are read from real output, and run in a shell."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench.chaos.planes import LivePlane
from pointsman.cli.main import parser
from tests.live.manifests import hashed, manifest, simulated

ROOT = Path(__file__).parents[2]
PROGRAM = ".venv/bin/pointsman"
"""As after `make run`: not on the path."""
PRINTED = re.compile(rf"(?:^|: )((?:curl|{re.escape(PROGRAM)}) [^;\n]*(?:'[^']*'[^;\n]*)*)", re.MULTILINE)
"""A command is a line, or ends a clause after a colon."""
CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=here -keyout key.pem "
    "-out cert.pem"
)
pytestmark = [
    pytest.mark.skipif(shutil.which(tool) is None, reason=f"there is no {tool}") for tool in ("bash", "curl", "openssl")
]
NODES = """\
import pydantic

import pointsman as pm


class Order(pydantic.BaseModel):
    name: str = pydantic.Field(min_length=3, max_length=8)
    number: int = pydantic.Field(ge=2, multiple_of=5)
    kind: pydantic.types.Literal["a", "b"]
    parts: list["Part"]
    note: str | None = None


class Part(pydantic.BaseModel):
    weight: float = pydantic.Field(gt=0, lt=1)
    made: __import__("datetime").date


@pm.deployment
def weigh(order):
    return sum(part.weight for part in order.parts)


with pm.InputNode(schema=Order) as order:
    orders = weigh.bind(order)
"""


def with_program(folder: Path) -> LivePlane:
    """A folder in which the program is where `make run` puts it."""
    script = Path(sys.executable).with_name("pointsman")
    if not script.exists():
        pytest.skip("pointsman is not installed as a script")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / PROGRAM).symlink_to(script)
    plane = LivePlane(folder)
    plane.program = [PROGRAM]
    plane.environment |= {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "POINTSMAN_KEY": "k-red",
    }
    return plane


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlane]:
    """With a model, an application whose input has a schema, keys, TLS, and a state directory of its own."""
    plane = with_program(tmp_path_factory.mktemp("a plane"))
    (plane.folder / "nodes.py").write_text(NODES)
    built = shell(plane, f"{PROGRAM} build nodes.py:orders -o orders.yaml")
    assert built.returncode == 0, built.stderr
    subprocess.run(CERTIFICATE.split(), cwd=plane.folder, check=True, capture_output=True)
    tls = {"certFile": "cert.pem", "keyFile": "key.pem"}
    keys = [{"tenant": "red", "sha256": hashed("k-red")}]
    model = simulated("m", 1, model="it's m", scaling={"min": 1, "max": 3, "downDelay": "1h"})
    text = manifest(model, tls=tls, keys=keys, tenants=[{"name": "red"}])
    plane.up(json.dumps({**json.loads(text), "applications": ["orders.yaml"]}))
    yield plane
    plane.close()


def shell(plane: LivePlane, command: str) -> subprocess.CompletedProcess[str]:
    """In the folder that the plane was started from, as a person would paste it."""
    env = {**os.environ, **plane.environment}
    env.pop("POINTSMAN_STATE", None)
    return subprocess.run(["bash", "-c", command], cwd=plane.folder, env=env, capture_output=True, text=True)


def commands_in(text: str) -> list[str]:
    return [found.strip() for found in PRINTED.findall(text)]


def run_all(plane: LivePlane, commands: Sequence[str]) -> list[str]:
    """The output of each. All of them succeed."""
    outputs = []
    for command in commands:
        done = shell(plane, command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert not command.startswith("curl") or re.match(r"HTTP/1.1 200 ", done.stdout), f"{command}\n{done.stdout}"
        outputs.append(done.stdout)
    return outputs


def test_what_up_prints_works_with_keys_tls_a_schema_and_a_state_directory(plane: LivePlane) -> None:
    plane.until(lambda: " explain" in plane.log(), "the commands are printed")
    printed = commands_in(plane.log())
    assert len(printed) == 3, plane.log()
    chat, orders, explained = run_all(plane, printed)
    assert "data: [DONE]" in chat
    assert orders.rstrip().endswith("0.5")
    assert "through nodes: served" in explained
    assert "with the key of a tenant in $POINTSMAN_KEY" in plane.log()


def test_an_application_without_a_schema_gets_an_input_of_its_form(tmp_path: Path) -> None:
    plane = with_program(tmp_path)
    plane.state = default_state = tmp_path / "xdg" / "pointsman"
    plane.admin = type(plane.admin)(default_state)
    plane.environment |= {"XDG_STATE_HOME": str(tmp_path / "xdg"), "PATH": f"{tmp_path}/.venv/bin:/usr/bin:/bin"}
    plane.program = ["pointsman"]
    try:
        done = shell(plane, f"pointsman build {ROOT}/examples/diamond.py:dag -o diamond.yaml")
        assert done.returncode == 0, done.stderr
        plane.up((tmp_path / "diamond.yaml").read_text(), wait=False)
        plane.until(lambda: " explain" in plane.log(), "the commands are printed")
        printed = re.findall(r"^(?:curl|pointsman) .*", plane.log(), re.MULTILINE)
        assert [command.split()[0] for command in printed] == ["curl", "pointsman"]
        assert "-d '[1, 2, 3]'" in printed[0]
        assert printed[1] == "pointsman explain"
        assert run_all(plane, printed)[0].rstrip().endswith("\n8")
    finally:
        plane.close()


SAYING = {
    "scale m --replicas 2": ["status", "scale"],
    "deploy manifest.yaml": ["apply"],
    "plan manifest.yaml --state other": ["up"],
    "status --state other": ["up"],
    "deploy orders.yaml --state other": ["up"],
    "build nodes.py:orders -o copy.yaml": ["deploy", "up"],
    "explain a deployment": ["explain"],
    "explain deployment": ["status"],
    "up": ["down"],
}
"""Commands, and which ones their output suggests."""


def test_commands_in_messages_work_in_the_same_shell(plane: LivePlane) -> None:
    to_run: set[str] = set()
    for words, suggested in SAYING.items():
        where = "" if "--state" in words or words.startswith("build") else f" --state '{plane.state}'"
        done = shell(plane, f"{PROGRAM} {words}{where}")
        printed = commands_in(done.stdout + done.stderr)
        assert [command.split()[1] for command in printed] == suggested, f"{words}\n{done.stdout}{done.stderr}"
        for command in printed:
            parser().parse_args(shlex.split(command)[1:])  # exits if that is not its usage
            assert command.count("--state") == (0 if words.startswith("build") else 1)
        to_run |= {command for command in printed if command.split()[1] in ("status", "scale", "apply")}
    run_all(plane, sorted(to_run))
