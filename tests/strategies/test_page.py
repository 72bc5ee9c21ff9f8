"""docs/plugins/strategies.md says what the code has: every policy, every parameter, every default."""

import re

import pytest

from pointsman.config.registry import PluginType, policies
from tests.docs.test_plugin_pages import DOCS, problems, sections

PAGE = list(sections(DOCS / "plugins" / "strategies.md"))
BY_POLICY = {named[1]: one for one in PAGE if (named := re.fullmatch(r"The policy `([a-z-]+)`", one.heading))}


@pytest.mark.parametrize("kind", list(policies()), ids=lambda kind: kind.name)
def test_every_policy_has_a_section_that_agrees_with_the_code(kind: PluginType) -> None:
    assert problems(kind, BY_POLICY[kind.name]) == []


def test_the_page_lists_every_policy_with_its_class() -> None:
    rows = PAGE[0].rows()
    assert list(rows) == [*BY_POLICY]
    assert {name: cells[0].strip("`") for name, cells in rows.items()} == {
        kind.name: getattr(kind.build, "__name__", "") for kind in policies()
    }
