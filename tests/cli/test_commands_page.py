"""docs/commands.md has a section with an example for every command."""

import argparse
import re
from pathlib import Path

from pointsman.cli.main import parser

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")


def commands() -> set[str]:
    [choices] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return set(choices.choices)


def test_every_command_has_a_section_with_an_example() -> None:
    sections = dict(zip(*[iter(re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))
    assert commands() <= sections.keys()
    for name in commands():
        assert re.search(rf"^(\$ )?pointsman {name}\b", sections[name], re.MULTILINE), f"an example of {name}"


def test_every_command_is_in_the_table_at_the_top() -> None:
    listed = set(re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \|", PAGE, re.MULTILINE))
    assert listed - {"up"} == commands() - {"up"}
