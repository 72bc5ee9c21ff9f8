"""Types and values in the words of somebody who writes YAML."""

import json
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec

_PLAIN: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    NoneType: "nothing",
}


def expected(annotation: Any) -> str:
    """What a type wants: "a whole number"."""
    if get_origin(annotation) is Literal:
        return listed([found(choice) for choice in get_args(annotation)])
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return listed([found(choice.value) for choice in annotation])
    if is_mapping(annotation):
        return "a mapping (field: value)"
    if is_list(annotation):
        return "a list"
    return _PLAIN.get(annotation) or str(getattr(annotation, "__name__", "a value"))


_BOUNDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}


def bounds_in_words(told: str) -> str:
    """What msgspec says of a value out of bounds, "Expected `int` >= 1": must be at least 1."""
    wanted = told.removeprefix("Expected ").partition(" - at ")[0].replace("`", "")
    bound = re.fullmatch(r"(?:int|float) (>=|<=|>|<) (.+)", wanted)
    return f"must be {_BOUNDS[bound[1]]} {float(bound[2]):g}" if bound is not None else f"expected {wanted}"


def found(data: Any) -> str:
    """What is there: text in quotes, numbers as they are, everything larger by its kind."""
    if isinstance(data, dict):
        return "a mapping"
    if isinstance(data, list):
        return "a list"
    if data is None:
        return "nothing"
    return _shortened(json.dumps(data, ensure_ascii=False, default=str))


def listed(words: list[str]) -> str:
    """a, b or c"""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def a(noun: str) -> str:
    """With its article."""
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"  # a usage limit policy


def is_mapping(annotation: Any) -> bool:
    """Whether values of this type are written as fields with values."""
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct | Mapping)


def is_list(annotation: Any) -> bool:
    """Whether values of this type are written as a list."""
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, Iterable) and kind is not str and not is_mapping(annotation)


def _shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 4] + '..."'
