"""Graphs that were authored with Ray's own decorators, as Pointsman pipelines; and the names that Serve Pipeline had.

Enters: the results of `.bind()` on classes and functions with `@ray.remote`. Leaves: bound objects of Pointsman, and
applications that are built from them. The one rule: this module only reads Ray's graph, so Ray can still execute the
same graph.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.dag import ClassMethodNode, DAGNode, FunctionNode, InputAttributeNode, MultiOutputNode
from ray.dag import ClassNode as RayClassNode
from ray.dag import InputNode as RayInputNode

from pointsman.errors import PointsmanError, listed
from pointsman.integrations.ray_serve.applications import deploy_on_serve
from pointsman.pipeline.application import Application, build
from pointsman.pipeline.context import loading_stops_here
from pointsman.pipeline.graph import CALL
from pointsman.pipeline.nodes import CallNode, ClassNode, Deployment, InputNode, InputPart
from pointsman.pipeline.options import NodeOptions

OPTIONS: dict[str, str] = {
    "num_cpus": "cpus",
    "num_gpus": "gpus",
    "memory": "memory_bytes",
    "max_concurrency": "max_concurrency",
}
"""Options of `@ray.remote`, each with Pointsman's name for it."""


class ServeInputNode(RayInputNode):  # type: ignore[misc]
    """The input of a request, for a graph of Ray; `preprocessor` makes the input from an HTTP request."""

    def __init__(self, *args: Any, preprocessor: Callable[..., Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._preprocessor = preprocessor

    def __enter__(self) -> "ServeInputNode":
        loading_stops_here("ServeInputNode")  # a replica that loads this program needs only what is defined above
        super().__enter__()
        return self


def from_ray_dag(ray_dag: Any, *, names: Mapping[str, Any] | None = None) -> Any:
    """Pointsman's graph for a result of Ray's `.bind()`: `execute` it here, or `build` it.

    A node gets its name from the caller's variable that has the node. `names` replaces the caller's variables.
    """
    loading_stops_here("from_ray_dag")
    if not isinstance(ray_dag, DAGNode | list | tuple | dict):
        raise PointsmanError(f"expected what bind() of a @ray.remote class or function returned, found {ray_dag!r:.60}")
    return _RayGraphReader(_variables(sys._getframe(1)) if names is None else names).value(ray_dag)


def _variables(frame: FrameType) -> dict[str, Any]:
    return {**frame.f_globals, **frame.f_locals}


class _RayGraphReader:
    """One pass over a graph of Ray."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = {id(value): name for name, value in names.items() if isinstance(value, DAGNode)}
        self._made: dict[int, Any] = {}
        """Nodes by the identity of Ray's node."""
        self._deployments: dict[tuple[int, str], Deployment] = {}
        """Owners by the identity of a class or function and its options."""

    def value(self, given: Any) -> Any:
        if isinstance(given, DAGNode):
            if id(given) not in self._made:
                self._made[id(given)] = self._node(given)
            return self._made[id(given)]
        if isinstance(given, list | tuple):
            return [self.value(one) for one in given]
        if isinstance(given, dict):
            return {key: self.value(one) for key, one in given.items()}
        return given

    def _node(self, node: Any) -> Any:
        variable = self._names.get(id(node), "")
        if isinstance(node, RayInputNode):
            # Any attribute of Ray's own input node is a part of the input.
            return InputNode(preprocessor=node._preprocessor if isinstance(node, ServeInputNode) else None)
        if isinstance(node, InputAttributeNode):
            part: InputPart = self.value(node._dag_input_node)
            return part[node._key] if node._accessor_method == "__getitem__" else getattr(part, node._key)
        if isinstance(node, MultiOutputNode):
            return self.value(node.get_args()[0])
        args, kwargs = self.value(list(node.get_args())), self.value(node.get_kwargs())
        if isinstance(node, RayClassNode):
            return ClassNode(self._deployment(node), tuple(args), kwargs, variable)
        if isinstance(node, FunctionNode):
            return CallNode(self._deployment(node), CALL, tuple(args), kwargs, variable)
        if isinstance(node, ClassMethodNode) and node.is_class_method_call:
            owner = node._parent_class_node
            if not isinstance(owner, RayClassNode):
                raise PointsmanError(f"{node.get_method_name()} is bound to an actor that runs; bind its class instead")
            return CallNode(self.value(owner), node.get_method_name(), tuple(args), kwargs, variable)
        raise PointsmanError(f"a graph with a {type(node).__name__} cannot be read, only classes, functions and inputs")

    def _deployment(self, node: Any) -> Deployment:
        body = getattr(node._body, "__ray_actor_class__", node._body)
        given = {name: value for name, value in node.get_options().items() if value is not None}
        name = str(given.pop("name", ""))
        unknown = [option for option in given if option not in OPTIONS]
        if unknown:
            what = f"{body.__name__} has the options {listed(unknown)} of @ray.remote"
            raise PointsmanError(f"{what}, which have no counterpart; only {listed(OPTIONS)} and name have")
        changes = {OPTIONS[option]: value for option, value in given.items()}
        if isinstance(changes.get("gpus"), float) and changes["gpus"].is_integer():
            changes["gpus"] = int(changes["gpus"])
        options = NodeOptions().changed(changes)
        made = Deployment(body, options, name)
        return self._deployments.setdefault((id(body), f"{name} {sorted(given.items())}"), made)


# The names of Serve Pipeline


class ObjectRefHandle:
    """A handle to an application. Its answers are object refs: `ray.get(handle.remote(1, 2, 3))`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.url: str = handle.url

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the application; wait for its answer with `ray.get`."""
        return ray.put(self._handle.remote(*args, **kwargs).result())

    def close(self) -> None:
        """Stop everything that `deploy` started."""
        self._handle.close()


class RayApplication(Application):
    """An application that was built from a graph of Ray. It runs on Ray Serve unless another runtime is named."""

    def deploy(self, runtime: str = "ray-serve", **options: Any) -> ObjectRefHandle:
        """Run the application. Returns a handle whose answers are object refs."""
        loading_stops_here("deploy")
        if runtime == "ray-serve":
            return ObjectRefHandle(deploy_on_serve(self, **options))
        return ObjectRefHandle(super().deploy(runtime, **options))


class pipeline:  # noqa: N801 (a program imports it in place of a module)
    """`pipeline.build(ray_dag)`, with the name that it had in Serve Pipeline."""

    @staticmethod
    def build(ray_dag: Any, *, name: str = "", folder: Path | str | None = None) -> RayApplication:
        """An application from a graph of Ray. Its nodes are attributes with the names of the caller's variables."""
        bound = from_ray_dag(ray_dag, names=_variables(sys._getframe(1)))
        built = build(bound, name=name, folder=folder)
        return RayApplication(built.name, built.graph, built.folder)
