"""A pipeline as it was written: nodes, their calls, and references between them. Frozen; YAML has the same form."""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, TypeAlias

import msgspec

from pointsman.pipeline.options import NodeOptions

CALL = "__call__"
"""The default method."""


class Access(msgspec.Struct, frozen=True):
    """One step into a value: an item, or an attribute."""

    key: int | str
    attribute: bool = False


class FromInput(msgspec.Struct, frozen=True):
    """The input of a request, or a part of it."""

    path: tuple[Access, ...] = ()


class FromStep(msgspec.Struct, frozen=True):
    """The result of another call."""

    call: str
    path: tuple[Access, ...] = ()
    """The part of it; empty: all of it."""


class HandleTo(msgspec.Struct, frozen=True):
    """A node itself: the receiver calls it through a handle."""

    node: str


Reference: TypeAlias = FromInput | FromStep | HandleTo
Template: TypeAlias = Any
"""A value that may contain references: plain data, lists and mappings of it, and references."""


def references(template: Template) -> Iterator[Reference]:
    """All references in a template, in order."""
    if isinstance(template, FromInput | FromStep | HandleTo):
        yield template
    elif isinstance(template, Mapping):
        for value in template.values():
            yield from references(value)
    elif isinstance(template, list | tuple):
        for value in template:
            yield from references(value)


def filled(template: Template, fill: Callable[[Any], Any]) -> Any:
    """The value of a template; `fill` replaces each reference."""
    if isinstance(template, msgspec.Struct):
        return fill(template)
    if isinstance(template, Mapping):
        return {name: filled(value, fill) for name, value in template.items()}
    if isinstance(template, list | tuple):
        return [filled(value, fill) for value in template]
    return template


class NodeKind(Enum):
    """What stands behind a node."""

    CLASS = "class"
    """An object of the user's class in each replica."""
    FUNCTION = "function"
    MODEL = "model"
    """A model that a deployment of the manifest serves."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment of an application."""

    name: str
    kind: NodeKind
    code: str
    """Where its code is, as module:Name or path/to/file.py:Name; of a model, its name."""
    args: tuple[Template, ...] = ()
    """Constructor arguments: plain data, and handles to other nodes."""
    kwargs: Mapping[str, Template] = {}
    options: NodeOptions = NodeOptions()
    version: str = ""
    """The version of the code. When it changes, replicas are replaced."""
    joins: bool = False
    """Its method `join` merges the results of its shards; else the result is a list."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A method of a node, called once per request."""

    id: str
    node: str
    method: str = CALL
    args: tuple[Template, ...] = ()
    kwargs: Mapping[str, Template] = {}


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes, all calls in an order in which they can be made, and the output."""

    nodes: tuple[Node, ...]
    calls: tuple[Call, ...]
    output: Template
    """Usually the last call; several outputs are a list or a mapping."""
    preprocessor: str = ""
    """The code that makes the input of an HTTP request; empty: its JSON is the input."""
    schema: str = ""
    """The pydantic class that validates the input; empty: no validation."""
    ingress: NodeOptions = NodeOptions()
    """Options of the replicas that run preprocessor and schema."""
    ingress_version: str = ""
    python_path: tuple[str, ...] = ()
    """Further folders to import modules from, relative to that of the application."""
    scaling: Mapping[str, Any] | None = None
    """Scaling of all nodes without `scaling` of their own; None: those have a fixed number of replicas."""

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    @property
    def has_ingress(self) -> bool:
        """Whether requests pass through the user's preprocessor or schema first."""
        return bool(self.preprocessor or self.schema)
