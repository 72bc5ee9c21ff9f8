"""docs/manifest.md says what the code has: every section, every field, every default."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import yaml

from pointsman.config.problems import Problems, is_list, is_mapping
from pointsman.config.registry import can_be_started, engines
from pointsman.config.schema import InlinePicker, Pointsman
from pointsman.config.validation import Field, Validator, fields_of
from pointsman.engines.simulated import FaultSpec
from pointsman.parameters import unmarked

PAGE = Path(__file__).parents[2] / "docs" / "manifest.md"
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `([^`]+)` \| (.+?) \| (.*)\|$", re.MULTILINE)

BAR = "\0"
"""Stands for a bar that separates no cells."""

Rows = dict[str, str]


def page_tables(page: Path = PAGE) -> dict[str, Rows]:
    """What stands under each heading: names in the first column -> defaults in the second."""
    text = FENCED.sub("", page.read_text(encoding="utf-8")).replace("\\|", BAR)
    _, *parts = re.split(r"^##+ (.+)$", text, flags=re.MULTILINE)
    return {
        heading.lower(): {row[1]: row[2].replace(BAR, "|") for row in ROW.finditer(body)}
        for heading, body in zip(parts[::2], parts[1::2], strict=True)
    }


def sections(kind: type[msgspec.Struct], path: str = "") -> Iterator[tuple[str, Mapping[str, Field]]]:
    """Every part of the document that is written as fields, by the way to it."""
    fields = fields_of(kind)
    yield (f"`{path}`" if path else "the document"), fields
    for name, field in fields.items():
        for struct, step in structs_in(field.annotation):
            if struct is not InlinePicker:  # has pages of its own
                yield from sections(struct, f"{path}.{name}{step}".lstrip("."))


def structs_in(annotation: Any, step: str = "") -> Iterator[tuple[type[msgspec.Struct], str]]:
    kind, _ = unmarked(annotation)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind, step
    for member in get_args(kind):
        yield from structs_in(member, "[]" if is_list(kind) else step)


EXPECTED = {
    **{heading.lower(): fields for heading, fields in sections(Pointsman)},
    **{f"engine `{engine.name}`": engine.parameters for engine in engines() if can_be_started(engine)},
    "faults of `simulated`": fields_of(FaultSpec),
}


def disagreements(fields: Mapping[str, Field], rows: Rows) -> list[str]:
    found = [f"{name} is not in the table" for name in fields if name not in rows]
    found += [f"{name} is in the table, and is no field" for name in rows if name not in fields]
    for name in fields.keys() & rows.keys():
        written = rows[name].strip("`")
        if not agrees(written, fields[name]):
            found.append(f"{name}: the default is {fields[name].default!r}, the page says {written}")
    return sorted(found)


def agrees(written: str, field: Field) -> bool:
    """Whether the page's default, read as a manifest would be, is the code's."""
    if not field.optional or written == "required":
        return not field.optional and written == "required"
    if isinstance(field.default, msgspec.Struct):
        return written == "as below"
    if field.default is None:
        return written == empty(field.annotation)
    problems = Problems("")
    value = Validator(problems).value(yaml.safe_load(written), field.annotation, ())
    default = type(value)(field.default) if isinstance(field.default, tuple) else field.default
    return not problems and bool(value == default)


def empty(annotation: Any) -> str:
    """How nothing is written."""
    kinds = [one for one in (unmarked(annotation)[0], *get_args(annotation)) if not structs(one) or is_list(one)]
    if any(map(is_mapping, kinds)):
        return "{}"
    return "[]" if any(map(is_list, kinds)) else "unset"


def structs(annotation: Any) -> list[Any]:
    return list(structs_in(annotation))


@pytest.mark.parametrize("heading", EXPECTED)
def test_every_part_has_a_table_that_agrees_with_the_code(heading: str) -> None:
    tables = page_tables()
    assert heading in tables, "a heading of its own"
    assert disagreements(EXPECTED[heading], tables[heading]) == []


def test_every_table_is_of_a_part_that_exists() -> None:
    tables = {heading for heading in page_tables() if heading.startswith(("`", "engine", "faults"))}
    assert tables == EXPECTED.keys() - {"the document"}


def test_a_wrong_table_is_found() -> None:
    heading = "`deployments[].lifecycle`"
    good = page_tables()[heading]
    fields = EXPECTED[heading]
    assert disagreements(fields, good | {"backoff": "`0.5`"}) == []
    assert disagreements(fields, good | {"backoff": "`1s`"}) == ["backoff: the default is 0.5, the page says 1s"]
    assert disagreements(fields, good | {"back": "`1s`"}) == ["back is in the table, and is no field"]
    assert disagreements(fields, {name: written for name, written in good.items() if name != "backoff"}) == [
        "backoff is not in the table"
    ]
    required = EXPECTED["`deployments[]`"]["name"]
    assert not agrees("unset", required)
    assert not agrees("required", fields["backoff"])
