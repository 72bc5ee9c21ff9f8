"""What commands say about wrong input, for every command and every way in which its input can be wrong.

A message names what was given, says why it is of no use and what to do, in words and not in Python. The exit code is 2
for wrong usage, else 1.
"""

import argparse
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pointsman.cli.main import FILES, main, parser
from pointsman.errors import UnusableFile

MANIFEST = "deployments:\n- {name: chat, model: m, replicas: 1, engine: {type: simulated}}\n"
LOAD = "t_s,rps\n" + "".join(f"{60 * minute},1\n" for minute in range(10))
PIPELINE = """\
import pointsman as pm

@pm.deployment
def double(number: int) -> int:
    return 2 * number

with pm.InputNode() as given:
    dag = double.bind(given)
"""
PYTHON = re.compile(r"Traceback|\w+Error\b|\w+Exception\b|Errno|<class|\bb'|object at 0x|\bNone\b|Unknown error")
"""What a message for people does not have."""


class Said(NamedTuple):
    code: int
    out: str
    err: str


class Commands:
    """Runs commands in this process, in a folder of good and bad files."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *words: str) -> Said:
        try:
            code = main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
        return Said(code, *self._capsys.readouterr())

    def fails(self, code: int, *words: str) -> str:
        """What it says."""
        said = self.run(*words)
        assert (said.code, said.out) == (code, ""), said
        assert PYTHON.search(said.err) is None, said.err
        return said.err


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Commands]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POINTSMAN_STATE", str(tmp_path / "nothing"))
    monkeypatch.setenv("POINTSMAN_ADMIN_KEY", "key")
    for name, text in {"m.yaml": MANIFEST, "load.csv": LOAD, "pipe.py": PIPELINE, "plain": "x"}.items():
        (tmp_path / name).write_text(text)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")  # it exists, and not even root can open it
        for suffix in ("", ".yaml", ".csv", ".gguf", ".py"):
            (tmp_path / f"folder{suffix}").mkdir()
            (tmp_path / f"binary{suffix}").write_bytes(bytes(range(256)))
            (tmp_path / f"latin{suffix}").write_bytes("name: café\n".encode("latin-1"))
            (tmp_path / f"wide{suffix}").write_bytes("name: café\n".encode("utf-16"))
            if suffix:
                (tmp_path / f"socket{suffix}").symlink_to("socket")
        yield Commands(capsys)


# Files

POLICY = ("--policy", "fifo", "--fleet", "1x8B|h100_sxm|vllm|tp1")
REQUESTS = "generate:poisson?rate=1&seconds=2"
REHEARSE = ("rehearse", "scaling", "panic", "--capacity", "1", "--load")
READING = {
    ("up", "file"): ["up", "{}.yaml"],
    ("plan", "file"): ["plan", "{}.yaml"],
    ("apply", "file"): ["apply", "{}.yaml"],
    ("deploy", "file"): ["deploy", "{}.yaml"],
    ("check config", "files"): ["check", "config", "{}.yaml"],
    ("place", "file"): ["place", "{}.yaml"],
    ("place", "fleet"): ["place", "m.yaml", "--fleet", "{}.yaml"],
    ("estimate", "path"): ["estimate", "{}.gguf"],
    ("estimate", "lora"): ["estimate", "{}.gguf", "--lora", "{}.gguf"],
    ("estimate", "draft"): ["estimate", "{}.gguf", "--draft", "{}.gguf"],
    ("rehearse scaling", "load"): [*REHEARSE, "{}.csv"],
    ("rehearse scaling", "policies"): ["rehearse", "scaling", "{}.py:mine", "--capacity", "1", "--load", "load.csv"],
    ("build", "pipeline"): ["build", "{}.py:dag"],
    ("lab run", "recording"): ["lab", "run", "{}.csv"],
    ("lab compare", "recording"): ["lab", "compare", "{}.csv", *POLICY],
    ("lab capacity", "recording"): ["lab", "capacity", "{}.csv", *POLICY],
    ("lab run", "faults"): ["lab", "run", REQUESTS, *POLICY, "--faults", "{}.yaml"],
    ("lab compare", "faults"): ["lab", "compare", REQUESTS, *POLICY, "--faults", "{}.yaml"],
    ("lab capacity", "faults"): ["lab", "capacity", REQUESTS, *POLICY, "--faults", "{}.yaml"],
    ("lab whatif", "recording"): ["lab", "whatif", "m.yaml", "--against", "m.yaml", "--recording", "{}.csv"],
    ("lab regret", "saved"): ["lab", "regret", "{}.yaml", "--request", "1"],
}
"""(command, argument) -> a command line with the file in place of {}."""
WRITING = {
    ("place", "svg"): ["place", "m.yaml", "--svg", "{}"],
    ("rehearse scaling", "svg"): [*REHEARSE, "load.csv", "--svg", "{}"],
    ("build", "output"): ["build", "pipe.py:dag", "-o", "{}"],
    ("lab run", "save"): ["lab", "run", REQUESTS, *POLICY, "--no-cache", "--save", "{}"],
    ("lab compare", "html"): ["lab", "compare", REQUESTS, *POLICY, "--no-cache", "--html", "{}"],
}
OF_SERVERS = {("record", "file"), ("lab calibrate", "output")}
"""Written with what a server says; tests of those commands have one."""
WHY = {
    "missing": "there is no such",
    "no/where": "there is no",
    "plain/inside": "is not a directory|there is no such",
    "folder": "it is a directory; name a file|expected a f",
    "binary": "it is a binary file, not text|expected GGUF weights, found a file that begins with",
    "latin": "it is not UTF-8 text; save it as UTF-8|expected GGUF weights",
    "wide": "it is UTF-16 text; save it as UTF-8|expected GGUF weights",
    "socket": "No such device or address|found something else",
    "x" * 300: "File name too long",
}
"""A file -> why it is of no use; models are binary, and have folders."""


@pytest.mark.parametrize("file", WHY, ids=lambda name: name[:12])
@pytest.mark.parametrize("line", READING.values(), ids=[" ".join(key) for key in READING])
def test_a_file_that_cannot_be_read(commands: Commands, line: list[str], file: str) -> None:
    told = commands.fails(1, *(word.replace("{}", file) for word in line))
    assert file[:150] in told
    assert re.search(WHY[file], told), told


@pytest.mark.parametrize(
    ("file", "why"),
    {
        "folder": "it is a directory; name a file",
        "no/where": "there is no directory no",
        "plain/inside": "plain is not a directory",
        "x" * 300: "File name too long",
    }.items(),
    ids=lambda name: name[:12],
)
@pytest.mark.parametrize("line", WRITING.values(), ids=[" ".join(key) for key in WRITING])
def test_a_file_that_cannot_be_written(commands: Commands, line: list[str], file: str, why: str) -> None:
    told = commands.fails(1, *(word.replace("{}", file) for word in line))
    assert told.startswith(f"pointsman: cannot write {file[:150]}")
    assert told.endswith(f": {why}\n")


def test_a_mistyped_file_is_suggested(commands: Commands) -> None:
    assert 'm.yml: cannot be read: there is no such file; did you mean "m.yaml"?' in commands.fails(1, "plan", "m.yml")
    told = commands.fails(1, *REHEARSE, "lod.csv")
    assert told == 'pointsman: cannot read lod.csv: there is no such file; did you mean "load.csv"?\n'


def test_permission_denied() -> None:
    said = str(UnusableFile(Path("m.yaml"), PermissionError(13, "Permission denied"), "write"))
    assert said == "cannot write m.yaml: permission denied; allow this user to write it"


def arguments(made: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.Action]]:
    """(command, argument) of every command below."""
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield from arguments(command, f"{name} {word}".strip())
        else:
            yield name, action


def test_every_argument_that_is_a_file_is_tried() -> None:
    files = {
        (name, action.dest)
        for name, action in arguments(parser())
        if (action.type is Path or action.metavar in FILES) and action.metavar != "DIR"
    }
    assert files <= READING.keys() | WRITING.keys() | OF_SERVERS


# Planes

PLANE = {
    name
    for name, action in arguments(parser())
    if action.dest == "state" and name not in ("up", "plan", "place", "rehearse scaling")
}
"""Commands that need a running plane."""
NEEDED = {
    "apply": ["m.yaml"],
    "deploy": ["app.yaml"],
    "logs": ["chat-1"],
    "drain": ["chat-1"],
    "delete": ["app"],
    "scale": ["chat", "--replicas", "1"],
    "promote": ["candidate"],
    "record": ["requests.jsonl"],
    "lab whatif": ["m.yaml", "--against", "m.yaml"],
}
"""Further arguments."""


def with_plane(name: str) -> list[str]:
    return [*name.split(), *NEEDED.get(name, ())]


@pytest.mark.parametrize("name", sorted(PLANE))
def test_no_plane_runs(commands: Commands, name: str, tmp_path: Path) -> None:
    if name == "deploy":
        assert commands.run("build", "pipe.py:dag", "-o", "app.yaml").code == 0
    state = str(tmp_path / "other")
    told = commands.fails(1, *with_plane(name), "--state", state)
    up = " it: pointsman up app.yaml" if name == "deploy" else ": pointsman up FILE"
    assert told == f"pointsman: no plane is running in {state}; start one with{up} --state {state}\n"
    # The command that is suggested works: what is no directory cannot become a state directory.
    told = commands.fails(1, *with_plane(name), "--state", "plain")
    assert f"no plane is running in {tmp_path}/plain; " in told
    if name != "deploy":
        assert "that is not a state directory (Not a directory); choose another --state" in told
        told = commands.fails(1, *with_plane(name), "--state", "y" * 300)
        assert "that is not a state directory (File name too long); choose another --state" in told


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1", "Connection refused"),
        ("http://nowhere.invalid", "Name or service not known|Temporary failure in name resolution"),
    ],
)
def test_no_plane_answers_at_an_address(commands: Commands, url: str, why: str) -> None:
    told = commands.fails(1, "status", "--url", url)
    assert re.fullmatch(rf"pointsman: no plane answers at {url} \(({why})\); check the address of its gateway\n", told)


# Usage


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["statu"], 'there is no command "statu"; did you mean "status"?'),
        (["schema", "--kind", "Pointman"], '--kind: there is no value "Pointman"; did you mean "Pointsman"?'),
        (["requests", "--only", "lost"], '--only: there is no value "lost"; known: abandoned, '),
        (["status", "--url", "ftp://x"], "--url must be http://host:port or https://host:port, found ftp://x"),
        (["explain", "req-1", "chat"], "name one request, or use: pointsman explain deployment chat"),
        (["explain", "deployment"], "NAME is missing; to list deployments: pointsman status"),
        (["rollback", "app", "--to", "3"], "--to is a generation of the manifest; an application returns version by"),
        (["scale", "chat", "--auto", "--for", "2h"], "--for goes with --replicas, not with --auto"),
        (["key", "--tenant", "a b"], '"a b" must be letters, digits and any of . _ -'),
    ],
)
def test_wrong_usage(commands: Commands, line: list[str], told: str) -> None:
    assert told in commands.fails(2, *line)


def options_of_numbers() -> Iterator[tuple[str, str]]:
    """(command, option) of everything that takes a number, a time or a size."""
    kinds = ("N", "TIME", "RATE", "SHARE", "TOKENS", "PRICE", "SIZE", "GENERATION")
    for name, action in arguments(parser()):
        if action.metavar in kinds and action.option_strings:
            yield name, action.option_strings[-1]


@pytest.mark.parametrize("value", ["x", "", "-1", "1.5.2", "nan", "∞"])
@pytest.mark.parametrize(("name", "option"), sorted(options_of_numbers()))
def test_a_value_that_is_no_number(commands: Commands, name: str, option: str, value: str) -> None:
    told = commands.fails(2, *name.split(), f"{option}={value}").splitlines()[-1]
    assert option in told
    assert f'"{value}"' in told


def test_the_system_refuses_what_no_command_expects(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device", "/some/file")

    monkeypatch.setattr("pointsman.cli.schema.run", full)
    assert commands.fails(1, "schema") == "pointsman: /some/file: No space left on device\n"
