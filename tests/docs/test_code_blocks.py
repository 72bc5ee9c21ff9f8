"""Every code block of README and docs/ runs.

```python blocks of a page run in order in one namespace, ```yaml blocks load, ```bash blocks run line by line, all in
an empty folder. A block whose first line is `# file: NAME` is written there first. ```console and ```text show output.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from pointsman.config import load
from pointsman.runtimes.simulation.faults import read_faults

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN_ONLY = {"", "text", "console"}


class Block(NamedTuple):
    language: str
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(found[1], found[2], text.count("\n", 0, found.start()) + 2) for found in FENCE.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace: dict[str, object] = {"__name__": "__main__"}
    before = set(sys.modules)
    for variable in re.findall(r"apiKeyEnv: (\w+)", page.read_text(encoding="utf-8")):
        monkeypatch.setenv(variable, "sk-of-the-page")
    for block in blocks(page):
        named = re.match(r"# file: (\S+)\n", block.code)
        if named:
            (tmp_path / named[1]).write_text(block.code, encoding="utf-8")
        run(block, page, namespace)
    for name in set(sys.modules) - before:  # modules that the page wrote must not be there for the next one
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def run(block: Block, page: Path, namespace: dict[str, object]) -> None:
    where = f"{page}:{block.line}"
    if block.language == "python":
        exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), namespace)
    elif block.language == "yaml" and block.code.startswith("faults:"):
        read_faults(block.code)
    elif block.language == "yaml":
        load(block.code)
    elif block.language == "bash":
        for command in filter(None, map(str.strip, block.code.splitlines())):
            done = subprocess.run(
                ["bash", "-c", in_this_suite(command)], env=environment(), capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, f"{where}: {command}\n{done.stdout}{done.stderr}"
    else:
        assert block.language in SHOWN_ONLY, f"{where}: a block of unknown kind, {block.language}"


def in_this_suite(command: str) -> str:
    """`make` runs in the checkout; of what would run this suite again, or run for ever, only the plan is made."""
    if command.startswith("make"):
        dry = "--dry-run " if re.match(r"make (run|test|bench)", command) else ""
        return f"cd {ROOT} && make {dry}{command.removeprefix('make').strip()}"
    return command


def environment() -> dict[str, str]:
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_there_are_blocks_to_run() -> None:
    languages = {block.language for page in PAGES for block in blocks(page)}
    assert {"python", "yaml", "bash"} <= languages
