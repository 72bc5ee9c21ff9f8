"""Data becomes typed values, and every problem on the way is found."""

from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.config.problems import FieldPath, Problems
from pointsman.config.validation import INVALID, Validator
from pointsman.parameters import (
    Duration,
    Parameters,
    PluginRef,
    Quantity,
    ReadBy,
    Spelled,
    duration_text,
    quantity,
    seconds,
)


class Color(Enum):
    RED = "red"
    GREEN = "green"


class Inner(Parameters, frozen=True):
    size: int
    shade: Color = Color.RED


class Outer(Parameters, frozen=True):
    inner: Inner
    max_items: int = 3
    odd_name: Annotated[float, Spelled("ODD")] = 0.0
    tags: Sequence[str] = ()
    children: dict[str, Inner] = msgspec.field(default_factory=dict)


class Even(Parameters, frozen=True):
    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise ValueError(f"number must be even, found {self.number}")


def checked(data: Any, annotation: Any) -> tuple[Any, list[str]]:
    problems = Problems("")
    value = Validator(problems).value(data, annotation, ("x",))
    return value, [str(problem).removeprefix("x: ") for problem in problems]


@pytest.mark.parametrize(
    ("data", "annotation", "value"),
    [
        (3, int, 3),
        (3.0, int, 3),
        (3, float, 3.0),
        ("a", str, "a"),
        (True, bool, True),
        (None, int | None, None),
        (5, int | None, 5),
        ("200ms", Duration, 0.2),
        (2, Duration, 2.0),
        ("1m30s", Duration | None, 90.0),
        ("1Gi", Quantity, 2**30),
        (1e9, Quantity, 10**9),
        ("linear", Literal["linear", "square"], "linear"),
        ("green", Color, Color.GREEN),
        ([1, 2], list[int], [1, 2]),
        ([1, 2], tuple[int, ...], (1, 2)),
        (["a"], frozenset[str], frozenset({"a"})),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        ({"anything": [1]}, dict[str, Any], {"anything": [1]}),
        ("7", int | str, "7"),
        ({"number": 4}, Even, Even(4)),
        (0.5, Annotated[float, msgspec.Meta(ge=0, le=1)], 0.5),
    ],
)
def test_values(data: Any, annotation: Any, value: Any) -> None:
    assert checked(data, annotation) == (value, [])


@pytest.mark.parametrize(
    ("data", "annotation", "problem"),
    [
        ("ten", int, 'expected a whole number, found "ten"'),
        (1.5, int, "expected a whole number, found 1.5"),
        (True, int, "expected a whole number, found true"),
        (float("inf"), float, "expected a number, found Infinity"),
        ([], float, "expected a number, found a list"),
        (None, int, "expected a whole number, found nothing"),
        (7, str, "expected text, found 7; put it in quotes"),
        ("yes", bool, 'expected true or false, found "yes"'),
        ("a", list[int], 'expected a list, found "a"'),
        ([1], dict[str, int], "expected a mapping (field: value), found a list"),
        ("soon", Duration, '"soon" is not a duration; write for example 200ms, 60s or 1m30s'),
        (True, Duration, "expected a duration such as 200ms, 60s or 1m30s, found true"),
        ("1Gb", Quantity, '"1Gb" is not an amount; write for example 500, 2k or 1Gi'),
        ("liner", Literal["linear", "square"], 'expected "linear" or "square", found "liner"; did you mean "linear"?'),
        ("blue", Color, 'expected "red" or "green", found "blue"'),
        ([], int | str, "expected a whole number or text, found a list"),
        ({"number": 3}, Even, "number must be even, found 3"),
        (-1, Annotated[int, msgspec.Meta(ge=0)], "must be at least 0, found -1"),
        ("x" * 100, int, f'expected a whole number, found "{"x" * 55}..."'),
    ],
)
def test_problems_are_in_plain_words(data: Any, annotation: Any, problem: str) -> None:
    assert checked(data, annotation) == (INVALID, [problem])


def test_all_problems_of_a_nested_value_are_found_at_once() -> None:
    data = {
        "inner": {"size": "big", "shade": "gren"},
        "maxItem": 4,
        "ODD": "x",
        "tags": ["ok", 5],
        "children": {"one": {}, "two": {"size": 1, "sise": 2}},
    }
    _, problems = checked(data, Outer)
    assert sorted(problems) == [
        'x.ODD: expected a number, found "x"',
        'x.children.one: field "size" is missing',
        'x.children.two.sise: unknown field; did you mean "size"?',
        'x.inner.shade: expected "red" or "green", found "gren"; did you mean "green"?',
        'x.inner.size: expected a whole number, found "big"',
        'x.maxItem: unknown field; did you mean "maxItems"?',
        "x.tags[1]: expected text, found 5; put it in quotes",
    ]


def test_names_are_camel_case_or_as_spelled() -> None:
    value, problems = checked({"inner": {"size": 1}, "maxItems": 9, "ODD": 2}, Outer)
    assert problems == []
    assert value == Outer(inner=Inner(1), max_items=9, odd_name=2.0)


def test_an_optional_field_may_be_written_without_a_value() -> None:
    value, problems = checked({"inner": {"size": 1}, "tags": None, "maxItems": None}, Outer)
    assert (value, problems) == (Outer(inner=Inner(1)), [])


def test_nothing_is_a_value_where_it_differs_from_the_default() -> None:
    class Choosy(Parameters, frozen=True):
        most: int | None = 3
        least: int = 1

    assert checked({"most": None, "least": None}, Choosy) == (Choosy(most=None), [])
    assert checked({}, Choosy) == (Choosy(most=3), [])


def test_an_incomplete_struct_that_may_be_left_out_shows_as_much() -> None:
    value, problems = checked({"size": 5, "shade": "gren"}, Inner | None)
    assert problems == ['x.shade: expected "red" or "green", found "gren"; did you mean "green"?']
    assert (value.size, value.shade) == (5, INVALID)


def even(text: str) -> str:
    if len(text) % 2:
        raise ValueError(f'"{text}" has {len(text)} letters; write an even number of them')
    return text


def test_text_that_somebody_must_be_able_to_read() -> None:
    assert checked("four", Annotated[str, ReadBy(even)]) == ("four", [])
    three = '"one" has 3 letters; write an even number of them'
    assert checked("one", Annotated[str, ReadBy(even)]) == (INVALID, [three])
    assert checked(3, Annotated[str, ReadBy(even)]) == (INVALID, ["expected text, found 3; put it in quotes"])


def test_an_incomplete_struct_still_shows_what_is_there() -> None:
    value, problems = checked({"inner": {}, "maxItems": 7}, Outer)
    assert problems == ['x.inner: field "size" is missing']
    assert value.max_items == 7
    assert value.inner.size is INVALID


def test_references_are_resolved_wherever_they_are() -> None:
    class Wanted(Parameters, frozen=True):
        helper: Annotated[object | None, PluginRef("decider")] = None

    asked: list[tuple[str, str, FieldPath]] = []

    def resolve(name: str, ref: PluginRef, path: FieldPath) -> str:
        asked.append((name, ref.role, path))
        return f"plugin {name}"

    value = Validator(Problems(""), resolve).value({"helper": "h"}, Wanted, ("p",))
    assert value == Wanted("plugin h")
    assert asked == [("h", "decider", ("p", "helper"))]


@pytest.mark.parametrize(
    ("text", "amount"),
    [("500", 500), ("2k", 2000), ("1Gi", 2**30), ("1.5Ki", 1536), ("1e9", 10**9), ("0", 0), ("0.5", 1), ("-3", -3)],
)
def test_quantities(text: str, amount: int) -> None:
    assert quantity(text) == amount


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (3600, "1h"),
        (300, "5m"),
        (90, "1m30s"),
        (0.2, "200ms"),
        (1.5, "1s500ms"),
        (0, "0s"),
        (-60, "-1m"),
        (5e-7, "0.0000005s"),
    ],
)
def test_durations_are_written_as_people_write_them(length: float, text: str) -> None:
    assert duration_text(length) == text


@given(st.floats(-1e6, 1e6))
def test_durations_that_were_written_are_read_as_the_same(length: float) -> None:
    assert seconds(duration_text(length)) == pytest.approx(length, abs=2e-9)


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1KB", "one", "1e999", "0x10"])
def test_what_is_not_a_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is not an amount"):
        quantity(text)
