"""The state of policies: small, plain, and copied before each call."""

import math
from threading import Lock
from typing import Any

import pytest

from pointsman.scaling import DeploymentView, Guard, ScalingLimits, Wish
from pointsman.scaling.policy import (
    MAX_STATE_BYTES,
    StateTooLarge,
    copy_state,
    invoke_with_state,
    parse_answer,
    savable_state,
    state_size,
)
from tests.scaling.views import view


def writes(note: Any) -> Any:
    def policy(view: DeploymentView) -> int:
        view.state["note"] = note
        return 3

    return policy


@pytest.mark.parametrize("note", [0, "x" * (MAX_STATE_BYTES - 20), [math.inf], Lock()])
def test_small_state_is_kept(note: Any) -> None:
    assert invoke_with_state(writes(note), view(state={})) == 3


def test_too_much_state_voids_the_answer() -> None:
    answer = invoke_with_state(writes("x" * 2**20), view(state={}))
    assert answer == StateTooLarge(2**20 + len('{"note":""}'), MAX_STATE_BYTES)
    assert str(parse_answer(answer)) == (
        "wrote 1024 KiB into view.state, which may have 64 KiB; what it wrote is dropped"
    )
    guard = Guard("m", ScalingLimits(max_replicas=4), "mine")
    guard.decide(view(target=1), Wish(2))
    record = guard.decide(view(target=2), answer)
    assert record is not None
    assert (guard.target, record.problem.startswith("wrote 1024 KiB")) == (2, True)


def test_unsavable_state_does_not_count() -> None:
    assert savable_state({"lock": Lock(), "kept": [1, "a"]}) == {"kept": [1, "a"]}
    assert state_size({"lock": Lock(), "kept": [1, "a"]}) == len('{"kept":[1,"a"]}')


def test_state_is_copied_where_possible() -> None:
    state: dict[str, Any] = {"seen": [1]}
    copy_state(state)["seen"].append(2)
    assert state == {"seen": [1]}
    odd = {"lock": Lock()}
    assert copy_state(odd) is odd
