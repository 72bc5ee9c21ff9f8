"""docs/architecture.md: every folder, file and name in it exists, and the request's walk stays short."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.house import PACKAGE, tree_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

STEP = re.compile(r"^\d+\. `(?P<file>[\w/]+\.py)`: (?P<names>.+)$")
NAME = re.compile(r"`([A-Za-z_][\w.]*)`")


def walks() -> dict[str, list[tuple[str, str]]]:
    """Title of a walk -> its steps as (file, name)."""
    found: dict[str, list[tuple[str, str]]] = {}
    title = ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
        elif step := STEP.match(line):
            names = NAME.findall(step["names"].partition(" - ")[0])
            assert names, f"a step without a name: {line}"
            found.setdefault(title, []).extend((step["file"], name) for name in names)
    return found


@cache
def names_in(file: str) -> set[str]:
    """Functions, classes and methods (`Class.method`) of a file."""
    found = set()
    for node in tree_of(PACKAGE / file).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = (one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found.update(f"{node.name}.{name}" for name in members)
    return found


def test_there_are_four_walks() -> None:
    assert list(walks()) == ["A request", "A placement", "A call of a pipeline", "A scaling step"]


@pytest.mark.parametrize(("file", "name"), sorted({step for walk in walks().values() for step in walk}))
def test_every_step_exists(file: str, name: str) -> None:
    assert (PACKAGE / file).is_file(), f"{file} does not exist"
    assert name in names_in(file), f"{file} has no {name}"


def test_a_request_passes_at_most_25_files() -> None:
    assert len({file for file, _ in walks()["A request"]}) <= 25


def test_the_tree_names_every_folder() -> None:
    listed = set(re.findall(r"^\| `pointsman/([\w/]+)/` \|", PAGE, re.MULTILINE))
    folders = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py")} - {"."}
    assert listed == folders
