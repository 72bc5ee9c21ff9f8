"""docs/applications.md says what the code has: every field of the document, every default."""

from pathlib import Path

import pytest

from pointsman.config.application import TAKEN
from pointsman.config.schema import ApplicationDocument, CallSpec, IngressSpec, NodeSpec
from pointsman.config.validation import fields_of
from pointsman.pipeline.options import NodeOptions
from tests.config.test_manifest_page import disagreements, page_tables

PAGE = Path(__file__).parents[2] / "docs" / "applications.md"
OF_INGRESS = {name: field for name, field in fields_of(IngressSpec).items() if name not in fields_of(NodeOptions)}
EXPECTED = {
    "the document": fields_of(ApplicationDocument),
    "`nodes[]`": fields_of(NodeSpec),
    "`calls[]`": fields_of(CallSpec),
    "`ingress`": OF_INGRESS,
}


@pytest.mark.parametrize("heading", EXPECTED)
def test_every_part_has_a_table_that_agrees_with_the_code(heading: str) -> None:
    rows = {name: default for name, default in page_tables(PAGE)[heading].items() if not name.startswith("{$")}
    assert disagreements(EXPECTED[heading], rows) == []


def test_names_that_are_taken_are_names_of_pages() -> None:
    assert {"v1", "admin", "metrics", "health", "ready", "pipelines"} <= TAKEN
