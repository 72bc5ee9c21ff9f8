"""Scaling policies as they are named on a command line: built in, of a module, or of a file; with parameters or not."""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pointsman.cli.options import json_object


class Named(NamedTuple):
    """A policy, before it is made."""

    name: str
    parameters: dict[str, Any] | None = None
    """None: it was given none of its own."""


def named(text: str) -> Named:
    """NAME or NAME={JSON}, for argparse."""
    name, opened, rest = text.partition("={")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} names no policy; write for example 'panic={{\"target\": 4}}'")
    return Named(name, json_object("{" + rest) if opened else None)


def policies_of(asked: Iterable[Named], parameters: Mapping[str, Any]) -> dict[str, object]:
    """Each by what it is called in tables. `parameters`: of those that have none of their own."""
    made = {}
    for one in asked:
        given = parameters if one.parameters is None else one.parameters
        made[_label(one)] = _built(one.name, given)
    return made


def _label(one: Named) -> str:
    if not one.parameters:
        return one.name
    return f"{one.name} {', '.join(f'{name} {_plain(value)}' for name, value in one.parameters.items())}"


def _plain(value: object) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _built(name: str, parameters: Mapping[str, Any]) -> object:
    """Raises with what is wrong with it."""
    from pointsman.cli.build import imported
    from pointsman.config.problems import Problems
    from pointsman.config.scaling import policy
    from pointsman.errors import PointsmanError

    file, _, inside = name.rpartition(":")
    found = name
    if file.endswith(".py"):
        imported(name)
        found = f"{Path(file).stem}:{inside}"
    problems = Problems("")
    made: object = policy(found, parameters, problems, ())
    if len(problems):
        raise PointsmanError("; ".join(_said(name, one.field, one.message) for one in problems))
    return made


def _said(name: str, field: str, message: str) -> str:
    """A problem, with the policy that has it; one about its name has it already."""
    return message if field == "policy" else ": ".join(filter(None, [name, field, message]))
