"""From bound objects to a graph, and its problems."""

from pathlib import Path
from typing import Any

import pytest

from pointsman.pipeline.application import build
from pointsman.pipeline.building import BuildError, bound_graph
from pointsman.pipeline.document import read, written
from pointsman.pipeline.graph import Access, FromInput, FromStep, HandleTo, NodeKind
from pointsman.pipeline.nodes import BindError, InputNode, deployment, model

HERE = Path(__file__).parent


@deployment
class Model:
    def __init__(self, val: Any, *, scale: float = 1.0) -> None:
        self.val = val

    def forward(self, value: int) -> int:
        return int(self.val * value)

    @staticmethod
    def name(of: str) -> str:
        return of


@deployment(num_replicas=2)
class Router:
    def __init__(self, *handles: Any) -> None: ...

    def __call__(self, question: str) -> str:
        return question


@deployment
def ensemble(a: int, b: int, c: int = 0) -> int:
    return a + b + c


@deployment(name="adder", idempotent=True)
def add(values: list[int], names: dict[str, int] | None = None) -> int:
    return sum(values)


def wrong(root: Any) -> list[str]:
    with pytest.raises(BuildError) as caught:
        bound_graph(root, HERE)
    return [str(problem) for problem in caught.value.problems]


def test_the_diamond() -> None:
    with InputNode() as dag_input:
        m1 = Model.bind(1)
        m2 = Model.bind(2, scale=0.5)
        m1_output = m1.forward.bind(dag_input[0])
        m2_output = m2.forward.bind(dag_input["second"].third)
        dag = ensemble.bind(m1_output, m2_output, c=dag_input[2])
    graph = bound_graph(dag, HERE).graph
    assert [(node.name, node.kind, node.code) for node in graph.nodes] == [
        ("ensemble", NodeKind.FUNCTION, "test_building.py:ensemble"),
        ("m1", NodeKind.CLASS, "test_building.py:Model"),
        ("m2", NodeKind.CLASS, "test_building.py:Model"),
    ]
    assert (graph.node("m2").args, graph.node("m2").kwargs) == ((2,), {"scale": 0.5})
    assert [(call.id, call.node, call.method) for call in graph.calls] == [
        ("m1_output", "m1", "forward"),
        ("m2_output", "m2", "forward"),
        ("dag", "ensemble", "__call__"),
    ]
    assert graph.calls[1].args == (FromInput((Access("second"), Access("third", attribute=True))),)
    assert graph.calls[2].args == (FromStep("m1_output"), FromStep("m2_output"))
    assert graph.output == FromStep("dag")
    assert len(graph.node("m1").version) == 12


def test_a_node_that_is_used_twice_is_one_node_and_one_call() -> None:
    with InputNode() as dag_input:
        m1 = Model.bind(1)
        once = m1.forward.bind(dag_input)
        dag = ensemble.bind(once, once, m1.forward.bind(once))
    graph = bound_graph(dag).graph
    assert [node.name for node in graph.nodes] == ["ensemble", "m1"]
    assert [call.id for call in graph.calls] == ["once", "m1.forward", "dag"]


def test_nested_containers_and_several_outputs() -> None:
    with InputNode() as dag_input:
        m1 = Model.bind(1)
        one = m1.forward.bind(dag_input)
        total = add.bind([one, 2, (3,)], names={"one": one, "two": 2})
    graph = bound_graph({"total": total, "parts": [one, "as it is"]}).graph
    assert graph.calls[-1].args == ([FromStep("one"), 2, [3]],)
    assert graph.calls[-1].kwargs == {"names": {"one": FromStep("one"), "two": 2}}
    assert graph.output == {"total": FromStep("total"), "parts": [FromStep("one"), "as it is"]}
    assert graph.node("adder").options.idempotent


def test_nodes_get_handles_to_other_nodes() -> None:
    cheap = Model.bind(1)
    router = Router.bind(cheap, [add, model("smollm2")])
    graph = bound_graph(router).graph
    assert graph.node("router").args == (HandleTo("cheap"), [HandleTo("adder"), HandleTo("smollm2")])
    assert [(node.name, node.kind) for node in graph.nodes] == [
        ("router", NodeKind.CLASS),
        ("cheap", NodeKind.CLASS),
        ("adder", NodeKind.FUNCTION),
        ("smollm2", NodeKind.MODEL),
    ]
    assert graph.calls[0].args == (FromInput(),), "it takes what comes"
    assert graph.node("router").options.num_replicas == 2


def test_names_are_those_of_variables_else_of_the_class_with_a_number() -> None:
    with InputNode() as dag_input:
        models = [Model.bind(number) for number in range(3)]
        named = Model.options(name="chosen").bind(7)
        dag = add.bind([one.forward.bind(dag_input) for one in [*models, named]])
    assert [node.name for node in bound_graph(dag).graph.nodes] == ["adder", "model", "model_2", "model_3", "chosen"]


def test_a_name_of_a_variable_is_never_an_error() -> None:
    with InputNode() as dag_input:
        ingress = Model.bind(1)
        größe = Model.bind(2)
        a_variable_whose_name_is_longer_than_a_name_may_be = Model.bind(3)
        bound = [ingress, größe, a_variable_whose_name_is_longer_than_a_name_may_be]
        for number in range(12):
            same = Model.bind(number)
            bound.append(same)
        named = deployment(name="twin")(Model.body)
        bound += [named.bind(1), named.bind(2)]
        assert bound_graph(Model.bind(7).forward.bind(dag_input)).graph.calls  # pytest stores it in a variable: @py_...
        dag = add.bind([one.forward.bind(dag_input) for one in bound])
    names = [node.name for node in bound_graph(dag).graph.nodes]
    cut = "a_variable_whose_name_is_longer_than_a_n"
    assert names[1:6] == ["ingress_2", "model", cut, "same", "same_2"]
    assert names[-2:] == ["twin", "twin_2"]
    assert len(names) == len(set(names)) == 18


@pytest.mark.parametrize("key", [slice(0, 2), (1, 2), 1.5, None, True, b"a"])
def test_parts_of_the_input_are_indexes_and_names(key: Any) -> None:
    with InputNode() as dag_input, pytest.raises(BindError, match="an index or a text was expected"):
        add.bind(dag_input[key])


def test_the_input_cannot_be_unpacked() -> None:
    with InputNode() as dag_input:
        with pytest.raises(BindError, match="cannot be unpacked or iterated"):
            add.bind(*dag_input)
        with pytest.raises(BindError, match="cannot be unpacked or iterated"):
            list(dag_input.part)


def test_parts_of_results_are_bound_and_written() -> None:
    with InputNode() as dag_input:
        one = Model.bind(1).forward.bind(dag_input)
        dag = add.bind([one[0], one["key"].attribute[-1]], names=one)
    graph = bound_graph(dag).graph
    path = (Access("key"), Access("attribute", attribute=True), Access(-1))
    assert graph.calls[-1].args == ([FromStep("one", (Access(0),)), FromStep("one", path)],)
    notes: list[Any] = []
    assert read(written(graph.calls[-1].args), lambda *note: notes.append(note)) == list(graph.calls[-1].args)
    assert notes == []
    with pytest.raises(BindError, match="a result cannot be unpacked"):
        add.bind(*one)
    with pytest.raises(BindError, match="an index or a text was expected"):
        add.bind(one[1:])
    assert wrong(Router.bind(one[0]).bind("x")) == [
        "router: argument 1 is part of the result of a call; only a call can take that",
    ]


def test_nodes_are_items_of_their_application_too() -> None:
    draw = Model.bind(1)
    app = build(draw.forward.bind(2), folder=Path(__file__).parent)
    app["draw"].set_options(num_replicas=3)
    assert app["draw"].options.num_replicas == 3


def test_all_problems_are_reported_at_once() -> None:
    with InputNode() as dag_input:
        m1 = Model.bind({1, 2})
        m2 = Model.options(name="m1").bind()
        m3 = Model.options(name="ingress").bind(3, 4)
        dag = ensemble.bind(m1.forword.bind(dag_input), m2.forward.bind(1, 2), m3.name.bind("a"), d=m1)
    told = wrong(dag)
    assert told == [
        "m1: argument 1 is a set, which JSON has no form for; make it inside the class",
        'm1.forword: it has no "forword"; did you mean "forward"?',
        'two nodes are called "m1"; give one another name: .options(name="...")',
        "m1_2: missing a required argument: 'val'; it takes (val: Any, *, scale: float = 1.0) -> None",
        "m1_2.forward: too many positional arguments; it takes (self, value: int) -> int",
        '"ingress" is the name of what takes requests from outside; call this node something else',
        "ingress: too many positional arguments; it takes (val: Any, *, scale: float = 1.0) -> None",
        'ensemble: argument "d" is a node, not a result; bind one of its methods, or hand the node to a class',
        "ensemble: got an unexpected keyword argument 'd'; it takes (a: int, b: int, c: int = 0) -> int",
    ]


def test_code_that_another_process_cannot_load() -> None:
    @deployment
    def inner(value: int) -> int:
        return value

    with InputNode(preprocessor=lambda request: 1) as dag_input:
        dag = inner.bind(dag_input)
    assert wrong(dag) == [
        "inner cannot be loaded by other processes: test_code_that_another_process_cannot_load.inner is defined inside "
        "a function; move it to module level",
        "the preprocessor of the input cannot be loaded by other processes: it has no name that another process could "
        "import; write a def or a class for it",
    ]
    assert bound_graph(dag).graph.nodes[0].code == "", "in this process it runs"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (float("nan"), "is nan, which JSON has no form for"),
        (1 << 70, "more than 64 bits"),
        ({1: 2}, "keys must be text"),
        ({"$input": 2}, "must not begin with $"),
        (b"bytes", "is a bytes, which JSON has no form for"),
        (Model.bind(1).forward, "a method that is not bound; add .bind(...)"),
    ],
)
def test_values_that_json_cannot_represent(value: Any, problem: str) -> None:
    [told] = wrong(add.bind([value]))
    assert told.startswith("adder: argument 1[0]")
    assert problem in told


def test_a_cycle() -> None:
    values: list[Any] = [1]
    dag = add.bind(values)
    values.append(dag)
    assert wrong(dag) == ["adder needs itself: the graph has a cycle there"]


def test_results_and_input_do_not_go_to_constructors() -> None:
    with InputNode() as dag_input, InputNode() as another:
        m1 = Model.bind(dag_input)
        m2 = Model.bind(add.bind([1]))
        dag = ensemble.bind(m1.forward.bind(dag_input), m2.forward.bind(another))
    assert wrong(dag) == [
        "m1: argument 1 is the input, which comes with each request; bind it to a method",
        "m2: argument 1 is the result of a call; only a call can take that: bind it to a method",
        "there are two InputNodes; a request has one input: use one for all of the graph",
    ]


def test_nothing_to_build() -> None:
    assert wrong([1, 2]) == ["nothing is called: build what bind() returned, such as ensemble.bind(a, b)"]


def test_models_have_three_methods() -> None:
    assert wrong(model("llama").chatt.bind("hello")) == ['model "llama" has no "chatt"; did you mean "chat"?']


def test_options_of_an_application_by_node() -> None:
    with InputNode() as dag_input:
        m1 = Model.bind(1)
        dag = m1.forward.bind(dag_input)
    app = build(dag, folder=HERE)
    assert app.name == "test_building"
    app.m1.set_options(num_replicas=3, user_config={"threshold": 0.5})
    app.ingress.set_options(num_replicas=2)
    assert app.graph.node("m1").options.num_replicas == 3
    assert app.graph.ingress.num_replicas == 2
    with pytest.raises(Exception, match='unknown node "m2"; known: ingress, m1'):
        app.m2.set_options(num_replicas=1)
    with pytest.raises(Exception, match='unknown option "replicas"; did you mean "num_replicas"'):
        app.m1.set_options(replicas=1)
    with pytest.raises(Exception, match="shards must be at least 1, found 0"):
        app.m1.set_options(shards=0)


def test_a_deployment_can_still_be_called() -> None:
    assert Model(2).forward(3) == 6
    assert ensemble(1, 2) == 3
    assert (ensemble.__name__, ensemble.__module__) == ("ensemble", __name__)
