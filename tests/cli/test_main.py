"""The command line as a person meets it."""

import functools
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from pointsman.cli.main import main, parser
from pointsman.cli.up import runtime_choice
from pointsman.config.machines import RuntimeSpec
from pointsman.errors import PointsmanError
from pointsman.runtimes.choosing import RuntimeChoice

ROOT = Path(__file__).parents[2]
BROKEN = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorrer
- type: load-aware-scorer
  parameters:
    threshold: ten
- type: prefix-cache-scorer
  parameters: {matchLengthWeight: 7}
schedulingProfiles:
- name: default
  plugin: []
  plugins:
  - pluginRef: load-aware
    weight: 2
"""


def pointsman(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pointsman.cli.main", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    file = tmp_path / "broken.yaml"
    file.write_text(BROKEN)
    return file


@pytest.fixture
def good(tmp_path: Path) -> Path:
    file = tmp_path / "good.yaml"
    file.write_text("plugins:\n- type: queue-scorer\n- type: decode-filter\n- type: openai-parser\n")
    return file


def test_five_mistakes_in_one_file_are_five_errors_with_lines(broken: Path) -> None:
    result = pointsman("check", "config", str(broken))
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f'{broken}:4: plugins[0].type: there is no plugin type "queue-scorrer"; did you mean "queue-scorer"?',
        f'{broken}:7: plugins[1].parameters.threshold: expected a whole number, found "ten"',
        f"{broken}:9: plugins[2].parameters.matchLengthWeight: matchLengthWeight is 7; it must be from 0 to 1",
        f'{broken}:12: schedulingProfiles[0].plugin: unknown field; did you mean "plugins"?',
        f"{broken}:14: schedulingProfiles[0].plugins[0].pluginRef: "
        'no plugin is named "load-aware"; did you mean "load-aware-scorer"?',
        f"{broken}: 5 problems",
    ]


def test_a_good_file_says_what_it_would_build(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "config", str(good)]) == 0
    ok, warning = capsys.readouterr().out.splitlines()
    assert ok.startswith(f"{good}: ok: ")
    assert "within-budget > decode-filter > queue-scorer x1 > max-score-picker); flow control off" in ok
    assert warning == f"{good}:4: warning: plugins[2]: openai-parser has no effect: requests are read by the gateway"


def test_every_file_is_checked(good: Path, broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "config", str(broken), str(good)]) == 1
    captured = capsys.readouterr()
    assert f"{good}: ok" in captured.out
    assert "5 problems" in captured.err


def test_json(good: Path, broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "config", "--json", str(good), str(broken)]) == 1
    fine, bad = json.loads(capsys.readouterr().out)
    assert fine["ok"] is True
    assert [(one["line"], one["field"]) for one in fine["warnings"]] == [(4, "plugins[2]")]
    assert [problem["line"] for problem in bad["problems"]] == [4, 7, 9, 12, 14]
    assert set(bad["problems"][0]) == {"file", "line", "field", "message"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: there is no such file"),
        (b"\xff\xfe\x00", "cannot be read: it is UTF-16 text; save it as UTF-8"),
        (b"a: [1\nb: 2\n", "this is not YAML"),
        (b"just text", 'expected a mapping (field: value), found "just text"'),
        (b"[" * 100_000, "nested more than"),
    ],
)
def test_a_mistake_is_never_a_traceback(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "c.yaml"
    if content is not None:
        file.write_bytes(content)
    result = pointsman("check", "config", str(file))
    assert result.returncode == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_directory_is_not_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "config", str(tmp_path)]) == 1
    assert f"{tmp_path}: cannot be read: it is a directory; name a file" in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["chekc"], ["check"], ["check", "config"], ["schema", "--kind", "Pod"]])
def test_wrong_usage_exits_with_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(args)
    assert exited.value.code == 2
    assert "usage: pointsman" in capsys.readouterr().err


def test_own_classes_are_found_in_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    def scores(self, cycle, candidates):\n        return []\n")
    (tmp_path / "c.yaml").write_text("plugins:\n- type: mine:Mine\n")
    result = pointsman("check", "config", "c.yaml", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--kind", "Pointsman"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Pointsman"


ASKING = ["plan", "apply", "status", "explain", "requests", "logs", "drain", "down"]


@pytest.mark.parametrize(
    "command", ["up", *ASKING, "place", "key", "estimate", "schema", "check config", "check policy"]
)
def test_every_command_has_an_example_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main([*command.split(), "--help"])
    assert exited.value.code == 0
    out = capsys.readouterr().out
    assert f"  pointsman {command}" in out.partition("example")[2]
    assert "--json" in out or command == "schema"
    assert ("--state DIR" in out and "--url URL" in out) is (command in [*ASKING, "place"])


def test_help_shows_an_example_and_loads_nothing_heavy() -> None:
    code = "import sys, pointsman.cli.main as m; m.parser().format_help(); print(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    ours = {"pointsman.config", "pointsman.routing", "pointsman.selection"}
    assert loaded.isdisjoint({"numpy", "msgspec", "yaml", "hypothesis", "asyncio", "http.client", *ours})
    assert "example:" in pointsman("--help").stdout


def test_it_runs_as_a_module_too(good: Path) -> None:
    command = [sys.executable, "-m", "pointsman", "check", "config"]
    right, wrong = (
        subprocess.run([*command, file], capture_output=True, text=True, check=False, timeout=60)
        for file in (str(good), "nowhere.yaml")
    )
    assert (right.returncode, right.stdout.partition(": ")[2][:3]) == (0, "ok:")
    assert (wrong.returncode, wrong.stderr.partition(":")[0]) == (1, "nowhere.yaml")


UNAVOIDABLE = "import argparse, json, pathlib, shutil, typing, difflib, heapq"
"""What the command line stands on."""


@pytest.mark.parametrize(("command", "bare"), [(["--help"], UNAVOIDABLE), (["status"], f"{UNAVOIDABLE}, asyncio, ssl")])
def test_short_commands_are_fast(command: list[str], bare: str, tmp_path: Path) -> None:
    """Beside an interpreter that only imports what they stand on. There is no plane for `status` to ask."""

    def seconds(*command: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], check=False, capture_output=True, timeout=60, cwd=tmp_path)
        return time.perf_counter() - start

    # In turn, and the best of several: other tests may be using the processors.
    runs = [(seconds("-m", "pointsman.cli.main", *command), seconds("-c", bare)) for _ in range(7)]
    assert min(ours / other for ours, other in runs) < 3


def test_asking_a_plane_imports_nothing_of_a_plane(tmp_path: Path) -> None:
    code = "import sys; from pointsman.cli.main import main; main(['status']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    rooms = {name.split(".")[1] for name in done.stdout.split() if name.startswith("pointsman.")}
    assert "asyncio" in loaded
    assert not loaded & {"numpy", "uvloop", "sqlite3", "yaml", "ray", "grpc", "xxhash", "hypothesis", "jinja2"}
    assert not rooms & {"routing", "selection", "control", "runtimes", "gateway", "placement", "scaling", "simulator"}


def test_version() -> None:
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert pointsman("--version").stdout == f"pointsman {written}\n"


COMPLETED = {
    "pointsman sta": {"status"},
    "pointsman requests --on": {"--only"},
    "pointsman requests --only se": {"served"},
    "pointsman check con": {"config"},
    "pointsman up ma": {"manifest.yaml"},
    "pointsman status --state sta": {"state"},
}
"""What is typed, and what Tab offers."""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize("typed", COMPLETED)
def test_bash_completes_commands_options_choices_and_files(typed: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.yaml").touch()
    (tmp_path / "state").mkdir()
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(typed.split()) - 1}; COMP_LINE='{typed}'; COMP_POINT={len(typed)}"
    script = f"{completion_of('bash')}\n{ask}; _shtab_pointsman; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert {line.rstrip("/ ") for line in done.stdout.splitlines()} == COMPLETED[typed], done.stderr


@functools.cache
def completion_of(shell: str) -> str:
    return pointsman("completion", shell).stdout


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh", "powershell"])
def test_every_shell_has_a_script(shell: str) -> None:
    assert "requests" in completion_of(shell)


@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_closed_pipe_is_not_an_error() -> None:
    result = subprocess.run(
        f"{sys.executable} -m pointsman.cli.main schema | head -1",
        shell=True, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.stdout == "{\n"
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "wanted", "chosen"),
    [
        ([], RuntimeSpec(), RuntimeChoice("local", "", "")),
        ([], RuntimeSpec(type="ray", address="h:1", storage="/s"), RuntimeChoice("ray", "h:1", "/s")),
        (["--address", "i:2"], RuntimeSpec(type="ray", address="h:1"), RuntimeChoice("ray", "i:2", "")),
        (["--runtime", "ray"], RuntimeSpec(), RuntimeChoice("ray", "", "")),
        (["--runtime", "local"], RuntimeSpec(type="ray"), RuntimeChoice("local", "", "")),
        (
            ["--host", "10.0.0.2", "--namespace", "b"],
            RuntimeSpec(type="ray", address="h:1", namespace="a", lease=5.0, orphan_grace=90.0),
            RuntimeChoice("ray", "h:1", "", "10.0.0.2", "b", 5.0, 90.0),
        ),
    ],
)
def test_the_command_line_comes_before_the_manifest(
    flags: list[str], wanted: RuntimeSpec, chosen: RuntimeChoice
) -> None:
    assert runtime_choice(parser().parse_args(["up", *flags]), wanted) == chosen


def test_an_address_without_a_cluster_is_refused() -> None:
    with pytest.raises(PointsmanError, match="add: --runtime ray"):
        runtime_choice(parser().parse_args(["up", "--address", "h:1"]), RuntimeSpec())
    with pytest.raises(PointsmanError, match="add: --address"):
        runtime_choice(parser().parse_args(["up", "--runtime", "ray", "--host", "10.0.0.2"]), RuntimeSpec())
