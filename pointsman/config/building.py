"""The plugins of one document. They are declared in any order, and built with their dependencies first.

Enters: plugin entries. Leaves: objects by name. The one rule: a plugin that cannot be built is one problem.
References to that plugin are not reported as further problems.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pointsman.config.problems import FieldPath, Problems, a, listed
from pointsman.config.registry import (
    ELSEWHERE,
    PARAMETERS_ELSEWHERE,
    ROLES,
    STRICT_WITHOUT_PARAMETERS,
    PluginType,
    Registry,
    roles_of,
)
from pointsman.config.schema import PluginSpec
from pointsman.config.validation import INVALID, Validator
from pointsman.errors import ConfigError, did_you_mean
from pointsman.parameters import PluginRef, unmarked


class Declared(msgspec.Struct, frozen=True):
    """One entry of `plugins`."""

    name: str
    path: FieldPath
    type: PluginType | None = None
    """None if the type is unknown (which has been reported), or if it has no effect here."""
    parameters: Mapping[str, Any] = {}
    weight: float = 1.0
    ignored: bool = False
    injected: bool = False


class Plugins:
    """Objects by name, each built on first use."""

    def __init__(self, registry: Registry, problems: Problems) -> None:
        self.declared: dict[str, Declared] = {}
        self._registry = registry
        self._problems = problems
        self._built: dict[str, Any] = {}
        self._in_flight: list[str] = []
        self.used: set[str] = set()
        """Names that other plugins or fields refer to."""

    def declare(self, spec: PluginSpec, path: FieldPath) -> None:
        name = spec.name or spec.type
        if spec.type == "":
            self._problems.add((*path, "type"), "must not be empty")
        if not name:
            return
        if name in self.declared:
            first = self._problems.line_of(self.declared[name].path)
            message = f'there is already a plugin "{name}" on line {first}; give each its own name'
            self._problems.add((*path, "name") if spec.name else path, message)
        elif spec.type in ELSEWHERE and spec.type not in self._registry:
            self._problems.warn(path, f"{name} has no effect: {ELSEWHERE[spec.type]}")
            self.declared[name] = Declared(name, path, ignored=True)
        else:
            found = self._registry.find(spec.type, self._problems, (*path, "type")) if spec.type else None
            usable = found if spec.parameters is not INVALID else None
            self.declared[name] = Declared(name, path, usable, spec.parameters or {}, spec.weight)

    def inject(self, type_name: str, role: str, path: FieldPath) -> Any:
        """The plugin of this type; built with default parameters if not declared. `path` leads to what needs it."""
        if type_name not in self.declared:
            kind = self._registry.find(type_name, self._problems, ())
            self.declared[type_name] = Declared(type_name, path, kind, injected=True)
        return self.referred(type_name, role, path)

    def get(self, name: str) -> Any:
        """The plugin with a declared name; INVALID if it could not be built."""
        if name not in self._built:
            self._in_flight.append(name)
            self._built[name] = self._build(self.declared[name])
            self._in_flight.pop()
        return self._built[name]

    def built(self, *, injected: bool = True) -> dict[str, Any]:
        """All plugins that could be built, in the order of declaration."""
        declared = list(self.declared.values())  # a copy: building a plugin may inject another one
        objects = {one.name: self.get(one.name) for one in declared if injected or not one.injected}
        return {name: plugin for name, plugin in objects.items() if plugin is not INVALID}

    def of_kind(self, protocol: Any) -> list[Declared]:
        """The declared plugins whose class has a role, including those that could not be built."""
        return [
            one
            for one in self.declared.values()
            if one.type is not None and not one.injected and isinstance(one.type.build, protocol)
        ]

    @property
    def incomplete(self) -> bool:
        """Whether a declared plugin could not be built."""
        return any(not one.ignored and self.get(one.name) is INVALID for one in list(self.declared.values()))

    def exists(self, name: str, path: FieldPath) -> bool:
        """Whether a plugin with this name is declared. If it is not, report the field that refers to it."""
        if name not in self.declared:
            self._problems.add(path, f'no plugin is named "{name}"{did_you_mean(name, self.declared)}')
        return name in self.declared

    def referred(self, name: str, role: str, path: FieldPath) -> Any:
        """The plugin that a field refers to; INVALID, after reporting why, if the field cannot use it."""
        if not self.exists(name, path):
            return INVALID
        self.used.add(name)
        if name in self._in_flight:
            circle = " -> ".join([*self._in_flight[self._in_flight.index(name) :], name])
            self._problems.add(path, f"these plugins need each other: {circle}")
            return INVALID
        plugin = self.get(name)
        if self.declared[name].ignored:
            self._problems.add(path, f'"{name}" is not {a(role)}; it does nothing here')
        elif plugin is not INVALID and role in ROLES and not isinstance(plugin, ROLES[role]):
            self._problems.add(path, f'"{name}" is not {a(role)} but {a(listed(roles_of(plugin)))}')
            return INVALID
        return plugin

    def _build(self, one: Declared) -> Any:
        if one.type is None:
            return INVALID
        unresolved: list[str] = []

        def resolve(name: str, ref: PluginRef, path: FieldPath) -> Any:
            plugin = self.referred(name, ref.role, path)
            if plugin is INVALID:
                unresolved.append(name)
            return plugin

        parameters = self._with_default_references(one, self._relevant(one, one.type), one.type)
        return built(one.type, parameters, one.path, Validator(self._problems, resolve), unresolved)

    def _relevant(self, one: Declared, kind: PluginType) -> dict[str, Any]:
        """The parameters, without those that published documents may have but that have no effect here."""
        if not kind.builtin:
            return dict(one.parameters)
        if not kind.parameters and kind.name not in STRICT_WITHOUT_PARAMETERS:
            if one.parameters:
                self._problems.warn((*one.path, "parameters"), f"these have no effect: {kind.name} has none")
            return {}
        elsewhere = [name for name in one.parameters if name in PARAMETERS_ELSEWHERE and name not in kind.parameters]
        for name in elsewhere:
            self._problems.warn((*one.path, "parameters", name), "has no effect: each fact has one producer")
        return {name: value for name, value in one.parameters.items() if name not in elsewhere}

    def _with_default_references(self, one: Declared, given: dict[str, Any], kind: PluginType) -> dict[str, Any]:
        """The parameters, with a default plugin for each reference that is missing."""
        for name, field in kind.parameters.items():
            for mark in unmarked(field.annotation)[1]:
                if isinstance(mark, PluginRef) and mark.default and not given.get(name):
                    self.inject(mark.default, mark.role, (*one.path, "parameters", name))
                    given[name] = mark.default
        return given


def built(
    kind: PluginType,
    parameters: Mapping[str, Any],
    path: FieldPath,
    validator: Validator,
    unresolved: Sequence[str] = (),
) -> Any:
    """An object of this type; INVALID if its parameters are wrong, or if a plugin that it needs could not be built."""
    problems = validator.problems
    arguments = arguments_of(kind, parameters, path, validator)
    if arguments is INVALID or unresolved:
        return INVALID
    try:
        return kind.build(**arguments)
    except ConfigError as error:
        for problem in error.problems:
            problems.add(path, str(problem))
    except ValueError as error:
        problems.add((*path, *_about(str(error), kind)), str(error))
    except Exception as error:  # the user's own class may raise anything
        problems.add(path, f"{kind.name} cannot be made: {type(error).__name__}: {error}")
    return INVALID


def _about(message: str, kind: PluginType) -> FieldPath:
    """The path of the parameter that a message begins with; empty if the message begins with another word."""
    [word] = re.findall(r"\A\w*", message)
    return ("parameters", word) if any(word in field.spellings for field in kind.parameters.values()) else ()


def arguments_of(kind: PluginType, parameters: Mapping[str, Any], path: FieldPath, validator: Validator) -> Any:
    """The arguments of a class, by their names in Python; INVALID if an argument is wrong."""
    before = len(validator.problems)
    given = dict(parameters)
    spellings = {spelling for field in kind.parameters.values() for spelling in field.spellings}
    extra = {name: given.pop(name) for name in list(given) if name not in spellings} if kind.takes_anything else {}
    values = validator.fields(given, kind.parameters, (*path, "parameters"), kind="parameter")
    return INVALID if len(validator.problems) > before else values | extra
