"""docs/security.md: every promise names tests that exist, and every default is that of the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from pointsman.config.schema import GatewaySpec
from pointsman.config.validation import Field
from tests.config.test_manifest_page import agrees, sections

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", PAGE)))
FIELDS: dict[str, Field] = {
    f"{heading.strip('`')}.{name}": field
    for heading, fields in sections(GatewaySpec, "gateway")
    for name, field in fields.items()
}
"""Every setting of the gateway, by the way to it."""


def rows(heading: str) -> list[list[str]]:
    """The table under a heading, without its head."""
    text = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    table = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


@cache
def functions_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("named", NAMED)
def test_the_tests_that_the_page_names_exist(named: str) -> None:
    file, _, name = named.partition("::")
    assert name.startswith("test_")
    assert name in functions_in(file)


@pytest.mark.parametrize("heading", ["What is not trusted", "Limits"])
def test_every_promise_names_a_test(heading: str) -> None:
    table = rows(heading)
    assert len(table) > 10
    for row in table:
        assert re.fullmatch(r"`tests/[\w/]+\.py::\w+`(, `tests/[\w/]+\.py::\w+`)*", row[-1]), row[0] or row[1]


def test_every_default_is_that_of_the_code() -> None:
    for name, default, *_ in rows("Limits"):
        assert name.strip("`") in FIELDS
        assert agrees(default.strip("`"), FIELDS[name.strip("`")]), f"{name}: not {default}"


def test_every_limit_of_clients_is_listed() -> None:
    listed = {name.strip("`") for name, *_ in rows("Limits")}
    assert {name for name in FIELDS if name.startswith("gateway.limits.")} <= listed
    assert {name for name in FIELDS if re.fullmatch(r"gateway\.max\w+", name)} <= listed
