"""Pipelines in this process. A flow runs as it does elsewhere, but its replicas are objects of this process.

Enters: bound objects and an input. Leaves: the result. Objects of classes are created when their graph is first
executed. They stay with their nodes, so that a second `execute` finds them loaded.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import RLock
from typing import Any, NamedTuple

from pointsman.errors import PointsmanError, UnknownName
from pointsman.pipeline import Flow, Graph, NodeKind, Run, Step, flow_of
from pointsman.pipeline.building import INGRESS, Bound, bound_graph
from pointsman.pipeline.context import CallContext, current
from pointsman.pipeline.flow import BadInput, InputValue, StepResult, call_flow, input_value, part_of, result_part
from pointsman.pipeline.graph import Access, HandleTo, Node, filled
from pointsman.pipeline.nodes import ClassNode, Deployment, InputNode, ModelNode
from pointsman.pipeline.options import NodeOptions
from pointsman.replica.calls import CallRefused
from pointsman.replica.handles import Handle, HandleLink, Response, Stream
from pointsman.replica.ingress import GivenInput, IngressInput
from pointsman.replica.methods import Method, MethodKind
from pointsman.runtimes.inprocess.environment import environment_of
from pointsman.runtimes.inprocess.replicas import NOT_HERE, InProcessReplica, NodeCode
from pointsman.runtimes.inprocess.values import packed, unpacked
from pointsman.wire import CallFailed, RefusedInput

KEPT = "_pointsman_pipeline"
"""The attribute in which a node stores its pipeline."""
REPLICAS = "_pointsman_replicas"
"""The attribute in which an owner stores its replicas, by rank."""


def execute(root: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the graph with the output `root`."""
    return _pipeline_of(root).run(args, kwargs)


def stream(root: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Stream:
    """Run the graph, and return its answer piece by piece."""
    return _pipeline_of(root).stream(args, kwargs)


def _pipeline_of(root: Any) -> "Pipeline":
    kept: Pipeline | None = root.__dict__.get(KEPT)
    if kept is None:
        kept = root.__dict__[KEPT] = Pipeline(bound_graph(root))
    return kept


class LocalNodes:
    """The replicas of a graph."""

    def __init__(self, bound: Bound) -> None:
        self.graph: Graph = bound.graph
        self._owners = bound.owners
        self._making = RLock()

    def load(self) -> None:
        """Create all objects. Raises what their code raises."""
        for node in self.graph.nodes:
            for rank in ranks_of(node) if node.kind is not NodeKind.MODEL else ():
                self.replica(node.name, rank).object.methods()

    def replica(self, name: str, rank: int | None) -> InProcessReplica:
        owner = self._owners[name]
        if isinstance(owner, ModelNode):
            raise PointsmanError(f'model "{owner._model}" runs behind a gateway: deploy the pipeline to use it')
        with self._making:
            replicas: dict[int | None, InProcessReplica] = owner.__dict__.setdefault(REPLICAS, {})
            if rank not in replicas:
                replicas[rank] = self._made(owner, self.graph.node(name), rank)
            return replicas[rank]

    def _made(self, owner: Deployment | ClassNode, node: Node, rank: int | None) -> InProcessReplica:
        context = CallContext(
            node=node.name, rank=rank, shards=node.options.shards, env=environment_of(node.options.env)
        )
        if isinstance(owner, Deployment):
            return InProcessReplica(NodeCode(owner.body, node.options, context))

        def arguments() -> tuple[Sequence[Any], Mapping[str, Any]]:
            link = InProcessLink(self, lambda: replica)
            return _with_handles(node.args, link), _with_handles(node.kwargs, link)

        replica = InProcessReplica(NodeCode(owner._of.body, node.options, context, arguments))
        return replica

    def handle(self, to: HandleTo, link: HandleLink) -> Handle:
        node = self.graph.node(to.node)
        if node.kind is NodeKind.MODEL:
            raise PointsmanError(f'model "{node.code}" runs behind a gateway: deploy the pipeline to use it')
        return Handle(link, node.name)


def ranks_of(node: Node) -> Iterable[int | None]:
    return [None] if node.options.shards == 1 else range(node.options.shards)


def _with_handles(template: Any, link: "InProcessLink") -> Any:
    return filled(template, lambda to: link.nodes.handle(to, link))


class InProcessLink:
    """`HandleLink` between nodes in this process."""

    def __init__(self, nodes: LocalNodes, caller: Callable[[], InProcessReplica]) -> None:
        self.nodes = nodes
        self._caller = caller
        """The replica whose code holds the handle."""

    def call(self, node: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Response:
        given = packed(args), packed(kwargs)
        run = SentRun(LocalFlow.of_call(self.nodes, node, method), [], given)
        return Response(run.begun(), self._caller().object.loop_if_any, on_loop=False)

    def stream(self, node: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Stream:
        given, replica = (packed(args), packed(kwargs)), self.nodes.replica(node, None)
        context = context_of_call(replica, node)

        async def pieces() -> AsyncIterator[Any]:
            found = _found(replica, node, method)
            async for piece in replica.pieces(found, unpacked(given[0]), unpacked(given[1]), context):
                yield piece

        return Stream(pieces(), replica.object.loop, self._caller().object.loop_if_any)


def context_of_call(replica: InProcessReplica, step: str) -> CallContext:
    """The context of a call that the current call makes through a handle."""
    caller = current()
    return replica.context(f"{caller.request_id}.{caller.step}", step, caller)


def _found(replica: InProcessReplica, node: str, method: str) -> Method:
    try:
        return replica.method(method)
    except UnknownName as error:
        raise CallFailed(str(error), status=404, kind="UnknownMethod", node=node) from None


class LocalStep(NamedTuple):
    """A step, and the replicas that run it."""

    step: Step
    replica: InProcessReplica
    method: Method
    slots: tuple[int, ...] | None
    """The positions of the arguments among the values of a run, if every argument is such a value."""
    is_plain: bool
    """Whether calls may run in the caller's thread, if the caller only waits for them or if they are quick."""


class LocalFlow(NamedTuple):
    flow: Flow
    steps: tuple[LocalStep, ...]
    nodes: LocalNodes

    @classmethod
    def of(cls, flow: Flow, nodes: LocalNodes) -> "LocalFlow":
        return cls(flow, tuple(_prepared(flow, step, nodes) for step in flow.steps), nodes)

    @classmethod
    def of_call(cls, nodes: LocalNodes, node: str, method: str) -> "LocalFlow":
        return cls.of(call_flow(nodes.graph, node, method), nodes)


def _prepared(flow: Flow, step: Step, nodes: LocalNodes) -> LocalStep:
    replica = nodes.replica(step.node, step.rank)
    simple = not step.kwargs and all(isinstance(arg, InputValue | StepResult) and not _path(arg) for arg in step.args)
    slots = tuple(_slot(flow, arg) for arg in step.args) if simple else None
    method = _found(replica, step.node, step.method)
    is_plain = method.kind is MethodKind.PLAIN and method.batching is None
    return LocalStep(step, replica, method, slots, is_plain)


def _path(part: Any) -> tuple[Access, ...]:
    return part.path if isinstance(part, StepResult) else ()


def _slot(flow: Flow, part: Any) -> int:
    """The position of a value: the parts of the input come first, then the results of steps."""
    return int(part.index) if isinstance(part, InputValue) else len(flow.inputs) + int(part.index)


_numbers = itertools.count(1)
PENDING = object()
"""A placeholder for a result that is not known yet."""


class GraphRun:
    """One request through a flow. Each step begins as soon as its arguments are known; several may run at once."""

    def __init__(
        self,
        prepared: LocalFlow,
        inputs: Sequence[Any],
        given: tuple[Any, Any] | None = None,
        last: int | None = None,
    ) -> None:
        """`inputs` are packed. `given` are the packed arguments of a call through a handle, for the steps that wait for
        no other step. `last` is a step that is not run."""
        self._prepared = prepared
        self._flow = prepared.flow
        self._given = given
        self._last = last
        self._values: list[Any] = [*inputs, *[None] * len(self._flow.steps)]
        self._run: Run
        """Created when it is first needed. If all steps are quick, it is never created."""
        self._lock: RLock
        self._done: Future[Any]
        """The result of the run, unless `result` returns it."""
        self._in_flight: dict[int, Future[Any]] = {}
        self._caller = current()
        self._id = f"run-{next(_numbers)}" if given is None else f"{self._caller.request_id}.{self._caller.step}"

    def _suits_caller(self, index: int, *, only_quick: bool) -> bool:
        step = self._prepared.steps[index]
        return step.is_plain and (not only_quick or step.method.pace.is_quick)

    def _make(self, index: int, ended: Callable[[int, "Future[Any]"], None], *, here: bool) -> Any:
        """The packed result of a step that runs in this thread. For other steps `PENDING`; `ended` gets the result."""
        step = self._prepared.steps[index]
        args, kwargs = self._arguments(step)
        context = self.context(step)
        result = step.replica.here(step.method, args, kwargs, context) if here else NOT_HERE
        if result is NOT_HERE:
            result = step.replica.begin(step.method, args, kwargs, context)
        elif not isinstance(result, Future):
            return packed(result)
        self._in_flight[index] = result
        result.add_done_callback(lambda result: ended(index, result))
        return PENDING

    def _finished(self, index: int, result: Any) -> Sequence[int]:
        self._values[len(self._flow.inputs) + index] = result
        return self._run.finished(index, 0.0)

    def context(self, step: LocalStep) -> CallContext:
        return step.replica.context(self._id, step.step.id, self._caller)

    def _arguments(self, step: LocalStep) -> tuple[Sequence[Any], Mapping[str, Any]]:
        values = self._values
        if self._given is not None and not step.step.needs:
            return unpacked(self._given[0]), unpacked(self._given[1])
        if step.slots is not None:
            return [unpacked(values[slot]) for slot in step.slots], {}
        return filled(step.step.args, self._value(step)), filled(step.step.kwargs, self._value(step))

    def _value(self, step: LocalStep) -> Callable[[Any], Any]:
        def value(part: Any) -> Any:
            if isinstance(part, HandleTo):
                nodes = self._prepared.nodes
                return nodes.handle(part, InProcessLink(nodes, lambda: step.replica))
            return self._part(part)

        return value

    def _cancel(self) -> None:
        for future in list(self._in_flight.values()):
            future.cancel()
        self._in_flight.clear()

    def _output(self) -> Any:
        return filled(self._flow.output, self._part)

    def _part(self, part: Any) -> Any:
        """A copy of a value of the run, for one receiver."""
        return result_part(unpacked(self._values[_slot(self._flow, part)]), _path(part))


class WaitedRun(GraphRun):
    """A run whose caller's thread waits for the result, and runs steps meanwhile."""

    def result(self) -> Any:
        """Run it, with steps in this thread."""
        quick = self._made_quickly()
        if quick == len(self._flow.steps):
            return self._output()
        self._run = Run(self._flow, 0.0)
        ended: SimpleQueue[tuple[int, Future[Any]]] = SimpleQueue()
        ready = deque(self._run.begin())
        for index in range(quick):
            ready.remove(index)
            ready += self._run.finished(index, 0.0)

        def note(index: int, future: "Future[Any]") -> None:
            ended.put((index, future))

        try:
            while ready or self._in_flight:
                for index in list(ready):  # slow steps run in other threads, unless this thread would only wait
                    alone = len(ready) == 1 and not self._in_flight
                    if not self._suits_caller(index, only_quick=not alone):
                        ready.remove(index)
                        self._make(index, note, here=False)
                if ready:
                    index = ready.popleft()
                    result = self._make(index, note, here=True)
                    if result is not PENDING:
                        ready += self._finished(index, result)
                else:
                    index, future = ended.get()
                    del self._in_flight[index]
                    ready += self._finished(index, future.result())
        finally:
            self._cancel()
        return self._output()

    def _made_quickly(self) -> int:
        """Run steps in this thread, in their order, as long as they are known to be quick. Returns their number."""
        first = len(self._flow.inputs)
        for index, step in enumerate(self._prepared.steps):
            if not step.is_plain or not step.method.pace.is_quick:
                return index
            args, kwargs = self._arguments(step)
            result = step.replica.here(step.method, args, kwargs, self.context(step))
            if result is NOT_HERE:
                return index
            self._values[first + index] = packed(result.result() if isinstance(result, Future) else result)
        return len(self._prepared.steps)


class SentRun(GraphRun):
    """A run that no thread waits for: each step that ends begins the next ones."""

    def begun(self) -> "Future[Any]":
        """Begin the run. Returns its result, or with a last step the arguments of that step."""
        self._run, self._lock, self._done = Run(self._flow, 0.0), RLock(), Future()
        self._done.add_done_callback(lambda done: self._cancel() if done.cancelled() else None)
        try:
            with self._lock:
                self._begin(self._run.begin())
        except Exception as error:
            self._fail(error)
        return self._done

    def _begin(self, ready: Sequence[int]) -> None:
        for index in ready:
            if index == self._last:
                self._done.set_result(self._arguments(self._prepared.steps[index]))
                return
            result = self._make(index, self._step_ended, here=self._suits_caller(index, only_quick=True))
            if result is not PENDING:
                self._begin(self._finished(index, result))
        if self._run.over and not self._done.done():
            self._done.set_result(self._output())

    def _step_ended(self, index: int, result: "Future[Any]") -> None:
        try:
            with self._lock:
                if self._in_flight.pop(index, None) is not None and not self._done.done():
                    self._begin(self._finished(index, result.result()))
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._cancel()
            if not self._done.done():
                self._done.set_exception(error)


class Pipeline:
    """A graph, ready to run."""

    def __init__(self, bound: Bound) -> None:
        self._nodes = LocalNodes(bound)
        self._flow = flow_of(bound.graph)
        self._nodes.load()
        self._prepared = LocalFlow.of(self._flow, self._nodes)
        self._paths = [part.path for part in self._flow.inputs]
        self._ingress = None if bound.input is None else ingress_of(bound.input)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return WaitedRun(self._prepared, self._inputs(args, kwargs)).result()

    def stream(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Stream:
        """The results of its last step, piece by piece; the steps before it run first."""
        inputs, last = self._inputs(args, kwargs), self._flow.streams
        if last is None:
            raise PointsmanError("only the result of one call can come in pieces, and this graph has several outputs")
        step = self._prepared.steps[last]

        async def pieces() -> AsyncIterator[Any]:
            run = SentRun(self._prepared, inputs, last=last)
            args, kwargs = await asyncio.wrap_future(run.begun())
            async for piece in step.replica.pieces(step.method, args, kwargs, run.context(step)):
                yield piece

        return Stream(pieces(), step.replica.object.loop)

    def _inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        try:
            value = input_value(args, kwargs)
            if self._ingress is not None:
                value = self._validated(self._ingress, value)
            return [packed(part_of(value, path)) for path in self._paths]
        except RefusedInput:
            raise
        except BadInput as error:
            raise RefusedInput.of([{"loc": ["body"], "msg": str(error)}]) from None

    def _validated(self, ingress: InProcessReplica, value: Any) -> Any:
        try:
            given = GivenInput(value)
            return unpacked(ingress.begin(ingress.method("of"), [given], {}, CallContext(node=INGRESS)).result())
        except CallRefused as error:
            raise RefusedInput.of(error.detail, error.status) from error


def ingress_of(given: InputNode) -> InProcessReplica | None:
    """The function that makes the input from a request; None if the input is used unchanged."""
    if given._preprocessor is None and given._schema is None:
        return None
    made = IngressInput(given._preprocessor, given._schema)
    return InProcessReplica(NodeCode(lambda: made, NodeOptions(), CallContext(node=INGRESS), lambda: ((), {})))
