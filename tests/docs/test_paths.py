"""Every file that a page names exists, and no page holds the leftovers of a merge."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "bench").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
NAMED = re.compile(r"(?<![\w/.-])((?:pointsman|tests|bench|examples)/[\w/-]+\.(?:py|yaml|md)|[a-z_]+/[\w/]+\.py)\b")


LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
FOLDER = re.compile(r"`((?:pointsman|tests|bench|examples|docs)/(?:[\w-]+/)*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_folders_and_the_targets_of_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []
    assert [folder for folder in FOLDER.findall(text) if not (ROOT / folder).is_dir()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    named = set(NAMED.findall(page.read_text(encoding="utf-8"))) - {"path/to/file.py"}  # stands for any file
    places = (ROOT, ROOT / "pointsman", page.parent)
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_merge_is_left_unfinished(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith(("<<<<<<< ", ">>>>>>> "))] == []
