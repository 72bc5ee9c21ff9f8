"""The same graph in this process and deployed: the same results, the same order of effects, the same exceptions.

Each scenario has its expected outcome, and is run both ways. The deployed ones share a plane; those that only differ in
what a node does share an application, too.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

import pointsman as pm
from pointsman.gateway.deploying import close_background_planes
from tests.live.same_answer import nodes
from tests.live.same_answer.nodes import MADE, Point
from tests.live.same_answer.orders import Order


class Raised(NamedTuple):
    """An exception: the name of its class, and its text."""

    kind: str
    text: str


class Scenario(NamedTuple):
    application: str
    args: tuple[Any, ...]
    expected: Any
    """The result, `Raised`, or what the pieces of a stream are."""
    streams: bool = False
    then: Callable[[str], Any] = lambda _: None
    """What is left of it, from its log or folder."""
    left: Any = None
    kwargs: Mapping[str, Any] = MappingProxyType({})


LOG = "<log>"
"""In arguments: a path that is the scenario's own."""


def graphs() -> dict[str, Any]:
    """By name: the output of each graph."""
    made: dict[str, Any] = {}
    with pm.InputNode() as given:
        made["same"] = nodes.same.bind(given)
        m1, m2 = nodes.Model.bind(1), nodes.Model.bind(2, scale=10)
        made["diamond"] = nodes.add.bind(m1.forward.bind(given[0]), m2.later.bind(given[1]), c=given[2])
        made["chain"] = nodes.same.bind(m2.forward.bind(m1.forward.bind(m2.forward.bind(given))))
        once = nodes.noted.bind(given[0], "shared")
        made["shared"] = nodes.noted.bind(given[0], "last", once, once, [once])
        made["nested"] = nodes.total.bind({"a": given["x"], "b": nodes.total.bind([given["y"].z, 1, 2])})
        made["outputs"] = nodes.add.bind(given[0], given[1])
        made["describe"] = nodes.describe.bind(given)
        made["raises"] = nodes.raises.bind(given)
        made["in the middle"] = nodes.noted.bind(given[0], "after", nodes.raises.bind(given[1]))
        made["makes"] = nodes.makes.bind(given)
        made["passes on"] = nodes.describe.bind(nodes.makes.bind(given))
        made["writes"] = nodes.writes.bind(nodes.makes.bind(given))
        values: Any = nodes.same.bind(given)
        made["changes"] = nodes.describe.bind([nodes.changes.bind(values), nodes.changes.bind(values), values])
        made["meets"] = nodes.describe.bind(
            [nodes.meets.bind(given, "a", "b"), nodes.meets.options(name="met").bind(given, "b", "a")]
        )
        made["coroutine"] = nodes.coroutine_of.bind(given)
        made["generator of"] = nodes.generator_of.bind(given)
        made["count"] = nodes.count.bind(given)
        made["count later"] = nodes.count_later.bind(given)
        made["collected"] = nodes.total.bind([nodes.total.bind(nodes.count.bind(given)), given])
        made["breaks"] = nodes.breaks_after.bind(given)
        made["breaks later"] = nodes.breaks_later.bind(given)
        made["static"] = m1.named.bind(given)
        made["late"] = nodes.add.bind(nodes.Slow.bind(4).get.bind(), given)
        made["sharded"] = nodes.Sharded.bind().part.bind(given)
        made["parted"] = nodes.Parted.bind().part.bind(given)
        made["batched"] = nodes.Batched.bind().plain.bind(given[0], scale=given[1])
        made["wrong batch"] = nodes.Batched.bind().wrong.bind(given)
        configured = nodes.Configured.options(user_config={"a": [1]}).bind()
        configured_later = nodes.ConfiguredLater.options(user_config=2).bind()
        made["configured"] = nodes.ends.options(name="both").bind(
            nodes.same.bind(configured.get.bind()), configured_later.get.bind(), given
        )
        made["configs"] = nodes.describe.bind([configured.get.bind(), configured_later.get.bind()])
        coloured = nodes.Environment.options(env={"COLOUR": "red"}).bind()
        made["environment"] = nodes.describe.bind([coloured.get.bind(), coloured.later.bind()])
        made["stays there"] = nodes.describe.bind(
            [coloured.get.bind(), nodes.Environment.options(env={"COLOUR": "blue"}).bind().made.bind()]
        )
        with_handles = nodes.Driver.bind(
            nodes.Model.bind(2),
            {
                "other": [nodes.Model.options(name="other").bind(3), nodes.Batched.bind(), nodes.Sharded.bind()],
                "one_by_one": nodes.OneByOne.bind(),
                "inner": nodes.Inner.bind(nodes.Model.options(name="deep").bind(5)),
            },
        )
        made["handles"] = with_handles.run.bind(given[0], given[1])
        made["plain handles"] = with_handles.run_plainly.bind(given[0], given[1])
        two = nodes.pair.bind(given)
        made["parts"] = nodes.describe.bind([two[0], two[-1]["deep"][1], two[1]["number"].imag])
        made["part"] = two[1]["deep"]
        made["some parts"] = nodes.same.bind({"a": two[0], "b": two[1].deep[0]})
        made["no such part"] = nodes.describe.bind(two[2])
        made["part of shards"] = nodes.same.bind(nodes.Parted.bind().part.bind(given)[1][0])
    made["who"] = nodes.who.bind()
    made["class root"] = nodes.Model.bind(3)
    with pm.InputNode(schema=Order) as order:
        made["schema"] = nodes.describe.bind(order)
        made["schema part"] = nodes.same.bind(order.count)
    with pm.InputNode(preprocessor=nodes.doubled) as number:
        made["preprocessor"] = nodes.same.bind(number)
    with pm.InputNode(preprocessor=nodes.by_name) as refused:
        made["refuses"] = nodes.same.bind(refused)
    with pm.InputNode(preprocessor=nodes.as_order, schema=Order) as both:
        made["both"] = nodes.same.bind(both.name)
    return made


def read(log: str) -> Any:
    return nodes.effects(log)


def handles(what: str, expected: Any, **more: Any) -> Scenario:
    return Scenario("handles", (what, LOG), expected, **more)


def plain_handles(what: str, expected: Any) -> Scenario:
    return Scenario("plain handles", (what, LOG), expected)


BLOCKS = "result() would block the event loop; in async code, await the response"
BLOCKS_STREAM = "a plain for would block the event loop; in async code, write async for"
PLAIN: list[Any] = [1, 2.5, "text", None, True, b"bytes", [], {"a": [1, {}]}]
SCENARIOS = [
    *(Scenario("same", (value,), value) for value in PLAIN),
    Scenario("same", (), []),
    Scenario("same", (1, 2), [1, 2]),
    Scenario("same", (), {"a": 1}, kwargs={"a": 1}),
    Scenario("diamond", (1, 2, 3), 1 + 4 + 3),
    Scenario("diamond", (1, 2), Raised("RefusedInput", "BadInput: body: input[2]: the input has 2 items")),
    Scenario("chain", (1,), 20 * 20),
    Scenario("shared", (LOG, 1), "last", then=read, left=["shared", "last"]),
    Scenario("nested", (), 1 + 0 + 1 + 2, kwargs={"x": 1, "y": {"z": 0}}),
    Scenario("nested", (), Raised("RefusedInput", "BadInput: body: input['y']: the input has only 'x'"),
             kwargs={"x": 1}),
    Scenario("outputs", ([1], [2]), Raised("TypeError", 'can only concatenate list (not "int") to list')),
    Scenario("describe", ("x",), ["str", "'x'"]),
    Scenario("raises", ("value",), Raised("ValueError", "no such value")),
    Scenario("raises", ("key",), Raised("KeyError", "'gone'")),
    Scenario("raises", ("own",), Raised("Refusal", "('not today', 7)")),
    Scenario("raises", ("assertion",), Raised("AssertionError", "")),
    Scenario("raises", ("odd",), Raised("CallFailed", "raises: Odd: 1 and 2")),
    Scenario("raises", ("exit",), Raised("CallFailed", "raises: SystemExit: 3")),
    Scenario("raises", ("stop",), Raised("CallFailed", "raises: StopIteration: over")),
    Scenario("in the middle", (LOG, "value"), Raised("ValueError", "no such value"), then=read, left=[]),
    *(Scenario("makes", (what,), MADE[what]()) for what in ("tuple", "set", "big", "bytes", "nothing", "names")),
    Scenario("makes", ("point",), Point(1, 2)),
    Scenario("makes", ("array",), np.arange(6).reshape(2, 3)),
    Scenario("makes", ("lock",), Raised("Unsendable", "a value of type lock cannot be sent to another process: "
                                        "cannot pickle '_thread.lock' object")),
    Scenario("passes on", ("tuple",), ["tuple", "(1, 'two', [3])"]),
    Scenario("passes on", ("set",), ["set", "{1, 2}"]),
    Scenario("writes", ("array",), "read-only"),
    Scenario("writes", ("large",), "read-only"),
    Scenario("changes", ([1],), ["list", "[2, 2, [1]]"]),
    Scenario("meets", (LOG,), ["list", "[True, True]"]),
    Scenario("coroutine", (1,), 2),
    Scenario("generator of", (3,), [0, 1, 2]),
    Scenario("count", (3,), [0, 1, 2]),
    Scenario("count", (3,), [0, 1, 2], streams=True),
    Scenario("count", (0,), [], streams=True),
    Scenario("count later", (3,), [0, 1, 2]),
    Scenario("count later", (200,), list(range(200)), streams=True),
    Scenario("generator of", (3,), [0, 1, 2], streams=True),
    Scenario("collected", (4,), 6 + 4),
    Scenario("same", (5,), [5], streams=True),
    Scenario("breaks", (2,), [0, 1, Raised("Refusal", "('no more', 2)")], streams=True),
    Scenario("breaks", (2,), Raised("Refusal", "('no more', 2)")),
    Scenario("breaks", (0,), [Raised("Refusal", "('no more', 0)")], streams=True),
    Scenario("breaks later", (2,), [0, 1, Raised("KeyError", "'gone'")], streams=True),
    Scenario("static", ("x",), "<x>"),
    Scenario("late", (1,), 5),
    Scenario("sharded", ([1, 2, 3, 4],), 10),
    Scenario("parted", (7,), [[0, 7], [1, 7]]),
    Scenario("batched", (3, 4), 12),
    Scenario("wrong batch", (3,), Raised("PointsmanError", "wrong takes batches, so it must return a list with a result"
                                         " for each call; it returned a int")),
    Scenario("configured", (1,), 3),
    Scenario("configs", (1,), ["list", "[[{'a': [1]}], [2]]"]),
    Scenario("environment", (1,), ["list", "[['red', 'red', 'red', True], 'red']"]),
    Scenario("stays there", (1,), ["list", "[['red', 'red', 'red', True], None]"]),
    Scenario("parts", (3,), ["list", "[3, 6, 3.0]"]),
    Scenario("part", (3,), ["a", 6]),
    Scenario("some parts", (3,), {"a": 3, "b": "a"}),
    Scenario("no such part", (3,), Raised("NoSuchPart", "the result[2]: a tuple has no such part "
                                          "(tuple index out of range)")),
    Scenario("part of shards", (3,), 1),
    Scenario("who", (), ["who", "who", None, 1, 0, None, True]),
    Scenario("class root", (5,), [3, 5]),
    Scenario("schema", (), ["Order", "Order(name='x', count=2)"], kwargs={"name": "x", "count": "2"}),
    Scenario("schema", ({"name": "y"},), ["Order", "Order(name='y', count=1)"]),
    Scenario("schema", ({},), Raised("RefusedInput", "BadInput: name: Field required")),
    Scenario("schema part", ({"name": "y", "count": 3},), 3),
    Scenario("preprocessor", (4,), 4),
    Scenario("refuses", (4,), 4),
    Scenario("both", ({"name": "z"},), "z"),
    Scenario("both", ({"name": 1},), Raised("RefusedInput", "BadInput: name: Input should be a valid string")),
    handles("awaits", [6, [2, 4], 10]),
    handles("awaits_twice", [True, 1]),
    handles("does_not_await", ["made"]),
    handles("side_by_side", [True, True]),
    handles("gathers", [2 * number for number in range(20)]),
    handles("in_a_batch", [[0, 3], [1, 3], [2, 3]]),
    handles("cancels", ["cancelled"]),
    handles("waits_for_some_time", "too late"),
    handles("blocks", Raised("PointsmanError", BLOCKS)),
    handles("blocks_on_a_stream", Raised("PointsmanError", BLOCKS_STREAM)),
    handles("streams", [0, 2, 4]),
    handles("streams_async", [0, 2, 4]),
    handles("streams_itself", [[2, 3]]),
    handles("stops_early", 6),
    handles("stream_fails", [[0, 1], 2, "('no more', 2)"]),
    handles("collects", [[0, 2, 4], [0, 2]]),
    handles("catches", [["ValueError", "no such value"], ["Refusal", "('not today', 7)"], ["KeyError", "'gone'"]]),
    handles("retries", "<fine>"),
    handles("passes_errors_on", Raised("Refusal", "('not today', 7)")),
    handles("passes_odd_errors_on", Raised("CallFailed", "model: Odd: 1 and 2")),
    handles("is_refused", Raised("CallFailed", 'model: UnknownMethod: unknown method of model "forwrd"; did you mean '
                                 '"forward"?')),
    handles("lacks_an_argument",
            Raised("TypeError", "Model.forward() missing 1 required positional argument: 'value'")),
    handles("sends_what_cannot_be_sent", "Unsendable"),
    handles("gets_what_cannot_be_sent",
            Raised("Unsendable", "a value of type lock cannot be sent to another process: cannot pickle "
                   "'_thread.lock' object")),
    handles("keeps_its_own", [[0], [0, 1]]),
    handles("keeps_types", [["tuple", "(1, 2)"], ["set", "{3}"], ["int", str(1 << 70)], ["bytes", "b'x'"],
                            ["NoneType", "None"], ["dict", "{'a': [1.5]}"]]),
    handles("to_shards", 10),
    handles("one_at_a_time", 1),
    handles("knows_the_callee", ["other", 0]),
    handles("through_another", "<fine>"),
    handles("loops", 64),
    plain_handles("plainly", [6, [2, 4]]),
    plain_handles("plain_pieces", [0, 2, 4]),
    plain_handles("plain_stream_fails", Raised("Refusal", "('no more', 1)")),
    plain_handles("plain_side_by_side", [True, True]),
    plain_handles("plain_twice", True),
    plain_handles("plain_timeout", "too late"),
    plain_handles("plain_fails", Raised("Refusal", "('not today', 7)")),
]  # fmt: skip


class Ways(NamedTuple):
    """By application: what is called."""

    bound: dict[str, Any]
    deployed: dict[str, Any]


@pytest.fixture(scope="module")
def ways() -> Iterator[Ways]:
    made = graphs()
    bound = {name: made[name] for name in {scenario.application for scenario in SCENARIOS}}

    def deploy(name: str, root: Any) -> Any:
        return pm.build(root, name=name.replace(" ", "-"), folder=Path(__file__).parent).deploy()

    first, *others = bound
    with ThreadPoolExecutor(len(bound)) as pool:
        handles = {first: deploy(first, bound[first])}
        handles |= zip(others, pool.map(deploy, others, map(bound.get, others)), strict=True)
    yield Ways(bound, handles)
    close_background_planes()


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return Raised(type(error).__name__, str(error))


def pieces_of(stream: Any) -> list[Any]:
    found: list[Any] = []
    iterator = iter(stream)
    while not found or not isinstance(found[-1], Raised | type(StopIteration)):
        found.append(outcome(lambda: next(iterator, StopIteration)))
    return found[:-1] if found[-1] is StopIteration else found


@pytest.mark.parametrize("way", ["in process", "deployed"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: f"{one.application} {one.args}")
def test_the_same_answer(ways: Ways, scenario: Scenario, way: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    if scenario.application == "meets" or "side_by_side" in str(scenario.args):
        own.mkdir()
    args = [str(own) if value == LOG else value for value in scenario.args]
    if way == "in process":
        root = ways.bound[scenario.application]
        call = root.stream if scenario.streams else root.execute
        found = outcome(lambda: call(*args, **scenario.kwargs))
    else:
        handle = ways.deployed[scenario.application]
        call = handle.stream if scenario.streams else handle.remote
        found = outcome(lambda: call(*args, **scenario.kwargs))
        if not scenario.streams:
            response = found
            found = outcome(lambda: response.result(30))
    if scenario.streams:
        found = pieces_of(found)
    if isinstance(scenario.expected, np.ndarray):
        assert np.array_equal(found, scenario.expected)
    else:
        assert (found, type(found)) == (scenario.expected, type(scenario.expected))
    assert scenario.then(str(own)) == scenario.left


def test_there_are_enough_scenarios() -> None:
    assert len(SCENARIOS) >= 60
    names = [name for name, _ in itertools.groupby(sorted(one.application for one in SCENARIOS))]
    assert set(names) <= set(graphs())
