"""A pipeline as it was written: nodes, their calls, and references between them. It is frozen, and YAML has the same
form."""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, TypeAlias

import msgspec

from pointsman.pipeline.options import NodeOptions

CALL = "__call__"
"""The method that a call uses by default."""


class Access(msgspec.Struct, frozen=True):
    """One step of a path into a value: an item, or an attribute."""

    key: int | str
    attribute: bool = False


class FromInput(msgspec.Struct, frozen=True):
    """The input of a request, or a part of it."""

    path: tuple[Access, ...] = ()


class FromStep(msgspec.Struct, frozen=True):
    """The result of another call."""

    call: str
    path: tuple[Access, ...] = ()
    """The path to the wanted part of the result; empty for the whole result."""


class HandleTo(msgspec.Struct, frozen=True):
    """A node itself: the receiver calls it through a handle."""

    node: str


Reference: TypeAlias = FromInput | FromStep | HandleTo
Template: TypeAlias = Any
"""A value that may contain references: plain data, a reference, or a list or mapping of such values."""


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
    """What a node calls."""

    CLASS = "class"
    """Each replica has an object of the user's class."""
    FUNCTION = "function"
    MODEL = "model"
    """A model that a deployment of the manifest serves."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment of an application."""

    name: str
    kind: NodeKind
    code: str
    """The location of the node's code, as module:Name or path/to/file.py:Name. For a model, the model's name."""
    args: tuple[Template, ...] = ()
    """Constructor arguments: plain data, and handles to other nodes."""
    kwargs: Mapping[str, Template] = {}
    options: NodeOptions = NodeOptions()
    version: str = ""
    """The version of the code. When the version changes, replicas are replaced."""
    joins: bool = False
    """Whether the node's method `join` merges the results of its shards; otherwise the result is a list."""


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
    """The code that makes the input from an HTTP request; empty if the JSON of the request is the input."""
    schema: str = ""
    """The pydantic class that validates the input; empty if the input is not validated."""
    ingress: NodeOptions = NodeOptions()
    """Options of the replicas that run the preprocessor and the schema."""
    ingress_version: str = ""
    python_path: tuple[str, ...] = ()
    """Further folders to import modules from, relative to the application's folder."""
    scaling: Mapping[str, Any] | None = None
    """The scaling of all nodes that have no `scaling` of their own; None if these nodes have a fixed number of
    replicas."""

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    @property
    def has_ingress(self) -> bool:
        """Whether requests pass through the user's preprocessor or schema first."""
        return bool(self.preprocessor or self.schema)
