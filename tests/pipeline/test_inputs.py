"""The input that arguments stand for, and its parts."""

from types import SimpleNamespace
from typing import Any

import pytest

from pointsman.pipeline.flow import BadInput, input_value, part_of
from pointsman.pipeline.graph import Access

THING = SimpleNamespace(name="x", items_of=[1, 2])


@pytest.mark.parametrize(
    ("args", "kwargs", "value"),
    [((1,), {}, 1), (([1, 2],), {}, [1, 2]), ((1, 2), {}, [1, 2]), ((), {"a": 1}, {"a": 1}), ((), {}, [])],
)
def test_arguments_are_one_value(args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
    assert input_value(args, kwargs) == value


def test_by_position_or_by_name() -> None:
    with pytest.raises(BadInput, match="found 1 arguments by position and a by name"):
        input_value((1,), {"a": 2})


@pytest.mark.parametrize(
    ("value", "path", "part"),
    [
        (5, [], 5),
        (5, [Access(0)], 5),
        ("abc", [Access(0)], "abc"),
        ([7, 8], [Access(1)], 8),
        ((7, 8), [Access(0)], 7),
        ([7, 8], [Access(-1)], 8),
        ({"a": 1}, [Access("a")], 1),
        ({"a": 1}, [Access("a", attribute=True)], 1),
        ({"a": 1}, [Access(0)], {"a": 1}),
        ({0: "zero"}, [Access(0)], "zero"),
        (THING, [Access("name")], "x"),
        (THING, [Access("items_of", attribute=True), Access(1)], 2),
        ({"a": [{"b": 3}]}, [Access("a"), Access(0), Access("b")], 3),
    ],
)
def test_a_part(value: Any, path: list[Access], part: Any) -> None:
    assert part_of(value, path) == part


@pytest.mark.parametrize(
    ("value", "path", "said"),
    [
        ([1, 2], [Access(2)], "input[2]: the input has 2 items"),
        ([1], [Access(1)], "input[1]: the input has 1 item"),
        ([1, 2], [Access("a")], "input['a']: the input is a list of 2 items, which has no names"),
        ({"a": 1, "b": 2}, [Access("c")], "input['c']: the input has only 'a', 'b'"),
        ({}, [Access("c", attribute=True)], "input.c: the input has nothing in it"),
        (5, [Access(1)], "input[1]: the input is one int"),
        ("abc", [Access("x")], "input['x']: the input is one str"),
        (THING, [Access("y", attribute=True)], "input.y: the input is a SimpleNamespace without that attribute"),
        ({"a": [1]}, [Access("a"), Access(3)], "input['a'][3]: the input['a'] has 1 item"),
    ],
)
def test_a_part_that_is_not_there(value: Any, path: list[Access], said: str) -> None:
    with pytest.raises(BadInput) as raised:
        part_of(value, path)
    assert str(raised.value) == said
