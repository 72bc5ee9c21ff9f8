"""A pipeline as it was written: nodes, calls of them, and what goes where. Frozen, and the same as its YAML."""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, TypeAlias

import msgspec

from pointsman.pipeline.options import NodeOptions

CALL = "__call__"
"""The method that is meant where none is named."""


class Access(msgspec.Struct, frozen=True):
    """One step into a value: an item, or an attribute."""

    key: int | str
    attribute: bool = False


class FromInput(msgspec.Struct, frozen=True):
    """What a request brought, or a part of it."""

    path: tuple[Access, ...] = ()


class FromStep(msgspec.Struct, frozen=True):
    """The result of another call."""

    call: str


class HandleTo(msgspec.Struct, frozen=True):
    """A node itself, to be called by who gets it."""

    node: str


Reference: TypeAlias = FromInput | FromStep | HandleTo
Template: TypeAlias = Any
"""A value with references in place of what is not known yet: plain data, lists and mappings of it, and references."""


def references(template: Template) -> Iterator[Reference]:
    """All that are in a template, in order."""
    if isinstance(template, FromInput | FromStep | HandleTo):
        yield template
    elif isinstance(template, Mapping):
        for value in template.values():
            yield from references(value)
    elif isinstance(template, list | tuple):
        for value in template:
            yield from references(value)


def filled(template: Template, fill: Callable[[Any], Any]) -> Any:
    """The value of a template; `fill` says what a reference stands for."""
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
    """Of the class: plain data, and handles to other nodes."""
    kwargs: Mapping[str, Template] = {}
    options: NodeOptions = NodeOptions()
    version: str = ""
    """Of the code. Another version is another program: its replicas are replaced."""
    joins: bool = False
    """What its shards return goes to its method `join`; else the result is a list."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A method of a node, called once per request."""

    id: str
    node: str
    method: str = CALL
    args: tuple[Template, ...] = ()
    kwargs: Mapping[str, Template] = {}


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes, all calls in an order in which they can be made, and what is answered."""

    nodes: tuple[Node, ...]
    calls: tuple[Call, ...]
    output: Template
    """Usually the last call; several outputs are a list or a mapping."""
    preprocessor: str = ""
    """Where the code is that makes the input of an HTTP request; empty: its JSON is the input."""
    schema: str = ""
    """Where the class is that the input must be one of (pydantic); empty: anything goes."""
    ingress: NodeOptions = NodeOptions()
    """Of the replicas that run the two, if there is one of them."""
    ingress_version: str = ""
    python_path: tuple[str, ...] = ()
    """Folders where modules are found besides, relative to that of the application."""
    scaling: Mapping[str, Any] | None = None
    """Of all nodes that do not say it themselves, as of one; None: nobody but they themselves."""

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    @property
    def has_ingress(self) -> bool:
        """Whether requests pass through code of the user before anything else."""
        return bool(self.preprocessor or self.schema)
