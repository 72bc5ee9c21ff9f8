"""Which instances make room on a machine that is too small. Nothing is changed."""

import pytest

from pointsman.control.desired import DesiredDeployment
from pointsman.control.preemption import Victim, fewest_victims, what_would_help
from pointsman.placement.asks import Ask, EngineAbility
from pointsman.placement.fleet import Fleet
from tests.placement.fleets import fleet, need, worker


def ask(size: float) -> Ask:
    return Ask(instance_id="", need=need(size), engine=EngineAbility(name="any"))


def full() -> Fleet:
    """Two GPUs of 24 GiB: on one a small and a large instance, on the other one that fills it."""
    return fleet(worker("w", 24, 24), small1=("w", 0, 6), large1=("w", 0, 16), huge1=("w", 1, 22))


IDLE = [Victim("small", ("small1",)), Victim("large", ("large1",)), Victim("huge", ("huge1",))]
"""The least recently used first."""


@pytest.mark.parametrize(
    ("size", "leaving", "idle", "goes"),
    [
        (1.0, [], IDLE, []),  # there is room
        (5.0, [], IDLE, ["small"]),
        (12.0, [], IDLE, ["large"]),  # small alone would not do, and need not go as well
        (20.0, [], IDLE, ["small", "large"]),
        (20.0, [], IDLE[1:], ["huge"]),
        (20.0, ["huge1"], IDLE, []),  # one is leaving already
        (23.9, [], IDLE[:1], []),  # it would not help
        (5.0, [], [], []),
    ],
)
def test_the_fewest_victims_are_chosen_in_their_order(
    size: float, leaving: list[str], idle: list[Victim], goes: list[str]
) -> None:
    there = full()
    before = there.snapshot()
    assert [one.deployment for one in fewest_victims(ask(size), there, leaving, idle)] == goes
    assert there.snapshot() == before


def test_hints_say_what_would_help() -> None:
    there = fleet(worker("w", 24, 24), small1=("w", 0, 6), large1=("w", 1, 10))
    hints = "; ".join(
        map(str, what_would_help(ask(20), there, [DesiredDeployment(name="small", model="m", ask=ask(6))]))
    )
    assert hints.endswith("there would be room if these moved: small1 from w: gpu0 (6.0 GiB) to w: gpu1 (6.0 GiB)")
    assert "largest free" not in hints, "the refusal has that"
    assert len(hints) < 400


def test_hints_say_which_instances_could_move() -> None:
    """Six of each GPU are taken, and 20 are needed: there is room if both of the small ones share a GPU."""
    apart = fleet(worker("w", 24, 24), small1=("w", 0, 6), small2=("w", 1, 6))
    before = apart.snapshot()
    movable = DesiredDeployment(name="small", model="m", ask=ask(6))
    hints = what_would_help(ask(20), apart, [movable, DesiredDeployment(name="elsewhere", model="m")])
    assert str(hints[-1]).startswith("there would be room if these moved: small")
    assert not any(hint.code == "room-after-moving" for hint in what_would_help(ask(20), apart, [])), (
        "needs are unknown"
    )
    assert apart.snapshot() == before
