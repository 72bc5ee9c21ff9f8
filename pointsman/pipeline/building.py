"""From bound objects to a graph: one pass that finds all problems and does not call the user's code.

Enters: the bound output (a call, an object, or a list or mapping of them). Leaves: a `Graph` and the code of each node,
or `BuildError` with all problems at once.
"""

import hashlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pointsman.errors import ConfigError, did_you_mean
from pointsman.pipeline.graph import CALL, Call, FromInput, FromStep, Graph, HandleTo, Node, NodeKind, Template
from pointsman.pipeline.nodes import (
    BoundMethod,
    CallNode,
    ClassNode,
    Deployment,
    InputNode,
    InputPart,
    ModelNode,
    Owner,
    ResultPart,
)


class Code(NamedTuple):
    """Where a class or function can be loaded from."""

    name: str
    """module:Name or path/to/file.py:Name."""
    version: str
    """The version of the file with the code."""
    root: str = ""
    """The folder to import its module from; empty if the module is installed."""


class NotImportable(ValueError):
    """Code that another process cannot load; the message says why."""


def code_of(body: Any, folder: Path) -> Code:
    """Where a class or function can be loaded from; paths of files are relative to `folder`. Raises `NotImportable`."""
    name = getattr(body, "__qualname__", "")
    if not name or "<lambda>" in name:
        raise NotImportable("it has no name that another process could import; write a def or a class for it")
    if "<locals>" in name:
        raise NotImportable(f"{name.replace('.<locals>', '')} is defined inside a function; move it to module level")
    module = sys.modules.get(body.__module__)
    file = getattr(module, "__file__", None)
    if module is None or not file:
        raise NotImportable(f"it is defined in {body.__module__}, which is not a file; save it in one")
    path = Path(file).resolve()
    version = file_version(path)
    spec = getattr(module, "__spec__", None)
    module_name = spec.name if spec is not None else body.__module__
    if {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(Path(os.__file__).parent):
        return Code(f"{module_name}:{name}", version)
    if "." in module_name and (path.parent / "__init__.py").exists():
        root = path.parents[module_name.count(".") + (path.name == "__init__.py")]
        return Code(f"{module_name}:{name}", version, _relative(root, folder))
    return Code(f"{_relative(path, folder)}:{name}", version)


def file_version(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder.resolve())).as_posix()


INGRESS = "ingress"
"""The reserved name of the node that turns HTTP requests into the input."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
RESERVED = "$"
"""Keys of plain data must not begin with this sign, which marks references in YAML."""
MAX_INTEGER = 1 << 63


class BuildError(ConfigError):
    """All problems of a pipeline, one line each."""


class Bound(NamedTuple):
    """A graph, and the code of each node by the node's name."""

    graph: Graph
    owners: Mapping[str, Owner]
    input: InputNode | None = None
    """The value that stands for the input; None if the graph uses no input."""


def bound_graph(root: Any, folder: Path | None = None) -> Bound:
    """The graph with the output `root`. `folder`: the folder to which paths of code files are relative; other processes
    must be able to load these files. None if the graph runs only in this process. Raises `BuildError`."""
    return _Building(folder).build(root)


class _Building:
    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._problems: list[str] = []
        self._owners: dict[str, Owner] = {}
        self._naming = _Naming(self._wrong)
        self._names: dict[int, str] = {}
        """The name of each node, by the identity of its owner."""
        self._nodes: dict[str, Node] = {}
        self._calls: dict[str, Call] = {}
        self._ids: dict[int, str] = {}
        """The id of each call, by the identity of its call node."""
        self._open: list[int] = []
        """Calls and containers that the pass has entered and not yet left."""
        self._input: InputNode | None = None
        self._roots: dict[str, None] = {}

    def build(self, root: Any) -> Bound:
        if isinstance(root, ClassNode):  # its `__call__` gets the input, and calls other nodes through handles
            root = CallNode(root, CALL, (InputNode(),), {}, "")
        output = self._template(root, "the output", in_call=True)
        if not self._calls and not self._problems:
            self._problems.append("nothing is called: build what bind() returned, such as ensemble.bind(a, b)")
        preprocessor = schema = Code("", "")
        if self._input is not None:
            preprocessor = self._code(self._input._preprocessor, "the preprocessor of the input")
            schema = self._code(self._input._schema, "the schema of the input")
        if self._problems:
            raise BuildError(self._problems)
        graph = Graph(
            nodes=tuple(self._nodes.values()),
            calls=tuple(self._calls.values()),
            output=output,
            preprocessor=preprocessor.name,
            schema=schema.name,
            ingress_version=preprocessor.version or schema.version,
            python_path=tuple(self._roots),
        )
        return Bound(graph, self._owners, self._input)

    # Values

    def _template(self, value: Any, where: str, *, in_call: bool) -> Template:
        """A value with references in place of nodes. `in_call`: the value is for a call; else for a constructor."""
        if isinstance(value, CallNode):
            if not in_call:
                return self._wrong(f"{where} is the result of a call; only a call can take that: bind it to a method")
            return FromStep(self._call(value))
        if isinstance(value, ResultPart):
            if not in_call:
                return self._wrong(f"{where} is part of the result of a call; only a call can take that")
            return FromStep(self._call(value._source), value._path)
        if isinstance(value, InputPart):
            if not in_call:
                return self._wrong(f"{where} is the input, which comes with each request; bind it to a method")
            if self._input is None:
                self._input = value._source
            elif self._input is not value._source:
                self._wrong("there are two InputNodes; a request has one input: use one for all of the graph")
            return FromInput(value._path)
        if isinstance(value, ClassNode | ModelNode | Deployment):
            if in_call:
                return self._wrong(
                    f"{where} is a node, not a result; bind one of its methods, or hand the node to a class"
                )
            return HandleTo(self._node(value))
        if isinstance(value, BoundMethod):
            return self._wrong(f"{where} is a method that is not bound; add .bind(...)")
        return self._plain(value, where, in_call=in_call)

    def _arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], label: str, *, in_call: bool
    ) -> tuple[tuple[Template, ...], dict[str, Template]]:
        positional = tuple(
            self._template(value, f"{label}: argument {number}", in_call=in_call)
            for number, value in enumerate(args, start=1)
        )
        named = {
            name: self._template(value, f'{label}: argument "{name}"', in_call=in_call)
            for name, value in kwargs.items()
        }
        return positional, named

    def _plain(self, value: Any, where: str, *, in_call: bool) -> Template:
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return int(value) if abs(value) < MAX_INTEGER else self._wrong(f"{where} is {value}, more than 64 bits")
        if isinstance(value, float):
            return value if math.isfinite(value) else self._wrong(f"{where} is {value}, which JSON has no form for")
        if not isinstance(value, list | tuple | dict):
            advice = "make it inside a node" if in_call else "make it inside the class"
            return self._wrong(f"{where} is a {type(value).__name__}, which JSON has no form for; {advice}")
        if not self._enter(value, where):
            return None
        made: Template
        if isinstance(value, dict):
            for key in value:
                self._wrong(_wrong_key(key, where))
            named = [(key, one) for key, one in value.items() if isinstance(key, str)]
            made = {key: self._template(one, f"{where}[{key!r}]", in_call=in_call) for key, one in named}
        else:
            made = [self._template(one, f"{where}[{index}]", in_call=in_call) for index, one in enumerate(value)]
        self._open.pop()
        return made

    # Calls

    def _call(self, call: CallNode) -> str:
        if id(call) in self._ids:
            return self._ids[id(call)]
        node = self._node(call._owner)
        label = f"{node}.{call._method}" if call._method != CALL else node
        if not self._enter(call, label):
            return ""
        args, kwargs = self._arguments(call._args, call._kwargs, label, in_call=True)
        self._wrong(_wrong_call(call, label))
        self._open.pop()
        name = self._ids[id(call)] = _numbered(call._variable or label, self._calls)
        self._calls[name] = Call(id=name, node=node, method=call._method, args=args, kwargs=kwargs)
        return name

    # Nodes

    def _node(self, owner: Owner) -> str:
        if id(owner) in self._names:
            return self._names[id(owner)]
        name = self._names[id(owner)] = self._naming.name_of(owner, self._nodes)
        self._owners[name] = owner
        # A placeholder: the node keeps its position before the nodes that its handles name.
        self._nodes[name] = Node(name=name, kind=NodeKind.MODEL, code="")
        self._nodes[name] = self._made(owner, name)
        return name

    def _made(self, owner: Owner, name: str) -> Node:
        if isinstance(owner, ModelNode):
            return Node(name=name, kind=NodeKind.MODEL, code=owner._model)
        deployed = owner._of if isinstance(owner, ClassNode) else owner
        code = self._code(deployed.body, name)
        options = deployed.node_options
        if isinstance(owner, Deployment):
            if owner.is_class:
                self._wrong(f"{name} is a class; bind it: {owner.body.__name__}.bind(...)")
            return Node(name=name, kind=NodeKind.FUNCTION, code=code.name, version=code.version, options=options)
        args, kwargs = self._arguments(owner._args, owner._kwargs, name, in_call=False)
        self._wrong(_wrong_arguments(deployed.body, owner._args, owner._kwargs, name))
        joins = options.shards > 1 and callable(getattr(deployed.body, "join", None))
        return Node(
            name=name,
            kind=NodeKind.CLASS,
            code=code.name,
            version=code.version,
            args=args,
            kwargs=kwargs,
            options=options,
            joins=joins,
        )

    def _code(self, body: Any, whose: str) -> Code:
        if body is None or self._folder is None:
            return Code("", "")
        try:
            found = code_of(body, self._folder)
        except NotImportable as why:
            self._wrong(f"{whose} cannot be loaded by other processes: {why}")
            return Code("", "")
        if found.root and found.root != ".":
            self._roots[found.root] = None
        return found

    def _enter(self, value: object, where: str) -> bool:
        """Returns False if the pass is already inside this value."""
        if id(value) in self._open:
            self._wrong(f"{where} needs itself: the graph has a cycle there")
            return False
        self._open.append(id(value))
        return True

    def _wrong(self, problem: str) -> None:
        if problem and problem not in self._problems:
            self._problems.append(problem)


class _Naming:
    """Names of nodes: the given name, else that of the variable, else that of the class. If another node already has
    the name, a number is added."""

    def __init__(self, wrong: Callable[[str], None]) -> None:
        self._wrong = wrong
        self._given: dict[str, Deployment] = {}

    def name_of(self, owner: Owner, taken: Mapping[str, Node]) -> str:
        if isinstance(owner, ModelNode):
            return _numbered(_in_letters(owner._model), taken)
        deployed = owner._of if isinstance(owner, ClassNode) else owner
        if deployed.name:
            return self._given_name(deployed, taken)
        snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", deployed.body.__name__).lower()
        name = (owner._variable if isinstance(owner, ClassNode) else "") or snake_case
        return _numbered(_in_letters(name), {**taken, INGRESS: None})

    def _given_name(self, deployed: Deployment, taken: Mapping[str, Node]) -> str:
        """The name that a deployment asks for. Several nodes of one deployment are numbered."""
        name = deployed.name
        if not NAME.fullmatch(name):
            self._wrong(f'"{name}" is not a valid name for a node: letters, digits, _ and -, at most 40')
        elif name == INGRESS:
            self._wrong(f'"{INGRESS}" is the name of what takes requests from outside; call this node something else')
        elif name in taken and self._given.get(name) is not deployed:
            self._wrong(f'two nodes are called "{name}"; give one another name: .options(name="...")')
        self._given[name] = deployed
        return _numbered(name, taken)


def _wrong_key(key: object, where: str) -> str:
    """What is wrong with a key of plain data; empty if the key is valid."""
    if not isinstance(key, str):
        return f"{where} has the key {key!r}; keys must be text, as in JSON"
    return f"{where} has the key {key!r}; keys must not begin with {RESERVED}" if key.startswith(RESERVED) else ""


def _wrong_call(call: CallNode, label: str) -> str:
    """What is wrong with the method of a call, or with its arguments; empty if nothing is wrong."""
    owner = call._owner
    if isinstance(owner, ModelNode):
        if call._method in ModelNode.METHODS:
            return ""
        return f'model "{owner._model}" has no "{call._method}"{did_you_mean(call._method, ModelNode.METHODS)}'
    if isinstance(owner, Deployment):
        return _wrong_arguments(owner.body, call._args, call._kwargs, label)
    body = owner._of.body
    method = inspect.getattr_static(body, call._method, None)
    if method is None or not callable(getattr(body, call._method, None)):
        methods = [name for name, one in inspect.getmembers(body, callable) if not name.startswith("_")]
        missing = "it cannot be called: it has no __call__" if call._method == CALL else f'it has no "{call._method}"'
        return f"{label}: {missing}{did_you_mean(call._method, methods)}"
    args = call._args if isinstance(method, staticmethod | classmethod) else (None, *call._args)
    return _wrong_arguments(getattr(body, call._method), args, call._kwargs, label)


def _wrong_arguments(body: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], label: str) -> str:
    try:
        signature = inspect.signature(body)
    except (TypeError, ValueError):  # a function written in C may have no known signature
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return f"{label}: {error}; it takes {signature}"
    return ""


MAX_NODE_NAME = 40


def _numbered(name: str, taken: Mapping[str, Any]) -> str:
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name[: MAX_NODE_NAME - 5]}_{number}"
    return found


def _in_letters(name: str) -> str:
    """The name of a variable, a class or a model, as a valid name of a node."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:MAX_NODE_NAME] or "node"
