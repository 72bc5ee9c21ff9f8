"""docs/engines.md matches the code: every engine, every parameter and its default, every fault."""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from pointsman.config.registry import plugin_type
from pointsman.config.validation import fields_of
from pointsman.engines import ENGINES, Engine
from pointsman.engines.simulated import FaultSpec
from pointsman.simulator.faults import ANY_TIME, AT_ONCE, AT_THE_START

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([^`]+)` \|((?:[^|\\]|\\.)*)\|", re.MULTILINE)
NOTHING = {"required", "none", "unset", "unknown", "what the hardware has", "the one that runs Pointsman"}


def rows(heading: str) -> Mapping[str, str]:
    """The first two cells of the rows under a heading."""
    section = re.split(r"^##+ ", PAGE.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return {found[1]: found[2].strip().strip("`").replace("\\|", "|") for found in ROW.finditer(section)}


@pytest.mark.parametrize("name", [name for name in ENGINES if ENGINES[name].launchable])
def test_every_parameter_is_on_the_page_with_its_default(name: str) -> None:
    parameters = plugin_type(name, ENGINES[name]).parameters
    page = rows(name)
    assert page.keys() == parameters.keys()
    for written, field in parameters.items():
        said = page[written]
        if not field.optional:
            assert said == "required"
        elif field.default not in (None, "", ()):
            assert said == (
                field.default if isinstance(field.default, str) else msgspec.json.encode(field.default).decode()
            )
        else:
            assert said in NOTHING or said.endswith("own") or said == "vllm"


def test_every_engine_is_in_the_first_table() -> None:
    assert rows("Engines").keys() - {"type"} == ENGINES.keys()


def test_every_fault_and_every_field_of_one() -> None:
    fields = fields_of(FaultSpec).keys() - {"delayMs", "status", "retryAfter"}  # these are with their faults
    assert rows("Faults").keys() == {*ANY_TIME, *AT_THE_START, *AT_ONCE, *fields}


def test_all_that_an_adapter_may_say_is_in_the_table_of_members() -> None:
    table = PAGE.partition("| member |")[2].partition("\n\n")[0]
    listed = {name for line in table.splitlines() for name in re.findall(r"`(\w+)", line.split("|")[1])}
    public = {name for name in vars(Engine) if not name.startswith("_")} | {"name"}
    assert listed == public
