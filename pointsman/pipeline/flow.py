"""A graph made ready to run: calls by number, who waits for whom, and calls of shards one by one."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pointsman.pipeline.graph import CALL, Call, FromInput, FromStep, Graph, NodeKind, Template, filled


class InputValue(msgspec.Struct, frozen=True):
    """The n-th part of the input that the flow uses."""

    place: int


class StepResult(msgspec.Struct, frozen=True):
    """The result of the n-th step."""

    place: int


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One call of one replica."""

    id: str
    node: str
    rank: int | None = None
    """Of the shard; None: the node has none."""
    kind: NodeKind
    method: str
    args: tuple[Template, ...] = ()
    """With `InputValue`, `StepResult` and `HandleTo` in place of what is not known yet."""
    kwargs: Mapping[str, Template] = {}
    needs: tuple[int, ...] = ()
    """Steps that come before."""
    feeds: tuple[int, ...] = ()
    """Steps that wait for it."""
    deadline_share: float | None = None
    idempotent: bool = False


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """What a run goes through."""

    steps: tuple[Step, ...]
    inputs: tuple[FromInput, ...]
    """The parts of the input that steps and output use, each once."""
    output: Template
    streams: int | None = None
    """The step whose result is the answer as it is: if that comes piece by piece, so does the answer."""


def flow_of(graph: Graph) -> Flow:
    """The flow of a graph that has been checked."""
    return _Flattening(graph).flow()


def call_flow(graph: Graph, node: str, method: str) -> Flow:
    """The flow of one call through a handle, without its arguments: whoever calls has them."""
    call = Call(id=method if method != CALL else node, node=node, method=method)
    return flow_of(msgspec.structs.replace(graph, calls=(call,), output=FromStep(call.id)))


class _Flattening:
    """Numbers calls and the parts of the input as they come."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._steps: list[Step] = []
        self._results: dict[str, Template] = {}
        """What the result of a call is, in terms of steps."""
        self._inputs: dict[FromInput, InputValue] = {}

    def flow(self) -> Flow:
        for call in self._graph.calls:
            self._results[call.id] = self._call(call)
        output = self._numbered(self._graph.output)
        feeds: list[list[int]] = [[] for _ in self._steps]
        for place, step in enumerate(self._steps):
            for before in step.needs:
                feeds[before].append(place)
        steps = (msgspec.structs.replace(step, feeds=tuple(fed)) for step, fed in zip(self._steps, feeds, strict=True))
        streams = output.place if isinstance(output, StepResult) else None
        return Flow(steps=tuple(steps), inputs=tuple(self._inputs), output=output, streams=streams)

    def _call(self, call: Call) -> Template:
        node = self._graph.node(call.node)
        args, kwargs = tuple(map(self._numbered, call.args)), self._numbered(call.kwargs)
        if node.options.shards == 1:
            return self._step(call, call.id, None, args, kwargs)
        parts = [self._step(call, f"{call.id}.{rank}", rank, args, kwargs) for rank in range(node.options.shards)]
        if not node.joins:
            return parts
        joining = msgspec.structs.replace(call, method="join")
        return self._step(joining, f"{call.id}.join", 0, (parts,), {})

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
            return self._results[reference.call] if isinstance(reference, FromStep) else reference

        return filled(template, number)


def _needs(templates: list[Template]) -> tuple[int, ...]:
    found: dict[int, None] = {}

    def note(reference: Any) -> None:
        if isinstance(reference, StepResult):
            found[reference.place] = None

    filled(templates, note)
    return tuple(found)
