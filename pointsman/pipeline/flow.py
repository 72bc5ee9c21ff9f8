"""A graph made ready to run: calls by number, who waits for whom, and calls of shards one by one."""

from collections.abc import Mapping, Sequence
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


# One run of a flow: which calls are ready, which are to be given up, and how long each took.
#
# Enters: what became of calls, and the time. Leaves: the numbers of steps to begin, or of those under way to give up.
# The one rule: each step begins at most once, and after a failure nothing begins any more.


class Run:
    """The state of one request on its way through a flow. Whoever carries it out keeps the results."""

    __slots__ = ("_flow", "_missing", "began", "began_at", "deadline", "ended_at", "left", "over")

    def __init__(self, flow: Flow, now: float, deadline: float | None = None) -> None:
        self._flow = flow
        self._missing = [len(step.needs) for step in flow.steps]
        self.began = now
        self.deadline = deadline
        """When the answer is due; None: at no particular time."""
        self.left = len(flow.steps)
        """Steps that have not ended."""
        self.began_at: list[float | None] = [None] * self.left
        """By step: when it began; when it ended, either way."""
        self.ended_at: list[float | None] = [None] * self.left
        self.over = False
        """Nothing is to be done any more: everything has ended, or something has failed, or it was given up."""

    def begin(self) -> Sequence[int]:
        """The steps that wait for nothing. Without any, the run is over at once."""
        self.over = not self.left
        ready = [place for place, missing in enumerate(self._missing) if not missing]
        for place in ready:
            self.began_at[place] = self.began
        return ready

    def finished(self, place: int, now: float) -> Sequence[int]:
        """A step has its result. The steps that are ready now."""
        if self.over or self.ended_at[place] is not None:
            return ()
        self.ended_at[place] = now
        self.left -= 1
        if not self.left:
            self.over = True
            return ()
        ready = []
        for fed in self._flow.steps[place].feeds:
            self._missing[fed] -= 1
            if not self._missing[fed]:
                self.began_at[fed] = now
                ready.append(fed)
        return ready

    def failed(self, place: int, now: float) -> Sequence[int]:
        """A step will have no result, and so neither has the run. Steps under way that are of no use any more."""
        if self.over or self.ended_at[place] is not None:
            return ()
        self.ended_at[place] = now
        return self.give_up(now)

    def give_up(self, now: float) -> Sequence[int]:
        """Nobody wants the answer any more, or it would come too late. Steps under way."""
        if self.over:
            return ()
        self.over = True
        in_flight = self.in_flight()
        for place in in_flight:
            self.ended_at[place] = now
        return in_flight

    def in_flight(self) -> list[int]:
        """Steps that have begun and not ended."""
        ended = self.ended_at
        return [place for place, began in enumerate(self.began_at) if began is not None and ended[place] is None]

    def deadline_of(self, place: int, now: float) -> float | None:
        """When a step that begins now must have ended: with the run, or with its share of the time."""
        share = self._flow.steps[place].deadline_share
        if self.deadline is None or share is None:
            return self.deadline
        return min(self.deadline, now + share * (self.deadline - self.began))
