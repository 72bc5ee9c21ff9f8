"""How a plugin's parameters are written in configuration, where its signature alone does not say.

A plugin's parameters are the keyword arguments of its `__init__`, validated by their annotations. `queue_threshold`
is written `queueThreshold`; nested parameters are `Parameters` structs. The marks below go into `Annotated`.
"""

import importlib.util
import re
from collections.abc import Callable
from decimal import Decimal
from math import ceil
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta


class Parameters(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Base of nested parameters: snake case in Python, camel case in YAML."""


class Spelled(msgspec.Struct, frozen=True):
    """This parameter has another name in YAML than camel case gives."""

    name: str


class PluginRef(msgspec.Struct, frozen=True):
    """In YAML this is the name of another plugin; the plugin gets that plugin."""

    role: str
    """A word for error messages: decider, saturation detector..."""


class ReadBy(msgspec.Struct, frozen=True):
    """In YAML this is text that the function can read, as a cron expression; the plugin gets the text."""

    read: Callable[[str], object]
    """Raises ValueError, with what to write instead."""


class DurationText(msgspec.Struct, frozen=True):
    """In YAML this may be written 200ms, 1.5s or 1m30s; a bare number is seconds."""


class QuantityText(msgspec.Struct, frozen=True):
    """In YAML this may be written 500, 2k or 1Gi."""


Duration = Annotated[float, DurationText()]
"""Seconds."""
Quantity = Annotated[int, QuantityText()]

Number = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0)]
Above0 = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Wait = Annotated[Duration, Meta(ge=0)]
Time = Annotated[Duration, Meta(gt=0)]
Size = Annotated[Quantity, Meta(ge=0)]
Bytes = Annotated[Quantity, Meta(ge=1)]


class FileName(msgspec.Struct, frozen=True):
    """In YAML this is a path, relative to the document's folder; the plugin gets an absolute one.

    `package:NAME/FILE` is a file inside an installed Python package, and stays as it is.
    """

    or_name: bool = False
    """It may also be the name of something elsewhere, such as a model on a hub. Then only what is there, or begins with
    a dot, a slash or ~, is taken for a path."""
    must_exist: bool = True


ExistingFile = Annotated[str, FileName()]
FileOrName = Annotated[str, FileName(or_name=True)]


def packaged(name: str) -> Path | None:
    """The file that `package:NAME/FILE` names, found without importing the package; None: it is not installed."""
    package, _, file = name.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    return next((folder / file for folder in folders if (folder / file).exists()), folders[0] / file)


_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


def seconds(text: str) -> float:
    """Read 200ms, 60s, 1m30s. Raises ValueError, with an example, for anything else."""
    unsigned = text.removeprefix("-")
    parts = _PART.findall(unsigned)
    if unsigned == "0":
        return 0.0
    if not parts or "".join(number + unit for number, unit in parts) != unsigned:
        raise ValueError(f'"{text}" is not a duration; write for example 200ms, 60s or 1m30s')
    total = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return -total if text.startswith("-") else total


def duration_text(length_s: float) -> str:
    """As a person would write it: 1h, 1m30s, 200ms. `seconds` reads the same from it."""
    milliseconds, parts = round(abs(length_s) * 1000), []
    if abs(milliseconds / 1000 - abs(length_s)) > 1e-9:
        return f"{length_s:.9f}".rstrip("0") + "s"
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, milliseconds = divmod(milliseconds, size)
        parts += [f"{count}{unit}"] if count else []
    return ("-" if length_s < 0 else "") + ("".join(parts) or "0s")


_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_QUANTITY = re.compile(r"([+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d{1,2})?)(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E|)")


def quantity(text: str) -> int:
    """Read 500, 2k, 1Gi, 1e9; fractions round up. Raises ValueError, with an example, for anything else."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f'"{text}" is not an amount; write for example 500, 2k or 1Gi')
    return ceil(Decimal(match[1]) * (_DECIMAL | _BINARY)[match[2]])


def unmarked(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type and the marks of its `Annotated`."""
    if get_origin(annotation) is Annotated:
        kind, *marks = get_args(annotation)
        return kind, tuple(marks)
    return annotation, ()


def yaml_name(field: msgspec.structs.FieldInfo) -> str:
    """How a field is written in YAML: in camel case without its unit of seconds, unless it is `Spelled`."""
    spelled = next((mark.name for mark in unmarked(field.type)[1] if isinstance(mark, Spelled)), None)
    return spelled or camel_case(field.name.removesuffix("_s"))


def camel_case(name: str) -> str:
    """queue_threshold -> queueThreshold"""
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))
