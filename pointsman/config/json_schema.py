"""The documents as JSON schema, so that editors complete and check them.

The schema is built from the types and signatures that loading uses. It cannot check references between names;
`pointsman check config` does.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from pointsman.config.deployments import reads_endpoints
from pointsman.config.problems import is_list, is_mapping
from pointsman.config.registry import (
    ELSEWHERE,
    PARAMETERS_ELSEWHERE,
    PluginType,
    can_be_started,
    engines,
    plugins,
    policies,
    scaling_policies,
)
from pointsman.config.schema import KINDS, ApplicationDocument, EndpointSpec, PluginSpec, ScalingSpec, SchedulingSpec
from pointsman.config.validation import Field, fields_of
from pointsman.control.desired import DesiredEngine
from pointsman.parameters import DurationText, FileName, PluginRef, QuantityText, unmarked
from pointsman.pipeline.options import NodeOptions

DIALECT = "https://json-schema.org/draft/2020-12/schema"
OWN_CLASS = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"

_LEAVES: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean"}


def json_schema(kind: str | None = None) -> dict[str, Any]:
    """The schema of one kind of document, or of all of them."""
    schemas = _Schemas()
    if kind is not None:
        body = schemas.of(KINDS[kind])
    else:
        body = schemas.of(KINDS["EndpointPickerConfig"])
        for ours in ("Pointsman", "Application"):
            is_ours = {"properties": {"kind": {"const": ours}}, "required": ["kind"]}
            body = {"if": is_ours, "then": schemas.of(KINDS[ours]), "else": body}
    return {"$schema": DIALECT, "title": kind or "Pointsman configuration", **body, "$defs": schemas.definitions}


class _Schemas:
    """Translates types; each struct becomes a separate definition."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}

    def of(self, annotation: Any) -> dict[str, Any]:
        kind, marks = unmarked(annotation)
        for mark in marks:
            if isinstance(mark, PluginRef):
                return {"type": "string", "description": f"the name of a {mark.role}"}
            if isinstance(mark, FileName):
                return {"type": "string", "description": _path_in_words(mark)}
            if isinstance(mark, DurationText | QuantityText):
                is_duration = isinstance(mark, DurationText)
                words = "a duration: 200ms, 60s, 1m30s, or seconds" if is_duration else "an amount: 500, 2k, 1Gi"
                return {"type": ["string", "number"], "description": words} | _bounds(marks)
        return self._unmarked(kind) | _bounds(marks)

    def _unmarked(self, kind: Any) -> dict[str, Any]:
        origin = get_origin(kind)
        if origin in (Union, UnionType):
            members = [self.of(member) for member in get_args(kind) if member is not NoneType]
            return members[0] if len(members) == 1 else {"anyOf": members}
        if origin is Literal:
            return {"enum": list(get_args(kind))}
        if isinstance(kind, type) and issubclass(kind, Enum):
            return {"enum": [choice.value for choice in kind]}
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._defined(kind)
        if is_mapping(kind):
            return {"type": "object", "additionalProperties": self.of((get_args(kind) or (str, Any))[1])}
        if is_list(kind):
            return {"type": "array", "items": self.of((get_args(kind) or (Any,))[0])}
        return {"type": _LEAVES[kind]} if kind in _LEAVES else {}

    def _defined(self, kind: type[msgspec.Struct]) -> dict[str, Any]:
        if kind.__name__ not in self.definitions:
            self.definitions[kind.__name__] = {}  # reserved first, because the struct may contain itself
            schema = self.fields(fields_of(kind), kind.__doc__ or "")
            if kind is PluginSpec:
                schema |= self._typed(schema, "type", list(plugins()), ELSEWHERE, PARAMETERS_ELSEWHERE)
            if issubclass(kind, NodeOptions):
                schema["properties"] |= {"scheduling": self.of(SchedulingSpec)}
            if issubclass(kind, NodeOptions | ApplicationDocument):
                schema["properties"] |= {"scaling": self.of(ScalingSpec)}
            if kind is SchedulingSpec:
                schema |= self._typed(schema, "policy", list(policies()))
            if kind is ScalingSpec:
                schema |= self._typed(schema, "policy", list(scaling_policies()))
            if kind is DesiredEngine:
                schema |= self._typed(schema, "type", [engine for engine in engines() if can_be_started(engine)])
            if kind is EndpointSpec:
                readers = [engine for engine in engines() if reads_endpoints(engine)]
                schema["properties"] |= {"engine": {**_choices(readers), "default": "openai"}}
            self.definitions[kind.__name__] = schema
        return {"$ref": f"#/$defs/{kind.__name__}"}

    def fields(self, fields: Mapping[str, Field], description: str) -> dict[str, Any]:
        properties = {}
        for name, field in fields.items():
            properties[name] = self.of(field.annotation)
            default = field.default.value if isinstance(field.default, Enum) else field.default
            if isinstance(default, bool | int | float | str) and default != "":
                properties[name]["default"] = default
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        required = [name for name, field in fields.items() if not field.optional]
        return schema | ({"required": required} if required else {}) | {"description": description.partition("\n")[0]}

    def _typed(
        self,
        schema: dict[str, Any],
        field: str,
        types: Sequence[PluginType],
        ignored: Mapping[str, str] = MappingProxyType({}),
        ignored_parameters: Iterable[str] = (),
    ) -> dict[str, Any]:
        """The schema of a `type` field and of the `parameters` that depend on it."""
        cases = [self._case(field, kind, ignored_parameters) for kind in types if kind.parameters]
        return {"properties": schema["properties"] | {field: _choices(types, ignored)}, "allOf": cases}

    def _case(self, field: str, kind: PluginType, ignored_parameters: Iterable[str]) -> dict[str, Any]:
        parameters = self.fields(kind.parameters, kind.summary)
        parameters["properties"] |= {name: {"type": "string"} for name in sorted(ignored_parameters)}
        needed = ["parameters"] if "required" in parameters else []
        return {
            "if": {"properties": {field: {"const": kind.name}}, "required": [field]},
            "then": {"properties": {"parameters": parameters}, "required": needed},
        }


def _choices(types: Iterable[PluginType], ignored: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """The known names as completions; the user's own classes are accepted too."""
    known = [{"const": kind.name, "description": kind.summary} for kind in types]
    known += [{"const": name, "description": f"ignored: {why}"} for name, why in ignored.items()]
    own = {"type": "string", "pattern": OWN_CLASS, "description": "your own class: package.module:Name"}
    return {"anyOf": [*known, own]}


def _bounds(marks: Iterable[Any]) -> dict[str, Any]:
    """The bounds of a number. They do not apply to text with a unit."""
    words = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
    bounds = [mark for mark in marks if isinstance(mark, msgspec.Meta)]
    return {
        word: getattr(mark, name) for mark in bounds for name, word in words.items() if getattr(mark, name) is not None
    }


def _path_in_words(mark: FileName) -> str:
    words = "a path, relative to the folder of this file; or package:NAME/FILE, inside an installed Python package"
    return f"{words}; or the name of a model on a hub" if mark.or_name else words
