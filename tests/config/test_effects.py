"""Every setting does what it says, or says that it does nothing: fields of documents and parameters of plugins."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import msgspec
import pytest

from pointsman.config import load_manifest, load_picker
from pointsman.config.problems import is_list
from pointsman.config.registry import PluginType, engines, plugins, policies, scaling_policies
from pointsman.config.schema import KINDS, PickerBody
from pointsman.config.validation import Field, fields_of
from pointsman.parameters import NoEffect, unmarked
from tests.architecture.house import SOURCES, nodes_of

IDENTITY = {"api_version", "kind"}
"""They say what a document is, and are checked when it is read."""
HANDED_ON = {"FaultSpec"}
"""The simulator gets it as it is written."""
TYPES = [kind for registry in (plugins(), policies(), engines(), scaling_policies()) for kind in registry]


def is_declared_without_effect(annotation: Any) -> bool:
    return any(isinstance(mark, NoEffect) for mark in unmarked(annotation)[1])


def structs_in(annotation: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs that a value of this type is made of, at any depth."""
    kind, _ = unmarked(annotation)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for info in msgspec.structs.fields(kind):
            if not is_declared_without_effect(info.type):
                yield from structs_in(info.type)
    for member in get_args(kind):
        yield from structs_in(member)


# What the code reads


@cache
def read_in_package() -> frozenset[str]:
    """Names of attributes that are read anywhere, and texts that name them for getattr."""
    found: set[str] = set()
    for source in SOURCES:
        if source.name == "schema.py":
            continue
        for node in nodes_of(source):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


def read_by(function: Any) -> set[str]:
    """The names that the body of a function reads."""
    source = textwrap.dedent(inspect.getsource(function))
    [definition] = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    body = ast.Module(definition.body, [])
    return {node.id for node in ast.walk(body) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def unread_parameters(kind: PluginType) -> list[str]:
    made: Any = kind.build
    init = made.__init__
    if init is object.__init__ or not inspect.isfunction(init):
        return []
    names = read_by(init)
    unread = [
        field.name
        for field in kind.parameters.values()
        if field.name not in names and not is_declared_without_effect(field.annotation)
    ]
    for field in kind.parameters.values():
        for struct in structs_in(field.annotation):
            unread += unread_fields(struct)
    return unread


def unread_fields(struct: type[msgspec.Struct]) -> list[str]:
    if struct.__name__ in HANDED_ON:
        return []
    return [
        f"{struct.__name__}.{field.name}"
        for field in fields_of(struct).values()
        if field.name not in read_in_package() | IDENTITY and not is_declared_without_effect(field.annotation)
    ]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_parameter_is_read_or_declared_as_without_effect(kind: PluginType) -> None:
    assert unread_parameters(kind) == []


SECTIONS = sorted({one for root in KINDS.values() for one in structs_in(root)}, key=lambda one: one.__name__)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_of_a_document_is_read_or_declared_as_without_effect(section: type[msgspec.Struct]) -> None:
    assert unread_fields(section) == []


class Forgetful:
    """Has a parameter that it does not read."""

    def __init__(self, kept: int = 0, forgotten: int = 0) -> None:
        self.kept = kept


def test_a_parameter_that_is_not_read_is_found() -> None:
    fields = {name: Field(name, (name,), int, True) for name in ("kept", "forgotten")}
    assert unread_parameters(PluginType("forgetful", Forgetful, fields, True, False)) == ["forgotten"]


# What has no effect is a warning


def without_effect() -> Iterator[tuple[str, Any]]:
    """Paths of fields of a picker's document that are declared as without effect, and their types."""

    def inside(struct: type[msgspec.Struct], path: str) -> Iterator[tuple[str, Any]]:
        for name, field in fields_of(struct).items():
            if is_declared_without_effect(field.annotation):
                yield f"{path}{name}", unmarked(field.annotation)[0]
                continue
            kind, _ = unmarked(field.annotation)
            for member in () if is_list(kind) else (kind, *get_args(kind)):
                if isinstance(member, type) and issubclass(member, msgspec.Struct):
                    yield from inside(member, f"{path}{name}.")

    return inside(PickerBody, "")


VALUES = {
    "flowControl.defaultPriorityBand.defaultRequestTTL": "5s",
    "flowControl.defaultNegativePriorityBand.defaultRequestTTL": "5s",
    "flowControl.bandSelectionPolicyPluginRef": "any",
    "dataLayer.injectDefaults": "false",
    "dataLayer.sources": "[{pluginRef: metrics-data-source}]",
    "dataLayer.discovery.peers": "{pluginRef: queue-scorer}",
    "dataLayer.peerDiscovery": "{pluginRef: queue-scorer}",
    "dataLayer.crossReplica": "{syncInterval: 5s}",
    "dataLayer.crossReplicaSyncerPluginRef": "any",
    "dataLayer.crossReplicaSyncInterval": "5s",
    "requestHandler.parsers": "[{pluginRef: openai-parser}]",
    "requestHandler.propagatePriority": "true",
    "parser": "{pluginRef: openai-parser}",
}


def test_every_such_field_of_a_picker_is_tried_below() -> None:
    assert {path for path, _ in without_effect()} == set(VALUES)


@pytest.mark.parametrize("path", VALUES)
def test_a_field_without_effect_is_a_warning(path: str) -> None:
    document = VALUES[path]
    for step in reversed(path.split(".")):
        document = f"{{{step}: {document}}}"
    gated = f"{{featureGates: [flowControl], plugins: [{{type: queue-scorer}}], {document[1:]}"
    assert path in {warning.field for warning in load_picker(gated).warnings}


@pytest.mark.parametrize(
    ("document", "field", "message"),
    [
        (
            "plugins: [{type: queue-scorer}, {type: decode-filter, weight: 2}]",
            "plugins[1].weight",
            "has no effect: decode-filter is not a scorer",
        ),
        (
            "plugins: [{type: decode-filter}]\nschedulingProfiles: "
            "[{name: d, plugins: [{pluginRef: decode-filter, weight: 2}]}]",
            "schedulingProfiles[0].plugins[0].weight",
            "has no effect: decode-filter is not a scorer",
        ),
        (
            "plugins: [{type: queue-scorer}, {type: decode-filter}]\nschedulingProfiles: "
            "[{name: d, plugins: [{pluginRef: queue-scorer}]}]",
            "plugins[1]",
            "decode-filter has no effect: it is a filter, and nothing refers to it",
        ),
        (
            "plugins: [{type: session-affinity-scorer}, {type: queue-scorer}]\nschedulingProfiles: "
            "[{name: d, plugins: [{pluginRef: queue-scorer}]}]",
            "plugins[0]",
            "session-affinity-scorer has no effect: it is a scorer, and nothing refers to it",
        ),
        (
            "plugins: [{type: queue-scorer}, {type: edf-ordering-policy}]",
            "plugins[1]",
            "edf-ordering-policy has no effect: it is an ordering policy, and nothing refers to it",
        ),
        (
            "plugins: [{type: queue-scorer}, {type: always-disagg-pd-decider}]",
            "plugins[1]",
            "always-disagg-pd-decider has no effect: it is a decider, and nothing refers to it",
        ),
        (
            "plugins: [{type: queue-scorer}, {type: agent-identity}]",
            "plugins[1]",
            "agent-identity has no effect: the feature gate flowControl is off",
        ),
        (
            "featureGates: [flowControl]\nplugins: [{type: queue-scorer}, {type: sheddable-eviction-filter}]",
            "plugins[1]",
            "sheddable-eviction-filter has no effect: flowControl.enableEviction is false",
        ),
    ],
)
def test_what_nothing_uses_is_a_warning(document: str, field: str, message: str) -> None:
    found = [(warning.field, warning.message) for warning in load_picker(document).warnings]
    assert found == [(field, message)]
    indented = textwrap.indent(document, "      ")
    manifest = (
        f"deployments:\n- name: a\n  model: m\n  engine: {{type: simulated}}\n  scheduling:\n    config:\n{indented}\n"
    )
    inside = [(warning.field, warning.message) for warning in load_manifest(manifest).warnings]
    assert (f"deployments[0].scheduling.config.{field}", message) in inside


@pytest.mark.parametrize(
    "document",
    [
        "plugins: [{type: queue-scorer, weight: 3}, {type: decode-filter}, {type: random-picker}]",
        "plugins: [{type: queue-scorer}, {type: probabilistic-admitter}, {type: inflight-load-producer}]",
        "plugins: [{type: queue-scorer}, {type: random-picker}]\n"
        "schedulingProfiles: [{name: d, plugins: [{pluginRef: queue-scorer, weight: 2}]}]",
        "plugins: [{type: topology-affinity-filter}, {type: topology-extractor}]",
        "featureGates: [flowControl]\nplugins: [{type: queue-scorer}, {type: agent-identity}, "
        "{type: sheddable-eviction-filter}, {type: priority-then-time-eviction-order-policy}]\n"
        "flowControl: {enableEviction: true}",
    ],
)
def test_used_settings_give_no_warning(document: str) -> None:
    assert load_picker(document).warnings == ()
