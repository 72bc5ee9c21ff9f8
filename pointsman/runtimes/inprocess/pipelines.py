"""Pipelines in this process: the same run of the same flow, with every call made here.

Enters: bound objects and an input. Leaves: the result. Objects of classes are created when they are first needed, and
kept with their nodes, so that a second `execute` finds them loaded. Without async code there is no event loop.
"""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from pointsman.errors import PointsmanError
from pointsman.pipeline import Flow, Node, NodeKind, Run, Step, flow_of
from pointsman.pipeline.building import Bound, bound_graph
from pointsman.pipeline.context import CURRENT, CallContext
from pointsman.pipeline.flow import InputValue, StepResult, input_value, part_of
from pointsman.pipeline.graph import CALL, HandleTo, filled
from pointsman.pipeline.nodes import ClassNode, Deployment, ModelNode
from pointsman.pipeline.options import batching_of, joined, parted


class InProcessMethods(Protocol):
    def method(self, node: str, method: str, rank: int | None = None) -> Callable[..., Any]: ...


class InProcessHandle:
    """A node, for code that calls it: `await handle.method(x)`, or `handle.method.remote(x).result()`."""

    def __init__(self, methods: InProcessMethods, node: Node) -> None:
        self._methods = methods
        self._node = node

    def __getattr__(self, name: str) -> "InProcessMethod":
        if name.startswith("_"):
            raise AttributeError(name)
        return InProcessMethod(self._methods, self._node, name)

    def __call__(self, *args: Any, **kwargs: Any) -> "InProcessResponse":
        return InProcessMethod(self._methods, self._node, CALL)(*args, **kwargs)

    def remote(self, *args: Any, **kwargs: Any) -> "InProcessResponse":
        return self(*args, **kwargs)


class InProcessMethod:
    def __init__(self, methods: InProcessMethods, node: Node, name: str) -> None:
        self._methods = methods
        self._node = node
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> "InProcessResponse":
        return InProcessResponse(lambda: self._called(args, kwargs))

    def remote(self, *args: Any, **kwargs: Any) -> "InProcessResponse":
        return self(*args, **kwargs)

    async def stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        result = self._methods.method(self._node.name, self._name)(*args, **kwargs)
        if hasattr(result, "__aiter__"):
            async for piece in result:
                yield piece
        else:
            for piece in result:
                yield piece

    async def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shards = self._node.options.shards
        if shards == 1:
            return await _result(self._methods.method(self._node.name, self._name)(*args, **kwargs))
        ranks = [self._methods.method(self._node.name, self._name, rank) for rank in range(shards)]
        parts = await asyncio.gather(*(_result(one(*args, **kwargs)) for one in ranks))
        if not self._node.joins:
            return list(parts)
        return await _result(self._methods.method(self._node.name, "join", 0)(list(parts)))


class InProcessResponse:
    """The result of a call, once awaited."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, None, Any]:
        return self._call().__await__()  # type: ignore[no-any-return]

    def result(self, timeout_s: float | None = None) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, self._call()).result(timeout_s)


async def _result(found: Any) -> Any:
    if inspect.isawaitable(found):
        return await found
    if hasattr(found, "__aiter__"):
        return [piece async for piece in found]
    return list(found) if inspect.isgenerator(found) else found


KEPT = "_pointsman_pipeline"
"""The attribute in which a node keeps its pipeline."""
OBJECTS = "_pointsman_objects"


def execute(root: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the graph with the output `root`."""
    kept = root.__dict__.get(KEPT)
    if kept is None:
        kept = root.__dict__[KEPT] = Pipeline(bound_graph(root))
    return kept.run(args, kwargs)


class Pipeline:
    """A flow, and the functions that its steps call."""

    def __init__(self, bound: Bound) -> None:
        self.flow: Flow = flow_of(bound.graph)
        objects = Objects(bound)
        self._calls = [
            _PreparedCall(self.flow, step, objects.method(step.node, step.method, step.rank))
            for step in self.flow.steps
        ]
        self._is_async = any(call.is_async for call in self._calls)
        self._paths = [part.path for part in self.flow.inputs]
        self._blank: list[Any] = [None] * len(self.flow.steps)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value = input_value(args, kwargs)
        values = [part_of(value, path) for path in self._paths] + self._blank
        if self._is_async:
            return _run_to_completion(self._run_async(values))
        run, calls, first = Run(self.flow, 0.0), self._calls, len(self._paths)
        ready = list(run.begin())
        while ready:
            index = ready.pop()
            values[first + index] = self._kept(index, calls[index](values))
            ready += run.finished(index, 0.0)
        return self._output(values)

    async def _run_async(self, values: list[Any]) -> Any:
        run, first = Run(self.flow, time.monotonic()), len(self._paths)
        in_flight: dict[asyncio.Task[Any], int] = {}

        def begin(indexes: Sequence[int]) -> None:
            for index in indexes:
                in_flight[asyncio.ensure_future(self._calls[index].result(values))] = index

        begin(run.begin())
        try:
            while in_flight:
                ended, _ = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    index = in_flight.pop(task)
                    result = await task
                    if hasattr(result, "__aiter__"):
                        result = [piece async for piece in result]
                    values[first + index] = self._kept(index, result)
                    begin(run.finished(index, time.monotonic()))
        finally:
            for task in in_flight:  # one has failed: cancel the others
                task.cancel()
        return self._output(values)

    def _kept(self, index: int, result: Any) -> Any:
        """The response may stream; a step that follows gets the whole result."""
        if isinstance(result, Iterator) and inspect.isgenerator(result) and index != self.flow.streams:
            return list(result)
        return result

    def _output(self, values: list[Any]) -> Any:
        if self.flow.streams is not None:
            return values[len(self._paths) + self.flow.streams]
        return filled(self.flow.output, lambda part: values[_slot(self.flow, part)])


class _PreparedCall:
    """The function of a step, and where its arguments are among the values of a run."""

    __slots__ = ("_args", "_flow", "_function", "_kwargs", "_slots", "is_async")

    def __init__(self, flow: Flow, step: Step, function: Callable[..., Any]) -> None:
        self._flow = flow
        self._function = function
        self._args, self._kwargs = step.args, step.kwargs
        simple = not step.kwargs and all(isinstance(arg, InputValue | StepResult) for arg in step.args)
        self._slots = [_slot(flow, arg) for arg in step.args] if simple else None
        inner = inspect.unwrap(function)
        self.is_async = inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)

    def __call__(self, values: list[Any]) -> Any:
        if self._slots is not None:
            return self._function(*[values[slot] for slot in self._slots])

        def fill(part: Any) -> Any:
            return values[_slot(self._flow, part)]

        return self._function(*filled(self._args, fill), **filled(self._kwargs, fill))

    async def result(self, values: list[Any]) -> Any:
        found = self(values)
        return await found if inspect.isawaitable(found) else found


def _slot(flow: Flow, part: Any) -> int:
    """Where a value is: the parts of the input first, then the results of steps."""
    return int(part.index) if isinstance(part, InputValue) else len(flow.inputs) + int(part.index)


class Objects:
    """The code behind the nodes of a graph: functions, and objects that are created when they are first needed."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound

    def method(self, node: str, method: str, rank: int | None = None) -> Callable[..., Any]:
        """A method of a node, or the function itself."""
        owner = self._bound.owners[node]
        if isinstance(owner, ModelNode):
            raise PointsmanError(f'model "{owner._model}" runs behind a gateway: deploy the pipeline to use it')
        if isinstance(owner, Deployment):
            return _one_by_one(owner.body, node)
        found = getattr(self._object(owner, node, rank), "__call__" if method == CALL else method)
        wrapped = _one_by_one(found, f"{node}.{method}")
        return wrapped if rank is None else _of_shard(wrapped, self._context(node, rank))

    def _object(self, owner: ClassNode, node: str, rank: int | None) -> Any:
        made = owner.__dict__.setdefault(OBJECTS, {})
        if rank not in made:
            known = self._bound.graph.node(node)
            args, kwargs = filled(known.args, self._handle), filled(known.kwargs, self._handle)
            token = CURRENT.set(self._context(node, rank))
            try:
                made[rank] = owner._of.body(*args, **kwargs)
            finally:
                CURRENT.reset(token)
            config = known.options.user_config
            if config is not None and hasattr(made[rank], "reconfigure"):
                made[rank].reconfigure(config)
        return made[rank]

    def _context(self, node: str, rank: int | None) -> CallContext:
        return CallContext(node=node, rank=rank, shards=self._bound.graph.node(node).options.shards)

    def _handle(self, to: HandleTo) -> InProcessHandle:
        node = self._bound.graph.node(to.node)
        if node.kind is NodeKind.MODEL:
            raise PointsmanError(f'model "{node.code}" runs behind a gateway: deploy the pipeline to use it')
        return InProcessHandle(self, node)


def _of_shard(function: Callable[..., Any], context: CallContext) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        token = CURRENT.set(context)
        try:
            return function(*args, **kwargs)
        finally:
            CURRENT.reset(token)

    call.__wrapped__ = function  # type: ignore[attr-defined]
    return call


def _one_by_one(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that takes batches is called with batches of one."""
    if batching_of(function) is None:
        return function
    if inspect.iscoroutinefunction(function):

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            many_args, many_kwargs = joined([(args, kwargs)])
            return parted(await function(*many_args, **many_kwargs), 1, name)[0]

        return call_async

    def call(*args: Any, **kwargs: Any) -> Any:
        many_args, many_kwargs = joined([(args, kwargs)])
        return parted(function(*many_args, **many_kwargs), 1, name)[0]

    return call


def _run_to_completion(coroutine: Any) -> Any:
    """Run it to completion, even inside a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
