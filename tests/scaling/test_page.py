"""docs/plugins/scaling.md says what the code has: every policy, every parameter, every default."""

import re

import pytest

from pointsman.config.registry import PluginType, plugin_type
from pointsman.scaling import SCALING_POLICIES
from tests.docs.test_plugin_pages import DOCS, Section, problems, sections

HEADING = re.compile(r"The policy `([a-z-]+)`")
PAGE = list(sections(DOCS / "plugins" / "scaling.md"))
BY_NAME = {named[1]: section for section in PAGE if (named := HEADING.fullmatch(section.heading))}


KINDS = [plugin_type(name, made) for name, made in SCALING_POLICIES.items()]


KINDS = [plugin_type(name, made) for name, made in SCALING_POLICIES.items()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.name))
def test_every_policy_has_a_section_that_agrees_with_the_code(kind: PluginType) -> None:
    assert problems(kind, BY_NAME.get(kind.name, Section("no page", "", ""))) == []


def test_every_section_is_of_a_policy_that_exists_in_the_order_of_the_list() -> None:
    assert list(BY_NAME) == list(SCALING_POLICIES)


def test_the_list_names_them_all() -> None:
    [top] = [section for section in PAGE if section.heading == "Scaling policies"]
    listed = re.findall(r"^\| (`[^|]*`) \|", top.text, re.MULTILINE)
    assert [name for row in listed for name in re.findall(r"`([a-z-]+)`", row)] == list(SCALING_POLICIES)
