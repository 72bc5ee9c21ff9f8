"""An `Application` document -> a plan: the checked graph, and a deployment for each node.

Enters: a file (`Path`) or text (`str`). Leaves: an `ApplicationPlan`, or `ConfigError` with all problems. The one rule:
the user's code is not loaded.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pointsman.config.nodes import Nodes, deployment_name, ranks
from pointsman.config.plan import ApplicationPlan, PointsmanPlan
from pointsman.config.problems import FieldPath, Names, Problems
from pointsman.config.schema import ApplicationDocument, CallSpec, IngressSpec, NodeSpec
from pointsman.config.validation import INVALID, usable
from pointsman.config.yaml import document_of, folder_of, importable
from pointsman.errors import did_you_mean
from pointsman.parameters import quoted
from pointsman.pipeline.building import INGRESS, NAME
from pointsman.pipeline.document import OPTIONS, read, to_yaml
from pointsman.pipeline.flow import flow_of
from pointsman.pipeline.graph import CALL, Call, FromStep, Graph, HandleTo, Node, NodeKind, references
from pointsman.pipeline.options import NodeOptions

TAKEN = frozenset(
    {"admin", "docs", "health", "healthz", "metrics", "openapi", "pipelines", "ready", "readyz", "v1", INGRESS}
)
"""Paths of the gateway, which cannot be names of applications."""
MODEL_OPTIONS = frozenset({"deadline_share", "idempotent"})
"""The only options of a node that is a model in the manifest. The manifest sets all other options of such a node."""

_NAME_FORM = "letters, digits, _ and -, at most 40, a letter or digit first"
_CODE = re.compile(r"(?:[^:]+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_CALL_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_METHOD = re.compile(r"[A-Za-z]\w*|__call__")


def load_application(
    source: Path | str, folder: Path | str | None = None, file: str = "", *, was_in_force: bool = False
) -> ApplicationPlan:
    """Load an `Application` document. `folder`, `file` and `was_in_force` mean the same as in `load_manifest`."""
    folder = folder_of(source, folder)
    kinds = {"Application": ApplicationDocument}
    document, problems = document_of(source, kinds, folder, file, was_in_force=was_in_force)
    plan = None if document is INVALID else application_plan(document, problems, folder)
    problems.raise_if_any()
    assert plan is not None, "a document without problems has a plan"
    return plan


def application_plan(document: ApplicationDocument, problems: Problems, folder: Path) -> ApplicationPlan | None:
    """The plan for a document; None if the document has problems."""
    _check_name(document.name, problems)
    graph = _graph(document, problems)
    with importable(folder):  # for the user's own scheduling policies
        nodes = Nodes(document.name or "", graph, folder, problems)
        deployments = nodes.deployments()
    if len(problems):
        return None
    nodes.check_code()
    return ApplicationPlan(
        name=document.name,
        graph=graph,
        flow=flow_of(graph),
        deployments=tuple(deployments),
        user_configs=nodes.user_configs(),
        folder=str(folder),
        scaling=nodes.scaling.of_application,
        text=to_yaml(document.name, graph),
        warnings=problems.warnings,
    )


def missing_models(graph: Graph, models: Iterable[str]) -> list[str]:
    """One sentence for each node whose model is not in `models`."""
    known = set(models)
    return [
        f'node "{node.name}": there is no model "{node.code}"{did_you_mean(node.code, known)}'
        for node in graph.nodes
        if node.kind is NodeKind.MODEL and node.code not in known
    ]


def applications_status(plan: PointsmanPlan) -> list[dict[str, Any]]:
    """Applications, their nodes, and the deployments that run each node, as plain data."""
    models = {name: one.name for one in plan.deployments if not one.internal for name in one.names}
    return [{"name": one.name, "path": f"/{one.name}", "nodes": [*_nodes(one, models)]} for one in plan.applications]


def _nodes(plan: ApplicationPlan, models: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for node in plan.graph.nodes:
        if node.kind is NodeKind.MODEL:
            yield {"name": node.name, "kind": "model", "deployments": [models.get(node.code, node.code)]}
        else:
            names = [deployment_name(plan.name, node.name, rank) for rank in ranks(node)]
            yield {"name": node.name, "kind": node.kind.value, "deployments": names}
    if plan.graph.has_ingress:
        yield {"name": INGRESS, "kind": INGRESS, "deployments": [deployment_name(plan.name, INGRESS)]}


def _check_name(name: str, problems: Problems) -> None:
    if name is INVALID:
        return
    if not NAME.fullmatch(name):
        problems.add(("name",), f"expected {_NAME_FORM}, found {quoted(name)}")
    elif name in TAKEN:
        problems.add(("name",), f'"{name}" is taken: the gateway serves its own pages at /{name}; choose another')


def _graph(document: ApplicationDocument, problems: Problems) -> Graph:
    """The graph of a document, as far as it can be read."""
    nodes = _NodeReader(problems)
    made = nodes.nodes(document)
    calls = _CallReader(problems, nodes).calls(document)
    output = _template(document.output, ("output",), problems, of_node=False)
    if document.output is None:
        problems.add(("output",), "must not be empty: what is answered, such as {$step: ID}")
    _check_steps(output, ("output",), {call.id: 0 for call in calls}, calls, problems)
    ingress = IngressSpec() if document.ingress is INVALID else document.ingress
    for field in ("preprocessor", "schema"):
        _check_code(getattr(ingress, field), ("ingress", field), problems)
    return Graph(
        nodes=tuple(made),
        calls=tuple(calls),
        output=output,
        preprocessor=ingress.preprocessor,
        schema=ingress.schema,
        ingress=nodes.options(ingress, ("ingress",)),
        ingress_version=ingress.version,
        python_path=tuple(folder for _, folder in usable(document.python_path)),
        scaling=document.scaling or None,
    )


class _NodeReader:
    """Reads the nodes of a document, and checks references to them."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self.named: dict[str, Node] = {}
        self._incomplete = False
        """Whether a node could not be read. A name that seems unknown may then be the name of that node."""

    def nodes(self, document: ApplicationDocument) -> list[Node]:
        """All nodes, as far as they can be read."""
        names = Names("node", self._problems)
        made = []
        for index, spec in usable(document.nodes):
            names.take(spec.name, ("nodes", index))
            made.append((index, self._node(spec, ("nodes", index))))
        self.named = {node.name: node for _, node in reversed(made) if node.name}
        unnamed = not all(node.name for _, node in made)
        self._incomplete = document.nodes is INVALID or INVALID in document.nodes or unnamed
        if document.nodes == []:
            self._problems.add(("nodes",), "must not be empty: an application has at least one node")
        self._check_handles(made)
        return [node for _, node in made]

    def check_reference(self, name: str, path: FieldPath) -> None:
        """Report a reference to a node that does not exist."""
        if name is not INVALID and name not in self.named and (not self._incomplete or not name):
            self._problems.add(path, f'there is no node "{name}"{did_you_mean(name, self.named)}')

    def options(self, spec: NodeOptions, path: FieldPath) -> NodeOptions:
        given = {name: getattr(spec, name) for name in NodeOptions.__struct_fields__}
        if (spec.gpu_memory_bytes or spec.gpu_share) and spec.gpus == 0:
            field = "gpuMemory" if spec.gpu_memory_bytes else "gpuShare"
            self._problems.add((*path, field), "is given without gpus; add their number, such as gpus: 1")
        return NodeOptions(**{name: value for name, value in given.items() if value is not INVALID})

    def _node(self, spec: NodeSpec, path: FieldPath) -> Node:
        name = spec.name
        if name and not NAME.fullmatch(name):
            self._problems.add((*path, "name"), f"expected {_NAME_FORM}, found {quoted(name)}")
        elif name == INGRESS:
            self._problems.add((*path, "name"), f'"{INGRESS}" is the name of the ingress; choose another one')
        kind, code = self._kind_and_code(spec, path)
        if kind is NodeKind.MODEL:
            for option, written in OPTIONS.items():
                if option not in MODEL_OPTIONS and self._problems.written((*path, written)):
                    self._problems.add((*path, written), "belongs to the deployment in the manifest; set it there")
        if kind is not NodeKind.CLASS:
            for field in ("args", "kwargs", "joins"):
                if getattr(spec, field):
                    self._problems.add((*path, field), f"belongs to a class, and this node is a {kind.value}")
        if spec.shards and spec.shards > 1 and kind is NodeKind.FUNCTION:
            self._problems.add((*path, "shards"), "a function has no shards; write a class, which gets its rank")
        args = _template(spec.args or [], (*path, "args"), self._problems, of_node=True)
        kwargs = _template(spec.kwargs or {}, (*path, "kwargs"), self._problems, of_node=True)
        return Node(
            name=name,
            kind=kind,
            code=code,
            args=tuple(args or ()),
            kwargs=kwargs or {},
            options=self.options(spec, path),
            version=spec.version,
            joins=spec.joins,
        )

    def _kind_and_code(self, spec: NodeSpec, path: FieldPath) -> tuple[NodeKind, str]:
        fields = {NodeKind.CLASS: spec.class_, NodeKind.FUNCTION: spec.function, NodeKind.MODEL: spec.model}
        given = [(kind, code) for kind, code in fields.items() if code or self._problems.written((*path, kind.value))]
        if not given:
            self._problems.add(path, "this node has no code; give it a class, a function or a model")
            return NodeKind.CLASS, ""
        for kind, _ in given[1:]:
            self._problems.add((*path, kind.value), f"this node is a {given[0][0].value} already; keep one of them")
        kind, code = given[0]
        if code == "":
            self._problems.add((*path, kind.value), "must not be empty")
        elif kind is not NodeKind.MODEL:
            _check_code(code, (*path, kind.value), self._problems)
        return kind, code

    def _check_handles(self, nodes: Sequence[tuple[int, Node]]) -> None:
        """Check that all handles refer to existing nodes, and that handles form no cycles."""
        held = {node.name: _handles(node) for _, node in nodes if node.name}
        for index, node in nodes:
            for field in ("args", "kwargs"):
                for handle in _handles(node, field):
                    self.check_reference(handle, ("nodes", index, field))
            circle = _circle(node.name, held)
            if circle:
                self._problems.add(("nodes", index), f"these nodes hold handles to each other: {' -> '.join(circle)}")


class _CallReader:
    def __init__(self, problems: Problems, nodes: _NodeReader) -> None:
        self._problems = problems
        self._nodes = nodes

    def calls(self, document: ApplicationDocument) -> list[Call]:
        """All calls, as far as they can be read."""
        specs = list(usable(document.calls))
        if document.calls == []:
            self._problems.add((), "there are no calls; list calls of nodes, in order, under calls")
        indices: dict[str, int] = {}
        for index, spec in specs:
            self._check(spec, ("calls", index), indices)
            if spec.id:
                indices.setdefault(spec.id, index)
        calls = [self._call(spec, ("calls", index)) for index, spec in specs]
        for (index, _), call in zip(specs, calls, strict=True):
            earlier = {known: order for known, order in indices.items() if order < index}
            for field in ("args", "kwargs"):
                _check_steps(getattr(call, field), ("calls", index, field), earlier, calls, self._problems, indices)
        return calls

    def _check(self, spec: CallSpec, path: FieldPath, indices: Mapping[str, int]) -> None:
        if spec.id is not INVALID and not _CALL_ID.fullmatch(spec.id):
            self._problems.add((*path, "id"), f"expected letters, digits, _, - and dots, found {quoted(spec.id)}")
        elif spec.id in indices:
            line = self._problems.line_of(("calls", indices[spec.id], "id"))
            self._problems.add((*path, "id"), f'there is already a call "{spec.id}" on line {line}')
        self._nodes.check_reference(spec.node, (*path, "node"))
        node = self._nodes.named.get(spec.node or "")
        if spec.method is not INVALID and not _METHOD.fullmatch(spec.method):
            self._problems.add((*path, "method"), f"expected the name of a method, found {quoted(spec.method)}")
        elif node is not None and node.kind is NodeKind.FUNCTION and spec.method and spec.method != CALL:
            self._problems.add((*path, "method"), f'node "{spec.node}" is a function, and has no methods')

    def _call(self, spec: CallSpec, path: FieldPath) -> Call:
        args = _template(spec.args or [], (*path, "args"), self._problems, of_node=False)
        kwargs = _template(spec.kwargs or {}, (*path, "kwargs"), self._problems, of_node=False)
        return Call(id=spec.id, node=spec.node, method=spec.method, args=tuple(args or ()), kwargs=kwargs or {})


def _check_code(code: str, path: FieldPath, problems: Problems) -> None:
    if code and not _CODE.fullmatch(code):
        problems.add(path, f"expected path/to/file.py:Name or package.module:Name, found {quoted(code)}")


def _check_steps(
    template: Any,
    path: FieldPath,
    earlier: Mapping[str, int],
    calls: Sequence[Call],
    problems: Problems,
    indices: Mapping[str, int] | None = None,
) -> None:
    """Check that a template refers only to steps that come earlier."""
    for reference in references(template):
        if not isinstance(reference, FromStep) or reference.call in earlier:
            continue
        if indices is None or reference.call not in indices:
            known = [call.id for call in calls if call.id]
            problems.add(path, f'there is no call "{reference.call}"{did_you_mean(reference.call, known)}')
            continue
        circle = _circle(reference.call, {call.id: _steps(call) for call in calls if call.id})
        if circle:
            problems.add(path, f"these calls wait for each other: {' -> '.join(circle)}")
        else:
            line = problems.line_of(("calls", indices[reference.call], "id"))
            problems.add(path, f'call "{reference.call}" comes later, on line {line}; put it before this one')


def _template(data: Any, path: FieldPath, problems: Problems, *, of_node: bool) -> Any:
    """The data with its references. A node may refer to other nodes, a call to the input and to other calls."""
    template = read(data, lambda inside, message: problems.add((*path, *inside), message))
    for reference in references(template):
        if of_node and not isinstance(reference, HandleTo):
            problems.add(path, "the input and the results of calls come with each request; give them to calls")
        elif not of_node and isinstance(reference, HandleTo):
            problems.add(path, "a handle is given to a class, under args of its node")
    return template


def _handles(node: Node, *fields: str) -> list[str]:
    found = [one for field in fields or ("args", "kwargs") for one in references(getattr(node, field))]
    return [one.node for one in found if isinstance(one, HandleTo)]


def _steps(call: Call) -> list[str]:
    return [one.call for one in (*references(call.args), *references(call.kwargs)) if isinstance(one, FromStep)]


def _circle(start: str, edges: Mapping[str, Sequence[str]]) -> list[str]:
    """A path from a name back to itself; empty if there is none."""
    paths = [[start]]
    seen = set()
    while paths:
        path = paths.pop()
        for following in edges.get(path[-1], ()):
            if following == start:
                return [*path, start]
            if following not in seen:
                seen.add(following)
                paths.append([*path, following])
    return []
