"""Who makes room on a machine that is too small for all; tried out, and nothing is changed."""

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
        (20.0, ["huge1"], IDLE, []),  # somebody is on the way out already
        (23.9, [], IDLE[:1], []),  # it would not help
        (5.0, [], [], []),
    ],
)
def test_the_fewest_go_and_the_least_recently_used_first(
    size: float, leaving: list[str], idle: list[Victim], goes: list[str]
) -> None:
    there = full()
    before = there.snapshot()
    assert [one.deployment for one in fewest_victims(ask(size), there, leaving, idle)] == goes
    assert there.snapshot() == before


def test_what_would_help_is_said_in_a_few_words() -> None:
    there = fleet(worker("w", 24, 24), small1=("w", 0, 6), large1=("w", 1, 10))
    told = "; ".join(what_would_help(ask(20), there, [DesiredDeployment(name="small", model="m", ask=ask(6))]))
    assert told.endswith("there would be room if these moved: small1 from w: gpu0 (6.0 GiB) to w: gpu1 (6.0 GiB)")
    assert "largest free" not in told, "how much there is, the refusal says itself"
    assert len(told) < 400


def test_who_could_move_so_that_there_is_room_is_said() -> None:
    """Six of each GPU are taken, and 20 are needed: there is room if both of the small ones share a GPU."""
    apart = fleet(worker("w", 24, 24), small1=("w", 0, 6), small2=("w", 1, 6))
    before = apart.snapshot()
    movable = DesiredDeployment(name="small", model="m", ask=ask(6))
    told = what_would_help(ask(20), apart, [movable, DesiredDeployment(name="elsewhere", model="m")])
    assert told[-1].startswith("there would be room if these moved: small")
    assert not any("there would be room" in hint for hint in what_would_help(ask(20), apart, [])), "needs are unknown"
    assert apart.snapshot() == before
