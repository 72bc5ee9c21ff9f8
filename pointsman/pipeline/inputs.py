"""The input of a request: one value, and the parts of it that steps use."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pointsman.errors import PointsmanError
from pointsman.pipeline.graph import Access


class BadInput(PointsmanError):
    """The input lacks a part that the graph uses."""


def input_value(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The input that arguments stand for: one is itself, several are a list, named ones are a dict."""
    if args and kwargs:
        raise BadInput(
            "the input is given by position or by name, not both: "
            f"found {len(args)} arguments by position and {', '.join(kwargs)} by name"
        )
    if kwargs:
        return dict(kwargs)
    return args[0] if len(args) == 1 else list(args)


def part_of(value: Any, path: Iterable[Access]) -> Any:
    """A part of the input. Raises `BadInput`, which names the part and what was found instead."""
    part = "input"
    for access in path:
        owner, part = part, part + (f".{access.key}" if access.attribute else f"[{access.key!r}]")
        value = _attribute(value, access, owner, part) if access.attribute else _item(value, access, owner, part)
    return value


def _attribute(value: Any, access: Access, owner: str, part: str) -> Any:
    name = str(access.key)
    if isinstance(value, Mapping):
        if name in value:
            return value[name]
        raise BadInput(f"{part}: the {owner} has {_keys(value)}")
    try:
        return getattr(value, name)
    except AttributeError:
        raise BadInput(f"{part}: the {owner} is a {type(value).__name__} without that attribute") from None


def _item(value: Any, access: Access, owner: str, part: str) -> Any:
    key = access.key
    if isinstance(value, list | tuple):
        if not isinstance(key, int):
            raise BadInput(f"{part}: the {owner} is a list of {_items(value)}, which has no names")
        if not -len(value) <= key < len(value):
            raise BadInput(f"{part}: the {owner} has {_items(value)}")
        return value[key]
    if key == 0 and not (isinstance(value, Mapping) and 0 in value):
        return value
    if isinstance(value, Mapping):
        if key in value:
            return value[key]
        raise BadInput(f"{part}: the {owner} has {_keys(value)}")
    if isinstance(key, str) and not hasattr(value, "__getitem__"):
        return _attribute(value, access, owner, part)
    if isinstance(key, str) and not isinstance(value, str | bytes):
        try:
            return value[key]
        except (LookupError, TypeError):
            raise BadInput(f"{part}: the {owner} is a {type(value).__name__} without that item") from None
    raise BadInput(f"{part}: the {owner} is one {type(value).__name__}")


def _items(value: Sequence[Any]) -> str:
    return "1 item" if len(value) == 1 else f"{len(value)} items"


def _keys(value: Mapping[Any, Any]) -> str:
    return f"only {', '.join(map(repr, value))}" if value else "nothing in it"
