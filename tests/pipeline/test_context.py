"""The context of a call, and where loading stops."""

from typing import Any

import pytest

from pointsman.errors import PointsmanError
from pointsman.pipeline.context import (
    CURRENT,
    LOADING,
    CallContext,
    LoadedEnough,
    Loading,
    current,
    loading_stops_here,
    record_metric,
)


def test_time_left() -> None:
    assert current().time_left_s is None
    now = 10.0
    context = CallContext(deadline=12.5, clock=lambda: now)
    token = CURRENT.set(context)
    assert current().time_left_s == 2.5
    now = 13.0
    assert current().time_left_s == 0.0
    CURRENT.reset(token)


@pytest.mark.parametrize("what", ["execute", "deploy"])
def test_execute_and_deploy_work_outside_of_loading(what: str) -> None:
    loading_stops_here(what)


@pytest.mark.parametrize("what", ["execute", "deploy"])
def test_loading_stops_when_all_names_are_defined(what: str) -> None:
    token = LOADING.set(Loading("m.py", frozenset({"A", "B"}), {"A": 1, "B": 2}))
    with pytest.raises(LoadedEnough):
        loading_stops_here(what)
    LOADING.reset(token)


def test_what_is_defined_below() -> None:
    token = LOADING.set(Loading("m.py", frozenset({"A", "B"}), {"A": 1}))
    loading_stops_here("execute")
    with pytest.raises(PointsmanError, match=r"m\.py: B is defined below deploy\(\); define it above"):
        loading_stops_here("deploy")
    LOADING.reset(token)


def test_custom_metrics_go_to_the_recorder() -> None:
    record_metric("frames", 3)  # outside of a replica it goes nowhere
    told: list[tuple[str, float]] = []
    token = CURRENT.set(CallContext(recorder=lambda name, value: told.append((name, value))))
    record_metric("frames", 3)
    kept = current()
    CURRENT.reset(token)
    kept.record_metric("frames", 4.5)
    assert told == [("frames", 3.0), ("frames", 4.5)]


@pytest.mark.parametrize(("name", "value"), [("", 1), ("a", "many"), ("a", None), ("a", float("nan"))])
def test_metrics_must_be_finite_numbers(name: str, value: Any) -> None:
    with pytest.raises(PointsmanError, match=r'a metric has a name|metric "a" is a'):
        record_metric(name, value)
