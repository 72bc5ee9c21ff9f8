"""Calling a policy never raises; the answer for an application is split by node."""

from collections.abc import Callable
from typing import Any

import pytest

from pointsman.errors import PluginError, UnknownName
from pointsman.scaling import (
    ApplicationView,
    DeploymentView,
    Guard,
    ScalingLimits,
    Stay,
    TooSlow,
    Wish,
    by_node,
    invoke,
    invoke_application,
)
from tests.scaling.views import NOON, view


class Method:
    def desired_replicas(self, view: DeploymentView) -> int:
        return view.replicas + 1


def function(view: DeploymentView) -> Wish:
    return Wish(view.replicas + 1)


async def waits(view: DeploymentView) -> int:
    return 3


def leaves(view: DeploymentView) -> int:
    raise SystemExit(2)


def test_objects_and_functions_are_called_alike() -> None:
    assert invoke(Method(), view()) == 3
    assert invoke(function, view()) == Wish(3)
    assert invoke(lambda view: "many", view()) == "many"


@pytest.mark.parametrize(
    ("policy", "kind", "message"),
    [
        (lambda view: 1 // 0, ZeroDivisionError, "by zero"),
        (leaves, SystemExit, "2"),
        (waits, TypeError, "waits is async; a scaling policy is a plain function that does not wait"),
        (3, PluginError, 'plugin "int" is not a scaling policy: it has no desired_replicas(view)'),
        (lambda: 3, TypeError, "takes 0 positional arguments"),
    ],
)
def test_an_exception_is_returned(policy: Any, kind: type, message: str) -> None:
    answer = invoke(policy, view())
    assert isinstance(answer, kind)
    assert message in str(answer)


def application(**nodes: DeploymentView) -> ApplicationView:
    return ApplicationView(name="shop", now=NOON, deployments=nodes)


def guards(*names: str) -> dict[str, Guard]:
    limits = ScalingLimits(max_replicas=10, initial_replicas=2, down_delay_s=0.0)
    return {name: Guard(name, limits, "balance") for name in names}


def decided(policy: Callable[[ApplicationView], object], *names: str) -> dict[str, tuple[int, str]]:
    """The targets of all nodes afterwards, with what is wrong."""
    kept = guards(*names)
    seen = application(**{name: view(name=name) for name in names})
    for name, answer in invoke_application(policy, seen).items():
        kept[name].decide(seen.deployments[name], answer)
    return {name: (guard.target, str(guard.problem or "")) for name, guard in kept.items()}


def test_nodes_that_are_left_out_keep_their_targets() -> None:
    answer = {"ocr": 5, "rank": Wish(3, "as many as ocr needs")}
    assert decided(lambda view: answer, "ocr", "rank", "chat") == {"ocr": (5, ""), "rank": (3, ""), "chat": (2, "")}


def test_an_invalid_number_affects_its_node_only() -> None:
    targets = decided(lambda view: {"ocr": 5, "rank": "many"}, "ocr", "rank")
    assert targets["ocr"] == (5, "")
    assert targets["rank"][0] == 2
    assert targets["rank"][1].startswith("returned 'many'")


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (lambda view: {"orc": 5, "rank": 3}, 'raised UnknownName: unknown node "orc"; did you mean "ocr"?'),
        (lambda view: 1 // 0, "raised ZeroDivisionError"),
        (lambda view: 7, "raised TypeError: an application's policy returns a number for each node, found int"),
        (lambda view: None, "found NoneType"),
    ],
)
def test_an_invalid_answer_affects_all_nodes(policy: Any, problem: str) -> None:
    for target, said in decided(policy, "ocr", "rank").values():
        assert target == 2
        assert problem in said


def test_a_late_answer_is_late_for_all_nodes() -> None:
    assert by_node(TooSlow(2.0), ["a", "b"]) == {"a": TooSlow(2.0), "b": TooSlow(2.0)}
    assert by_node({}, ["a"]) == {"a": Stay()}
    assert isinstance(by_node({"c": 1}, ["a"])["a"], UnknownName)
