"""Runs of flows: which steps are ready when; no step begins twice or after a failure."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pointsman.pipeline import Call, Flow, FromInput, FromStep, Graph, Node, NodeKind, NodeOptions, Run, flow_of
from pointsman.pipeline.flow import InputValue, StepResult, call_flow


def node(name: str, **options: Any) -> Node:
    return Node(name=name, kind=NodeKind.FUNCTION, code=f"m:{name}", options=NodeOptions(**options))


def flow(*calls: tuple[str, str, list[Any]], output: Any = None, **nodes: Node) -> Flow:
    made = tuple(Call(id=name, node=owner, args=tuple(args)) for name, owner, args in calls)
    known = tuple(nodes.get(owner) or node(owner) for owner in dict.fromkeys(owner for _, owner, _ in calls))
    return flow_of(Graph(nodes=known, calls=made, output=output or FromStep(made[-1].id)))


def diamond() -> Flow:
    return flow(
        ("a", "m1", [FromInput()]),
        ("b", "m2", [FromInput()]),
        ("c", "join", [FromStep("a"), [FromStep("b"), FromStep("a")]]),
    )


def test_a_flow_is_numbered() -> None:
    made = diamond()
    assert made.inputs == (FromInput(),)
    assert made.steps[2].args == (StepResult(0), [StepResult(1), StepResult(0)])
    assert [(step.needs, step.feeds) for step in made.steps] == [((), (2,)), ((), (2,)), ((0, 1), ())]
    assert made.streams == 2


def test_steps_begin_when_all_that_they_need_is_there() -> None:
    run = Run(diamond(), 10.0)
    assert run.begin() == [0, 1]
    assert run.finished(1, 11.0) == []
    assert run.in_flight() == [0]
    assert run.finished(0, 12.0) == [2]
    assert not run.over
    assert run.finished(2, 13.0) == ()
    assert run.over
    assert list(zip(run.began_at, run.ended_at, strict=True)) == [(10.0, 12.0), (10.0, 11.0), (12.0, 13.0)]


def test_a_failure_ends_the_run_and_returns_the_running_steps() -> None:
    run = Run(diamond(), 0.0)
    run.begin()
    assert run.failed(0, 1.0) == [1]
    assert run.over
    assert run.finished(1, 2.0) == (), "a late result changes nothing"


def test_a_step_gets_its_share_of_the_deadline() -> None:
    run = Run(flow(("a", "m", [1]), ("b", "n", [FromStep("a")]), m=node("m", deadline_share=0.25)), 100.0, 104.0)
    assert run.deadline_of(0, 101.0) == 102.0
    assert run.deadline_of(0, 103.9) == 104.0
    assert run.deadline_of(1, 101.0) == 104.0
    assert Run(diamond(), 0.0).deadline_of(0, 0.0) is None


def test_a_call_of_shards_goes_to_all_of_them() -> None:
    made = flow(("a", "m", [FromInput()]), ("b", "n", [FromStep("a")]), m=node("m", shards=3))
    assert [(step.id, step.rank, step.needs) for step in made.steps] == [
        ("a.0", 0, ()),
        ("a.1", 1, ()),
        ("a.2", 2, ()),
        ("b", None, (0, 1, 2)),
    ]
    assert made.steps[3].args == ([StepResult(0), StepResult(1), StepResult(2)],)


def test_shards_that_join_do_so_on_the_first() -> None:
    sharded = Node(name="m", kind=NodeKind.CLASS, code="m:M", options=NodeOptions(shards=2), joins=True)
    made = flow(("a", "m", [FromInput()]), m=sharded)
    assert [(step.id, step.rank, step.method) for step in made.steps][-1] == ("a.join", 0, "join")
    assert made.output == StepResult(2)
    graph = Graph(nodes=(sharded,), calls=(), output=None)
    assert [step.id for step in call_flow(graph, "m", "forward").steps] == ["forward.0", "forward.1", "forward.join"]


def test_parts_of_the_input_are_named_once() -> None:
    made = flow(("a", "m", [FromInput(), FromInput()]), output=[FromStep("a"), FromInput()])
    assert made.inputs == (FromInput(),)
    assert made.output == [StepResult(0), InputValue(0)]
    assert made.streams is None


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    """Any graph: each call needs some of those before it."""
    calls: list[tuple[str, str, list[Any]]] = []
    for place in range(draw(st.integers(1, 8))):
        needs = draw(st.lists(st.integers(0, place - 1), max_size=3)) if place else []
        calls.append((f"s{place}", f"n{place}", [FromStep(f"s{one}") for one in needs]))
    return flow(*calls, output=[FromStep(name) for name, _, _ in calls])


@given(flows(), st.data())
def test_whatever_the_order_each_step_begins_once_and_after_what_it_needs(made: Flow, data: st.DataObject) -> None:
    run = Run(made, 0.0)
    ready, begun, ended, now = list(run.begin()), list[int](), list[int](), 0.0
    begun += ready
    while ready:
        place = ready.pop(data.draw(st.integers(0, len(ready) - 1)))
        assert set(made.steps[place].needs) <= set(ended)
        now += 1.0
        if data.draw(st.integers(0, 9)) == 0:
            assert sorted(run.failed(place, now)) == sorted(ready)
            assert run.over
            return
        ended.append(place)
        more = run.finished(place, now)
        ready += more
        begun += more
    assert run.over
    assert sorted(begun) == sorted(ended) == list(range(len(made.steps)))
