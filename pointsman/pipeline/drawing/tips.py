"""What whoever points at a box is told: where its code is, what it was made with, and its options."""

from collections.abc import Mapping, Sequence
from typing import Any

from pointsman.drawing import cut
from pointsman.pipeline.graph import Access, Call, FromInput, FromStep, Graph, HandleTo, Node, NodeKind, Template
from pointsman.pipeline.options import NodeOptions

LONGEST = 160
"""Of a value that is shown; a configuration may be a page."""


def input_tip(graph: Graph) -> str:
    """Of the input."""
    if not graph.has_ingress:
        return "what a request brings: its JSON"
    code = {"preprocessor": graph.preprocessor, "schema": graph.schema}
    return _lines(
        "what a request brings",
        *(f"{what}: {where}" for what, where in code.items() if where),
        *_options(graph.ingress),
    )


def call_tip(call: Call, told: str, node: Node) -> str:
    """Of a call, and of the node behind it."""
    return _lines(f"{call.id} = {told}({_tip_arguments(call.args, call.kwargs)})", node_tip(node))


def node_tip(node: Node) -> str:
    """Of a node."""
    version = f", version {node.version}" if node.version else ""
    made = _tip_arguments(node.args, node.kwargs)
    joined = "results of its shards are joined by its method join" if node.joins else "results of its shards are a list"
    return _lines(
        f"node {node.name}: {node.kind.value} {node.code}{version}".rstrip(),
        f"made with ({made})" if made else "",
        joined if node.options.shards > 1 else "",
        *(_options(node.options) if node.kind is not NodeKind.MODEL else ()),
    )


def part_of_input(path: Sequence[Access]) -> str:
    """As it was written: [0].name"""
    return "".join(f".{step.key}" if step.attribute else f"[{step.key}]" for step in path)


def _options(options: NodeOptions) -> list[str]:
    """Those that are not as they come. Of the environment only names: its values may be secrets."""
    usual, found = NodeOptions(), []
    for name in options.__struct_fields__:
        value = getattr(options, name)
        if value != getattr(usual, name):
            found.append(f"{name}: {', '.join(value) if name == 'env' else _value(value)}")
    return found


def _tip_arguments(args: Sequence[Template], kwargs: Mapping[str, Template]) -> str:
    return cut(", ".join([*map(_value, args), *(f"{name}={_value(one)}" for name, one in kwargs.items())]), LONGEST)


def _value(template: Any) -> str:
    """As Python would write it, with names in place of references."""
    if isinstance(template, FromInput):
        return f"input{part_of_input(template.path)}"
    if isinstance(template, FromStep):
        return template.call
    if isinstance(template, HandleTo):
        return f"<{template.node}>"
    if isinstance(template, Mapping):
        words = "{" + ", ".join(f"{name!r}: {_value(one)}" for name, one in template.items()) + "}"
    elif isinstance(template, list | tuple):
        words = "[" + ", ".join(map(_value, template)) + "]"
    else:
        words = repr(template)
    return cut(words, LONGEST)


def _lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)
