"""The pages of docs/plugins say what the code has: every type, every parameter, every default."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import pytest

from pointsman.config.picker import DEFAULT_BAND, DEFAULT_DETECTOR, DEFAULT_POLICIES
from pointsman.config.problems import is_list, is_mapping
from pointsman.config.registry import ELSEWHERE, MISSING, REPLACED, ROLES, PluginType, plugin_type, plugins
from pointsman.config.schema import BandTemplate, FlowControlSpec
from pointsman.config.validation import Field, fields_of
from pointsman.parameters import Duration, DurationText, Parameters, unmarked
from pointsman.reasons import Reason
from pointsman.routing.events import Outcome, Refusal
from pointsman.routing.queue import REQUEST_TTL_S

DOCS = Path(__file__).parents[2] / "docs"
TYPES = list(plugins())

HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
TYPE = re.compile(r"`([a-z0-9-]+)`")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


class Section(NamedTuple):
    """What stands under one heading, up to the next one."""

    page: str
    heading: str
    text: str

    def rows(self) -> dict[str, list[str]]:
        """The table rows whose first cell is a name: that name -> the other cells."""
        rows = {}
        for line in self.text.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            name = re.fullmatch(r"`([^`]+)`", cells[0])
            if line.startswith("|") and name is not None:
                rows[name[1]] = cells[1:]
        return rows


def sections(page: Path) -> Iterator[Section]:
    """The sections of a page, without its code blocks."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = list(HEADING.finditer(text))
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    for heading, end in zip(headings, ends, strict=True):
        yield Section(page.name, heading[2], text[heading.end() : end])


PAGES = [section for page in sorted((DOCS / "plugins").glob("*.md")) for section in sections(page)]
BY_TYPE: dict[str, list[Section]] = {}
for each in PAGES:
    if named := TYPE.fullmatch(each.heading):
        BY_TYPE.setdefault(named[1], []).append(each)


def section_of(page: str, heading: str) -> Section:
    [section] = [one for one in PAGES if (one.page, one.heading) == (page, heading)]
    return section


def parameters(fields: Mapping[str, Field], inside: str = "") -> dict[str, str]:
    """Every parameter, also nested ones, by the path to write in YAML -> its default as the pages render it."""
    found: dict[str, str] = {}
    for name, field in fields.items():
        found[inside + name] = default_of(field)
        for struct, step in structs_in(field.annotation):
            found |= parameters(fields_of(struct), f"{inside}{name}{step}")
    return found


def structs_in(annotation: Any, step: str = ".") -> list[tuple[type[msgspec.Struct], str]]:
    """The structs that a value of this type is written with, each with what stands between their names."""
    kind, _ = unmarked(annotation)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [(kind, step)]
    inner = "[]." if is_list(kind) else step
    return [found for member in get_args(kind) for found in structs_in(member, inner)]


def default_of(field: Field) -> str:
    if not field.optional:
        return "required"
    kind, marks = unmarked(field.annotation)
    if field.default is not None:
        return rendered(field.default, any(isinstance(mark, DurationText) for mark in marks))
    members = [kind, *get_args(kind)]
    required = [one for struct, _ in structs_in(kind) for one in fields_of(struct).values() if not one.optional]
    return "{}" if any(map(is_mapping, members)) and not required else "unset"


def rendered(value: Any, duration: bool = False) -> str:
    """A value as it is written in YAML, on one line."""
    if duration:
        return f"{value * 1000:g}ms" if value < 1 else f"{value:g}s"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, msgspec.Struct):
        fields = fields_of(type(value)).items()
        given = {name: getattr(value, field.name) for name, field in fields}
        parts = [f"{name}: {rendered(given[name])}" for name, field in fields if given[name] != field.default]
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(rendered, value)) + "]"
    return str(value) or '""'


def problems(kind: PluginType, section: Section) -> list[str]:
    """What a section says otherwise than the code."""
    wanted, rows = parameters(kind.parameters), section.rows()
    found = [f"{name} is not in the table" for name in wanted if name not in rows]
    found += [f"{name} is in the table, and is no parameter" for name in rows if name not in wanted]
    for name in wanted.keys() & rows.keys():
        written = rows[name][0].strip("`")
        if written != wanted[name]:
            found.append(f"{name}: the default is {wanted[name]}, the page says {written}")
    if not wanted and "It has no parameters" not in section.text:
        found.append("say that it has no parameters")
    if not re.search(r"^\*\*Missing or stale data:\*\* \w", section.text, re.MULTILINE):
        found.append("say what happens with missing or stale data")
    return sorted(found)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_has_one_section_that_agrees_with_the_code(kind: PluginType) -> None:
    [section] = BY_TYPE.get(kind.name) or [Section("no page", "", "")]
    assert problems(kind, section) == [], f"docs/plugins/{section.page}, section {kind.name}"


def test_every_section_that_is_headed_by_a_name_is_of_a_type_that_exists() -> None:
    assert sorted(BY_TYPE) == [kind.name for kind in TYPES]


class Inner(Parameters, frozen=True):
    depth: int
    label: str = ""


class Sample:
    """Has one parameter of each kind."""

    def __init__(
        self,
        needed: str,
        many: tuple[Inner, ...] = (Inner(3),),
        one: Inner | None = None,
        labels: dict[str, str] | None = None,
        share: float = 0.5,
        wait: Duration = 0.2,
        on: bool = False,
    ) -> None: ...


GOOD = """
| parameter | default | meaning |
|---|---|---|
| `needed` | required | a |
| `many` | `[{depth: 3}]` | b |
| `many[].depth` | required | c |
| `many[].label` | `""` | d |
| `one` | unset | e |
| `one.depth` | required | f |
| `one.label` | `""` | g |
| `labels` | `{}` | h |
| `share` | `0.5` | i |
| `wait` | `200ms` | k |
| `on` | `false` | l |

**Missing or stale data:** none.
"""


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", []),
        ("| `share` | `0.5` | i |\n", "", ["share is not in the table"]),
        ('| `one.label` | `""` | g |\n', "", ["one.label is not in the table"]),
        ("`0.5`", "`0.6`", ["share: the default is 0.5, the page says 0.6"]),
        ("`200ms`", "`0.2`", ["wait: the default is 200ms, the page says 0.2"]),
        (
            "| `on` | `false`",
            "| `off` | `false`",
            ["off is in the table, and is no parameter", "on is not in the table"],
        ),
        ("stale data:** none", "stale", ["say what happens with missing or stale data"]),
    ],
)
def test_a_section_that_disagrees_is_noticed(old: str, new: str, found: list[str]) -> None:
    assert old in GOOD
    section = Section("page", "`sample`", GOOD.replace(old, new) if old else GOOD)
    assert problems(plugin_type("sample", Sample), section) == found


def test_every_role_is_named_with_its_methods() -> None:
    text = section_of("README.md", "Roles").text
    for role, protocol in ROLES.items():
        [row] = [line for line in text.splitlines() if line.startswith(f"| {role} | `")]
        methods = {name for name in vars(protocol) if not name.startswith("_")}
        assert set(re.findall(r"`(\w+)\(", row)) == methods, role


def test_flow_control_has_every_field_with_its_default() -> None:
    text = section_of("flow-control.md", "The section `flowControl`").text
    of_flow, _, of_band = text.partition("Of a band:")
    flow, band = (Section("", "", part).rows() for part in (of_flow, of_band))
    assert flow.keys() == fields_of(FlowControlSpec).keys()
    assert band.keys() == fields_of(BandTemplate).keys()
    defaults = {name: cells[0].strip("`") for name, cells in (flow | band).items()}
    assert defaults["defaultPriorityBand"] == "see below"
    assert flow["defaultRequestTTL"][0] == f"`{REQUEST_TTL_S:g}s`"
    assert flow["enableEviction"][0] == "`false`"
    assert (defaults["maxRequests"], defaults["maxBytes"]) == (
        str(DEFAULT_BAND.max_requests),
        str(DEFAULT_BAND.max_bytes),
    )
    assert defaults["saturationDetector"] == DEFAULT_DETECTOR
    assert defaults["fairnessPolicyRef"] == DEFAULT_POLICIES["fairness policy"]
    assert defaults["orderingPolicyRef"] == DEFAULT_POLICIES["ordering policy"]
    assert defaults["usageLimitPolicyPluginRef"] == DEFAULT_POLICIES["usage limit policy"]


def test_ignored_and_replaced_types_are_listed_with_the_reason() -> None:
    ignored = section_of("compatibility.md", "Accepted and ignored").rows()
    assert {name: why for name, [why] in ignored.items()} == ELSEWHERE
    missing = section_of("compatibility.md", "Not built in").rows()
    assert {name: why for name, [why] in missing.items()} == MISSING
    assert [name for name in MISSING if name in plugins()] == []
    replaced = section_of("compatibility.md", "Replaced").rows()
    assert {name: instead.strip("`") for name, [instead] in replaced.items()} == REPLACED


def test_refusals_are_listed_with_status_and_drop_reason() -> None:
    [section] = [one for one in sections(DOCS / "a-request.md") if one.heading == "Refusals"]
    refusals = {outcome.value: Refusal(outcome, Reason("")) for outcome in Outcome if outcome is not Outcome.DISPATCHED}
    written = {
        name: (int(cells[0]), None if cells[1] == "none" else cells[1].strip("`"))
        for name, cells in section.rows().items()
    }
    assert written == {name: (refusal.status, refusal.drop_reason) for name, refusal in refusals.items()}
