"""Authoring: plain classes and functions become nodes, and their calls are bound to each other.

Enters: `@deployment` on a class or function, `bind`, `InputNode`. Leaves: objects that only record what was bound;
`build` reads them. The one rule: binding does not call the user's code.
"""

import dis
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import update_wrapper
from importlib import import_module
from types import FrameType
from typing import Any, Never, TypeAlias, overload

from pointsman.errors import PointsmanError
from pointsman.pipeline.context import loading_stops_here
from pointsman.pipeline.graph import CALL, Access
from pointsman.pipeline.options import NodeOptions


class BindError(PointsmanError, TypeError):
    """A use of the input or of a result that a graph cannot express."""


_STORES = frozenset({"STORE_NAME", "STORE_FAST", "STORE_GLOBAL", "STORE_DEREF"})


def assigned_name(callers: int = 1) -> str:
    """The variable that a result is assigned to, as in m1 = Model.bind(1); empty if the result is not assigned.

    `callers`: the number of frames from the caller up to the assignment.
    """
    frame: FrameType | None = sys._getframe(callers + 1)
    if frame is None:
        return ""
    following = next((one for one in dis.get_instructions(frame.f_code) if one.offset > frame.f_lasti), None)
    if following is None or following.opname not in _STORES:
        return ""
    name = str(following.argval)  # tools may have rewritten the source, such as pytest, which adds @py_assert1
    return name if name.isidentifier() and name.isascii() and not name.startswith("_") else ""


class Deployment:
    """A class or function that can be a node. Calling it calls the class or function."""

    __pointsman_deployment__ = True

    def __init__(self, body: Callable[..., Any], options: NodeOptions, name: str = "") -> None:
        update_wrapper(self, body, updated=())
        self.body = body
        self.name = name
        """The given name; empty if the name of the variable, or of the class or function, is used."""
        self.node_options = options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)

    @property
    def is_class(self) -> bool:
        return inspect.isclass(self.body)

    def options(self, *, name: str = "", **changes: Any) -> "Deployment":
        return Deployment(self.body, self.node_options.changed(changes), name or self.name)

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        """For a class, a node that has an instance of the class in each replica; for a function, a call of the
        function."""
        variable = assigned_name()
        if self.is_class:
            return ClassNode(self, args, kwargs, variable)
        return CallNode(self, CALL, args, kwargs, variable)

    def __repr__(self) -> str:
        return f"<deployment {self.name or self.body.__name__}>"


@overload
def deployment(body: Callable[..., Any], /) -> Deployment: ...
@overload
def deployment(*, name: str = "", **options: Any) -> Callable[[Callable[..., Any]], Deployment]: ...
def deployment(body: Callable[..., Any] | None = None, /, *, name: str = "", **options: Any) -> Any:
    """Make a class or function a deployment: `@deployment`, or `@deployment(num_replicas=2, name="m")`."""

    def decorate(body: Callable[..., Any]) -> Deployment:
        if not callable(body):
            raise PointsmanError(f"@deployment is for classes and functions, found {body!r}")
        return Deployment(body, NodeOptions().changed(options), name)

    return decorate if body is None else decorate(body)


class Executable:
    """Anything that can be the output of a graph."""

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph up to this node in this process. Objects of classes are created once, and kept."""
        loading_stops_here("execute")
        return import_module("pointsman.runtimes.inprocess.pipelines").execute(self, args, kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> Any:
        """The same answer piece by piece, for use with `for` or `async for`."""
        loading_stops_here("execute")
        return import_module("pointsman.runtimes.inprocess.pipelines").stream(self, args, kwargs)


class BoundMethod:
    """A method of a node, before it is bound."""

    def __init__(self, owner: "Owner", method: str) -> None:
        self._owner = owner
        self._method = method

    def bind(self, *args: Any, **kwargs: Any) -> "CallNode":
        """A call of the method, made once per request."""
        return CallNode(self._owner, self._method, args, kwargs, assigned_name())


class ClassNode(Executable):
    """An object of the user's class, in each replica. One bound object is one deployment."""

    def __init__(self, of: Deployment, args: tuple[Any, ...], kwargs: Mapping[str, Any], variable: str) -> None:
        self._of = of
        self._args = args
        self._kwargs = kwargs
        self._variable = variable

    def __getattr__(self, name: str) -> BoundMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        return BoundMethod(self, name)

    def bind(self, *args: Any, **kwargs: Any) -> "CallNode":
        """A call of the object itself: its `__call__`."""
        return CallNode(self, CALL, args, kwargs, assigned_name())


class ModelNode:
    """A model that a deployment of the manifest serves. Calls of the model are scheduled like any other request."""

    METHODS = ("chat", "complete", "embed")

    def __init__(self, model: str) -> None:
        self._model = model

    def __getattr__(self, name: str) -> BoundMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        return BoundMethod(self, name)


def model(name: str) -> ModelNode:
    """A node for a model of the manifest: `.chat`, `.complete` and `.embed` can be bound."""
    return ModelNode(name)


class ResultPart(Executable):
    """A part of a call's result: an item or attribute of the result, or of another part of the result."""

    def __init__(self, source: "CallNode", path: tuple[Access, ...]) -> None:
        self._source = source
        self._path = path

    def __getitem__(self, key: int | str) -> "ResultPart":
        return ResultPart(self._source, (*self._path, item(key, "a result")))

    def __getattr__(self, name: str) -> "ResultPart":
        if name.startswith("_"):
            raise AttributeError(name)
        return ResultPart(self._source, (*self._path, Access(name, attribute=True)))

    def __iter__(self) -> Never:
        raise not_iterable("a result")


class CallNode(Executable):
    """A call, made once per request. Every node that this object is bound to gets the call's result. A part can be
    bound in the same way: `result[0]`, `result["key"]`, `result.attribute`."""

    def __init__(
        self, owner: "Owner", method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], variable: str
    ) -> None:
        self._owner = owner
        self._method = method
        self._args = args
        self._kwargs = kwargs
        self._variable = variable

    def __getitem__(self, key: int | str) -> ResultPart:
        return ResultPart(self, (item(key, "a result"),))

    def __getattr__(self, name: str) -> ResultPart:
        if name.startswith("_"):
            raise AttributeError(name)
        return ResultPart(self, (Access(name, attribute=True),))

    def __iter__(self) -> Never:
        raise not_iterable("a result")


def item(key: Any, whose: str) -> Access:
    """The step to an item. Raises `BindError` unless the key is an index or a name: JSON has no other keys."""
    if type(key) is int or type(key) is str:
        return Access(key)
    raise BindError(f"{whose}[{key!r}]: an index or a text was expected; for anything else, write a function as a node")


def not_iterable(whose: str) -> BindError:
    return BindError(
        f"{whose} cannot be unpacked or iterated: how many items it has is known with each request; name them, as in "
        f"{whose}[0], {whose}[1], or pass it as a whole"
    )


class InputPart:
    """A part of a request's input: an item or attribute of the input, or of another part of the input."""

    def __init__(self, source: "InputNode", path: tuple[Access, ...]) -> None:
        self._source = source
        self._path = path

    def __getitem__(self, key: int | str) -> "InputPart":
        return InputPart(self._source, (*self._path, item(key, "the input")))

    def __iter__(self) -> Never:
        raise not_iterable("the input")

    def __getattr__(self, name: str) -> "InputPart":
        if name.startswith("_"):
            raise AttributeError(name)
        return InputPart(self._source, (*self._path, Access(name, attribute=True)))


class InputNode(InputPart):
    """The input of a request.

    `preprocessor` makes the input from an HTTP request; `schema` is the pydantic class that validates the input.
    Without a preprocessor, the input is made from the JSON of the request's body.
    """

    def __init__(self, *, preprocessor: Callable[..., Any] | None = None, schema: type[Any] | None = None) -> None:
        super().__init__(self, ())
        self._preprocessor = preprocessor
        self._schema = schema

    def __enter__(self) -> "InputNode":
        return self

    def __exit__(self, *_: object) -> None:
        return None


Owner: TypeAlias = Deployment | ClassNode | ModelNode
"""The target of a call: a function, an object, a model."""
