"""Which instances stop when there are too many."""

import pytest

from pointsman.placement.asks import Arrangement, Claim, Place, Tier
from pointsman.placement.fleet import Fleet
from pointsman.placement.moves import victims
from pointsman.types import Gpu, Worker

GIB = 1 << 30


def fleet_with(*instances: tuple[str, str, Tier]) -> Fleet:
    """Three workers of four GPUs, and instances on them: (name, worker, tier)."""
    gpus = tuple(Gpu(index=index, memory_bytes=80 * GIB) for index in range(4))
    fleet = Fleet(Worker(name=f"w{number}", cpus=64, memory_bytes=512 * GIB, gpus=gpus) for number in range(3))
    for number, (name, worker, tier) in enumerate(instances):
        gpu = None if tier is Tier.CPU else number % 4
        fleet.claim(name, Place(tier=tier, claims=(Claim(worker=worker, gpu=gpu, gpu_bytes=GIB),)), "d")
    return fleet


ONE, PART, CPU = Tier.ONE_GPU, Tier.PARTIAL_OFFLOAD, Tier.CPU


@pytest.mark.parametrize(
    ("instances", "unhealthy", "arrangement", "count", "gone"),
    [
        ([("a", "w0", ONE), ("b", "w0", ONE)], ["a"], "spread", 1, ["a"]),
        ([("a", "w0", ONE), ("b", "w1", PART), ("c", "w2", ONE)], [], "spread", 1, ["b"]),
        ([("a", "w0", ONE), ("b", "w1", PART), ("c", "w2", CPU)], [], "spread", 2, ["c", "b"]),
        ([("a", "w0", PART), ("b", "w1", ONE)], ["b"], "spread", 1, ["b"]),
        ([("a", "w0", ONE), ("b", "w0", ONE), ("c", "w1", ONE)], [], "spread", 1, ["b"]),
        ([("a", "w0", ONE), ("b", "w0", ONE), ("c", "w1", ONE)], [], "binpack", 1, ["c"]),
        ([("a", "w0", ONE), ("b", "w0", ONE), ("c", "w1", ONE), ("d", "w1", ONE)], [], "spread", 2, ["d", "b"]),
        ([("a", "w0", ONE), ("b", "w1", ONE)], [], "binpack", 5, ["b", "a"]),
        ([("a", "w0", ONE)], [], "binpack", 0, []),
    ],
)
def test_victims_in_order(
    instances: list[tuple[str, str, Tier]], unhealthy: list[str], arrangement: str, count: int, gone: list[str]
) -> None:
    fleet = fleet_with(*instances)
    names = [name for name, _, _ in instances]
    assert victims(fleet, names, count, unhealthy=unhealthy, arrangement=Arrangement(arrangement)) == gone
    assert list(fleet.occupants) == names, "nothing is done"


def test_instances_without_a_place_can_be_victims() -> None:
    fleet = fleet_with(("a", "w0", ONE))
    assert victims(fleet, ["a", "elsewhere"], 2, unhealthy=["elsewhere"]) == ["elsewhere", "a"]


def test_of_equals_the_coldest_goes_and_of_those_the_newest() -> None:
    fleet = fleet_with(("a", "w0", ONE), ("b", "w1", ONE), ("c", "w2", ONE))
    assert victims(fleet, ["a", "b", "c"], 2, warmth={"a": 1.0, "b": 9.0, "c": 5.0}) == ["a", "c"]
    assert victims(fleet, ["a", "b", "c"], 1) == ["c"]
    crowded = fleet_with(("a", "w0", ONE), ("b", "w0", ONE), ("c", "w1", ONE))
    spread = victims(crowded, ["a", "b", "c"], 1, arrangement=Arrangement.SPREAD, warmth={"a": 9.0, "b": 8.0})
    assert spread == ["b"], "warmth only breaks ties"
