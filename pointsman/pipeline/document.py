"""A graph as YAML, and back.

Enters: a graph. Leaves: an `Application` document, as plain data or as text that people can edit. The one rule: reading
a written document gives the same graph, and writing it again gives the same text.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import yaml

from pointsman.errors import did_you_mean
from pointsman.parameters import yaml_name
from pointsman.pipeline.graph import CALL, Access, Call, FromInput, FromStep, Graph, HandleTo, Node, Template
from pointsman.pipeline.options import NodeOptions

MARK = "$"
"""Keys that begin with this sign are references: $input, $step and $handle."""
INPUT, STEP, HANDLE = "$input", "$step", "$handle"

OPTIONS: Mapping[str, str] = {field.name: yaml_name(field) for field in msgspec.structs.fields(NodeOptions)}
"""Options of a node: name in Python -> name in YAML."""
_UNITS = {"Ti": 2**40, "Gi": 2**30, "Mi": 2**20, "Ki": 2**10}

WIDTH = 100
"""Values that fit on a line of this length are written on one line."""
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""Our YAML parser reads text of this form as a number, so such text is quoted."""

Note = Callable[[tuple[str | int, ...], str], None]
"""A function that takes the path and the message of a problem."""


def to_yaml(name: str, graph: Graph) -> str:
    """An application as YAML. The same graph always gives the same text."""
    node = _Representer(default_flow_style=False, sort_keys=False).represent_data(graph_document(name, graph))
    _lay_out(node)
    return str(yaml.serialize(node, Dumper=yaml.SafeDumper, width=1_000_000, allow_unicode=True))


def graph_document(name: str, graph: Graph) -> dict[str, Any]:
    """The document of an application, as plain data. Defaults are left out."""
    ingress = {"preprocessor": graph.preprocessor, "schema": graph.schema, "version": graph.ingress_version}
    document = {
        "apiVersion": "pointsman/v1alpha1",
        "kind": "Application",
        "name": name,
        "nodes": [_node(node) for node in graph.nodes],
        "calls": [_call(call) for call in graph.calls],
        "output": written(graph.output),
        "ingress": {key: value for key, value in ingress.items() if value} | written_options(graph.ingress),
        "pythonPath": list(graph.python_path),
        "scaling": graph.scaling,
    }
    kept = ("apiVersion", "kind", "name", "nodes", "output")
    return {key: value for key, value in document.items() if value or key in kept}


def _node(node: Node) -> dict[str, Any]:
    more = {key: value for key, value in (("version", node.version), ("joins", node.joins)) if value}
    return {"name": node.name, node.kind.value: node.code, **_arguments(node), **more, **written_options(node.options)}


def _call(call: Call) -> dict[str, Any]:
    method = {} if call.method == CALL else {"method": call.method}
    return {"id": call.id, "node": call.node, **method, **_arguments(call)}


def _arguments(owner: Node | Call) -> dict[str, Any]:
    args = {"args": [written(value) for value in owner.args]} if owner.args else {}
    return args | ({"kwargs": written(owner.kwargs)} if owner.kwargs else {})


# Values


def written(template: Template) -> Any:
    if isinstance(template, FromInput):
        return {INPUT: _written_path(template.path)}
    if isinstance(template, FromStep):
        return {STEP: [template.call, *_written_path(template.path)] if template.path else template.call}
    if isinstance(template, HandleTo):
        return {HANDLE: template.node}
    if isinstance(template, Mapping):
        return {key: written(value) for key, value in template.items()}
    if isinstance(template, list | tuple):
        return [written(value) for value in template]
    return template


def _written_path(path: tuple[Access, ...]) -> list[Any]:
    return [{"attribute": step.key} if step.attribute else step.key for step in path]


def read(data: Any, note: Note, path: tuple[str | int, ...] = ()) -> Template:
    """The template that plain data describes. Passes each problem to `note` with its path."""
    if isinstance(data, list):
        return [read(value, note, (*path, index)) for index, value in enumerate(data)]
    if not isinstance(data, dict):
        return data
    marked = [key for key in data if key.startswith(MARK)]
    if not marked:
        return {key: read(value, note, (*path, key)) for key, value in data.items()}
    [mark, *more] = marked
    if mark not in (INPUT, STEP, HANDLE):
        note((*path, mark), f"keys that begin with {MARK} are references{did_you_mean(mark, (INPUT, STEP, HANDLE))}")
    elif more or len(data) > 1:
        note(path, f"{mark} stands alone in its mapping")
    elif mark == INPUT:
        return FromInput(_path_into(data[INPUT], note, (*path, INPUT)))
    elif mark == STEP and isinstance(data[STEP], list) and data[STEP] and isinstance(data[STEP][0], str):
        return FromStep(data[STEP][0], _path_into(data[STEP][1:], note, (*path, STEP)))
    elif isinstance(data[mark], str):
        return FromStep(data[STEP]) if mark == STEP else HandleTo(data[HANDLE])
    else:
        note((*path, mark), f"expected the {'id of a call' if mark == STEP else 'name of a node'}")
    return None


def _path_into(data: Any, note: Note, path: tuple[str | int, ...]) -> tuple[Access, ...]:
    if not isinstance(data, list):
        note(path, "expected a list of keys, such as [0] or [user, {attribute: name}]; [] is the whole input")
        return ()
    found = []
    for index, step in enumerate(data):
        if isinstance(step, str) or (isinstance(step, int) and not isinstance(step, bool)):
            found.append(Access(step))
        elif isinstance(step, dict) and list(step) == ["attribute"] and isinstance(step["attribute"], str):
            found.append(Access(step["attribute"], attribute=True))
        else:
            note((*path, index), "expected a key, an index, or {attribute: name}")
    return tuple(found)


# Options


def written_options(options: NodeOptions) -> dict[str, Any]:
    """Options that differ from their defaults, with their names and values in YAML."""
    defaults = NodeOptions()
    return {
        spelled: _option(name, getattr(options, name))
        for name, spelled in OPTIONS.items()
        if getattr(options, name) != getattr(defaults, name)
    }


def _option(name: str, value: Any) -> Any:
    if name in ("user_config", "scheduling", "scaling"):
        return value
    if name.endswith("_bytes"):
        unit = next((unit for unit, size in _UNITS.items() if not value % size), "")
        return f"{value // _UNITS[unit]}{unit}" if unit and value else value
    if isinstance(value, float) and value.is_integer():
        return f"{int(value)}s" if name.endswith("_s") else int(value)
    return dict(value) if isinstance(value, Mapping) else value


# Text


class _Representer(yaml.representer.SafeRepresenter):
    """Writes plain data as YAML that our parser reads back unchanged."""

    def ignore_aliases(self, data: Any) -> bool:
        """A value that occurs twice is written twice, so that people can change one of them."""
        return True


def _text(representer: yaml.representer.SafeRepresenter, text: str) -> yaml.Node:
    style = None
    if not text.replace("\n", "").isprintable() or (text.isspace() and text != " "):
        style = '"'
    elif "\n" in text:
        style = "|" if text[0] != "\n" and all(line == line.strip() for line in text.split("\n")) else '"'
    elif _EXPONENT.fullmatch(text):
        style = "'"
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Representer.add_representer(str, _text)


def _lay_out(document: yaml.Node) -> None:
    """Lay out nodes with one field per line, and everything else on one line if it fits."""
    for key, value in document.value:
        if key.value in ("nodes", "calls"):
            for entry in value.value:
                _fold(*(field for _, field in entry.value) if key.value == "nodes" else (entry,))
        else:
            _fold(value)


def _fold(*nodes: yaml.Node) -> None:
    for node in nodes:
        if isinstance(node, yaml.CollectionNode):
            node.flow_style = _length(node) <= WIDTH
            if not node.flow_style:
                _fold(*(part for item in node.value for part in (item[1:] if isinstance(item, tuple) else [item])))


def _length(node: yaml.Node) -> int:
    """Approximate length on one line. For text of several lines, a length that never fits on one line."""
    if isinstance(node, yaml.ScalarNode):
        return len(node.value) if "\n" not in node.value else WIDTH + 1
    parts = [part for item in node.value for part in (item if isinstance(item, tuple) else [item])]
    return 2 + sum(_length(part) for part in parts) + 2 * max(len(parts) - 1, 0)
