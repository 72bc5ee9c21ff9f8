"""A graph ready to run: steps by index, their dependencies, and one step per shard."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pointsman.errors import PointsmanError, listed
from pointsman.pipeline.graph import CALL, Access, Call, FromInput, FromStep, Graph, NodeKind, Template, filled

# The input of a request: one value, and the parts of it that steps use.


class BadInput(PointsmanError):
    """The input lacks a part that the graph uses."""


def input_value(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The input that arguments stand for: a single argument is the input itself, several arguments are a list, and
    named arguments are a dict."""
    if args and kwargs:
        raise BadInput(
            "the input is given by position or by name, not both: "
            f"found {len(args)} arguments by position and {listed(kwargs)} by name"
        )
    if kwargs:
        return dict(kwargs)
    return args[0] if len(args) == 1 else list(args)


def part_of(value: Any, path: Iterable[Access]) -> Any:
    """A part of the input. If it is missing, raises `BadInput`, which names the part and what was found instead."""
    part = "input"
    for access in path:
        owner, part = part, part + (f".{access.key}" if access.attribute else f"[{access.key!r}]")
        value = _attribute(value, access, owner, part) if access.attribute else _item(value, access, owner, part)
    return value


def _attribute(value: Any, access: Access, owner: str, part: str) -> Any:
    name = str(access.key)
    if isinstance(value, Mapping):
        if name in value:
            return value[name]
        raise BadInput(f"{part}: the {owner} has {_keys(value)}")
    try:
        return getattr(value, name)
    except AttributeError:
        raise BadInput(f"{part}: the {owner} is a {type(value).__name__} without that attribute") from None


def _item(value: Any, access: Access, owner: str, part: str) -> Any:
    key = access.key
    if isinstance(value, list | tuple):
        if not isinstance(key, int):
            raise BadInput(f"{part}: the {owner} is a list of {_items(value)}, which has no names")
        if not -len(value) <= key < len(value):
            raise BadInput(f"{part}: the {owner} has {_items(value)}")
        return value[key]
    if key == 0 and not (isinstance(value, Mapping) and 0 in value):
        return value
    if isinstance(value, Mapping):
        if key in value:
            return value[key]
        raise BadInput(f"{part}: the {owner} has {_keys(value)}")
    if isinstance(key, str) and not hasattr(value, "__getitem__"):
        return _attribute(value, access, owner, part)
    if isinstance(key, str) and not isinstance(value, str | bytes):
        try:
            return value[key]
        except (LookupError, TypeError):
            raise BadInput(f"{part}: the {owner} is a {type(value).__name__} without that item") from None
    raise BadInput(f"{part}: the {owner} is one {type(value).__name__}")


def _items(value: Sequence[Any]) -> str:
    return "1 item" if len(value) == 1 else f"{len(value)} items"


def _keys(value: Mapping[Any, Any]) -> str:
    return f"only {listed(value, repr)}" if value else "nothing in it"


class NoSuchPart(PointsmanError, LookupError):
    """A result lacks a part that the graph uses."""


def result_part(value: Any, path: Iterable[Access]) -> Any:
    """A part of a result, looked up as Python does; an attribute of a mapping is the key of that name. Raises
    `NoSuchPart`."""
    part = "the result"
    for access in path:
        part += f".{access.key}" if access.attribute else f"[{access.key!r}]"
        try:
            if not access.attribute or (isinstance(value, Mapping) and not hasattr(value, str(access.key))):
                value = value[access.key]
            else:
                value = getattr(value, str(access.key))
        except (LookupError, TypeError, AttributeError) as error:
            raise NoSuchPart(f"{part}: a {type(value).__name__} has no such part ({error})") from None
    return value


class InputValue(msgspec.Struct, frozen=True):
    """A part of the input that the flow uses, by index."""

    index: int


class StepResult(msgspec.Struct, frozen=True):
    """The result of a step, by index."""

    index: int
    path: tuple[Access, ...] = ()
    """The path to the wanted part of the result; empty for the whole result."""

    def of(self, value: Any) -> Any:
        """The part of the result. Raises `NoSuchPart`."""
        return result_part(value, self.path)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One call to one replica."""

    id: str
    node: str
    rank: int | None = None
    """The rank of the shard; None if the node has no shards."""
    kind: NodeKind
    method: str
    args: tuple[Template, ...] = ()
    """The arguments; `InputValue`, `StepResult` and `HandleTo` stand for values that are not known yet."""
    kwargs: Mapping[str, Template] = {}
    needs: tuple[int, ...] = ()
    """Steps that this step waits for."""
    feeds: tuple[int, ...] = ()
    """Steps that wait for this step."""
    deadline_share: float | None = None
    idempotent: bool = False


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a run."""

    steps: tuple[Step, ...]
    inputs: tuple[FromInput, ...]
    """The parts of the input that the steps and the output use, each part once."""
    output: Template
    streams: int | None = None
    """The step whose whole result is the response; None if there is no such step. If the step streams, so does the
    response."""


def flow_of(graph: Graph) -> Flow:
    """The flow of a graph. The graph must have been checked."""
    return _Flattening(graph).flow()


def call_flow(graph: Graph, node: str, method: str) -> Flow:
    """The flow of one call through a handle. It lacks the arguments, which the caller keeps."""
    call = Call(id=method if method != CALL else node, node=node, method=method)
    return flow_of(msgspec.structs.replace(graph, calls=(call,), output=FromStep(call.id)))


class _Flattening:
    """Numbers calls and parts of the input in order."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._steps: list[Step] = []
        self._results: dict[str, Template] = {}
        """The result of each call, as a template of step results."""
        self._inputs: dict[FromInput, InputValue] = {}

    def flow(self) -> Flow:
        for call in self._graph.calls:
            self._results[call.id] = self._call(call)
        output = self._numbered(self._graph.output)
        feeds: list[list[int]] = [[] for _ in self._steps]
        for index, step in enumerate(self._steps):
            for before in step.needs:
                feeds[before].append(index)
        steps = (msgspec.structs.replace(step, feeds=tuple(fed)) for step, fed in zip(self._steps, feeds, strict=True))
        streams = output.index if isinstance(output, StepResult) and not output.path else None
        return Flow(steps=tuple(steps), inputs=tuple(self._inputs), output=output, streams=streams)

    def _call(self, call: Call) -> Template:
        node = self._graph.node(call.node)
        args, kwargs = tuple(map(self._numbered, call.args)), self._numbered(call.kwargs)
        if node.options.shards == 1:
            return self._step(call, call.id, None, args, kwargs)
        parts = [self._step(call, f"{call.id}.{rank}", rank, args, kwargs) for rank in range(node.options.shards)]
        if not node.joins:
            return parts
        return self._step(msgspec.structs.replace(call, method="join"), f"{call.id}.join", 0, (parts,), {})

    def _step(
        self, call: Call, name: str, rank: int | None, args: tuple[Template, ...], kwargs: Mapping[str, Template]
    ) -> StepResult:
        node = self._graph.node(call.node)
        step = Step(
            id=name,
            node=call.node,
            rank=rank,
            kind=node.kind,
            method=call.method,
            args=args,
            kwargs=kwargs,
            needs=_needs([*args, kwargs]),
            deadline_share=node.options.deadline_share,
            idempotent=node.options.idempotent,
        )
        self._steps.append(step)
        return StepResult(len(self._steps) - 1)

    def _numbered(self, template: Template) -> Any:
        def number(reference: Any) -> Template:
            if isinstance(reference, FromInput):
                return self._inputs.setdefault(reference, InputValue(len(self._inputs)))
            return _part(self._results[reference.call], reference) if isinstance(reference, FromStep) else reference

        return filled(template, number)


def _part(result: Template, wanted: FromStep) -> Template:
    """A part of the result of a call. `result`: one step, or the list of the steps of all shards."""
    if isinstance(result, StepResult) or not wanted.path:
        return StepResult(result.index, wanted.path) if wanted.path else result
    first, *rest = wanted.path
    if type(first.key) is not int or not -len(result) <= first.key < len(result):
        raise PointsmanError(f"{wanted.call}[{first.key!r}]: its result is a list with an item for each of its shards")
    return StepResult(result[first.key].index, tuple(rest))


def _needs(templates: list[Template]) -> tuple[int, ...]:
    found: dict[int, None] = {}

    def note(reference: Any) -> None:
        if isinstance(reference, StepResult):
            found[reference.index] = None

    filled(templates, note)
    return tuple(found)


class Run:
    """One request in a flow: which steps are ready, which to cancel, and how long each took.

    Enters: results and failures of steps, and the time. Leaves: indexes of steps to begin, or of running steps to
    cancel. The one rule: a step begins at most once, and no step begins after a failure. The caller keeps the results.
    """

    __slots__ = ("_flow", "_missing", "began", "began_at", "deadline", "ended_at", "left", "over")

    def __init__(self, flow: Flow, now: float, deadline: float | None = None) -> None:
        self._flow = flow
        self._missing = [len(step.needs) for step in flow.steps]
        self.began = now
        self.deadline = deadline
        """When the response is due; None if the request has no deadline."""
        self.left = len(flow.steps)
        """Steps that have not ended."""
        self.began_at: list[float | None] = [None] * self.left
        """When each step began; `ended_at`: when each step ended or failed. None if that has not happened."""
        self.ended_at: list[float | None] = [None] * self.left
        self.over = False
        """Whether all steps have ended, one step has failed, or the run was given up."""

    def begin(self) -> Sequence[int]:
        """The steps that wait for nothing. Without steps, the run is over at once."""
        self.over = not self.left
        ready = [index for index, missing in enumerate(self._missing) if not missing]
        for index in ready:
            self.began_at[index] = self.began
        return ready

    def finished(self, index: int, now: float) -> Sequence[int]:
        """Note that a step has its result. Returns the steps that are ready now."""
        if self.over or self.ended_at[index] is not None:
            return ()
        self.ended_at[index] = now
        self.left -= 1
        if not self.left:
            self.over = True
            return ()
        ready = []
        for fed in self._flow.steps[index].feeds:
            self._missing[fed] -= 1
            if not self._missing[fed]:
                self.began_at[fed] = now
                ready.append(fed)
        return ready

    def failed(self, index: int, now: float) -> Sequence[int]:
        """Note that a step has failed, and the run with it. Returns the running steps, to cancel."""
        if self.over or self.ended_at[index] is not None:
            return ()
        self.ended_at[index] = now
        return self.give_up(now)

    def give_up(self, now: float) -> Sequence[int]:
        """End the run, because the client has gone or the deadline has passed. Returns the running steps, to cancel."""
        if self.over:
            return ()
        self.over = True
        in_flight = self.in_flight()
        for index in in_flight:
            self.ended_at[index] = now
        return in_flight

    def in_flight(self) -> list[int]:
        """Steps that have begun and not ended."""
        ended = self.ended_at
        return [index for index, began in enumerate(self.began_at) if began is not None and ended[index] is None]

    def deadline_of(self, index: int, now: float) -> float | None:
        """The deadline of a step that begins now: the deadline of the run, or earlier if the step has a share of the
        run's time."""
        share = self._flow.steps[index].deadline_share
        if self.deadline is None or share is None:
            return self.deadline
        return min(self.deadline, now + share * (self.deadline - self.began))
