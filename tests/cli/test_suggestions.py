"""Commands in messages: written by one function, which knows how the program was called."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic
import pytest

from pointsman.cli.main import main, parser
from pointsman.cli.suggestions import example
from pointsman.errors import PROGRAM_CALL, command
from tests.architecture.house import PACKAGE, SOURCES, nodes_of

COMMANDS = "up|plan|apply|status|explain|requests|logs|scale|drain|down|key|build|deploy|rollback|delete|estimate|place"
NAMED = re.compile(rf"pointsman ({COMMANDS}|check|rehearse|schema|completion)\b")
FOR_CLIENTS = {"gateway/pages.py"}
"""Its texts go to clients, which must not learn the state directory."""
HELP = {"description", "summary", "help", "example", "by"}
"""Arguments that are shown by --help, or name the author of an order."""


def texts(source: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every string of a module that is neither a docstring nor help."""
    skipped: set[int] = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
        elif isinstance(node, ast.keyword):
            skipped |= set(map(id, ast.walk(node.value))) if node.arg in HELP else set()
        elif isinstance(node, ast.Assign):
            is_help = getattr(node.targets[0], "id", "").endswith("EXAMPLE")
            skipped |= set(map(id, ast.walk(node.value))) if is_help else set()
        elif isinstance(node, ast.Dict):
            keys = [getattr(key, "value", None) for key in node.keys]
            skipped |= {id(value) for key, value in zip(keys, node.values, strict=True) if key in HELP}
    for node in nodes_of(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def test_messages_do_not_spell_commands_themselves() -> None:
    spelled = [
        f"{source.relative_to(PACKAGE)}:{line}: {text}"
        for source in SOURCES
        if str(source.relative_to(PACKAGE)) not in FOR_CLIENTS
        for line, text in texts(source)
        if NAMED.search(text)
    ]
    assert spelled == []


@pytest.mark.parametrize(
    ("args", "written"),
    [
        (["--state", "/a b"], "pointsman status m --state '/a b'"),
        (["--url", "http://h:1"], "pointsman status m --url http://h:1"),
        ([], "pointsman status m"),
    ],
)
def test_a_command_names_the_plane(
    args: list[str], written: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("POINTSMAN_STATE", raising=False)
    main(["status", *args])  # whatever becomes of it
    assert command("status", "m") == written
    assert command("key") == "pointsman key"
    assert ("--state" in command("up", "FILE")) is ("--state" in args)


def test_the_environment_of_another_shell_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POINTSMAN_STATE", str(tmp_path))
    main(["status"])
    assert command("status") == f"pointsman status --state {tmp_path}"


def test_the_program_is_named_as_it_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROGRAM_CALL, "state", "")
    script = tmp_path / "a folder" / "pointsman"
    script.parent.mkdir()
    script.write_text("")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert command("status") == f"'{script}' status"
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    assert command("status") == "pointsman status"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/a-program-of-mine"])
    assert command("status") == "pointsman status"


def test_every_command_that_asks_no_plane_is_known() -> None:
    [commands] = [action for action in parser()._actions if hasattr(action, "choices") and action.choices]
    assert isinstance(commands.choices, Mapping)
    from pointsman.errors import OFFLINE

    asks = {name for name, one in commands.choices.items() if any(act.dest == "state" for act in one._actions)}
    assert set(commands.choices) - asks == OFFLINE | {"rehearse"}  # its subcommand asks one


class Leaf(pydantic.BaseModel):
    share: float = pydantic.Field(gt=0, lt=1)
    odd: int = pydantic.Field(ge=7, le=9)
    big: int = pydantic.Field(gt=100)
    even: int = pydantic.Field(ge=3, multiple_of=2)
    word: str = pydantic.Field(min_length=40, max_length=50)
    yes: bool
    maybe: int | None
    pair: tuple[int, str]
    many: list[int] = pydantic.Field(min_length=3)
    free: dict[str, int]
    anything: Any


class Tree(pydantic.BaseModel):
    leaf: Leaf
    leaves: list[Leaf]
    below: "Tree | None" = None


@pytest.mark.parametrize("model", [Leaf, Tree])
def test_an_example_is_valid_by_its_schema(model: type[pydantic.BaseModel]) -> None:
    value, is_guess = example(model.model_json_schema())
    model.model_validate(value)
    assert is_guess  # of what may be anything
    assert example({"type": "integer"}) == (1, False)
