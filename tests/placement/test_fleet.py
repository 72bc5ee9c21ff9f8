"""Workers, GPUs and claims: counted once, for as long as their worker exists."""

import pytest

from pointsman.errors import PointsmanError, UnknownName
from pointsman.placement.asks import Claim, Place, Tier
from pointsman.placement.fleet import (
    EXCLUSIVE,
    FREE_BYTES,
    FREE_CPUS,
    FREE_MEMORY,
    FREE_SHARE,
    GPUS,
    INSTANCES,
    TENANTS,
    TOTAL_BYTES,
    TOTAL_MEMORY,
    WORKER,
    Fleet,
    Occupant,
)
from pointsman.placement.placer import Placer
from tests.placement.fleets import GIB, ask, fleet, gpu, place, placed, worker


def of_gpus(where: Fleet, name: str) -> list[float]:
    """A column of the GPUs; bytes in GiB."""
    scale = GIB if name.endswith("bytes") else 1
    return [round(float(value) / scale, 6) for value in where.gpus.columns[name]]


def of_workers(where: Fleet, name: str) -> list[float]:
    scale = GIB if name.endswith("bytes") else 1
    return [float(value) / scale for value in where.workers.columns[name]]


ACROSS = Place(
    tier=Tier.SEVERAL_WORKERS,
    claims=(
        Claim(worker="w0", gpu=0, gpu_bytes=10 * GIB, cpus=2, memory_bytes=GIB),
        Claim(worker="w0", gpu=1, gpu_bytes=20 * GIB),
        Claim(worker="w1", gpu=0, gpu_bytes=30 * GIB, cpus=2, memory_bytes=GIB, gpu_share=0.5),
    ),
)


def test_what_is_free_at_first() -> None:
    where = fleet(
        worker("w0", 80, gpu(1, 40, used_bytes=10 * GIB), reserved_gpu_bytes=GIB, reserved_memory_bytes=2 * GIB),
        worker("w1", memory=64, cpus=8, used_memory_bytes=4 * GIB),
    )
    assert of_gpus(where, TOTAL_BYTES) == [79, 39]
    assert of_gpus(where, FREE_BYTES) == [79, 29]
    assert of_gpus(where, FREE_SHARE) == [1, 1]
    assert of_gpus(where, WORKER) == [0, 0]
    assert of_workers(where, TOTAL_MEMORY) == [510, 64]
    assert of_workers(where, FREE_MEMORY) == [510, 60]
    assert of_workers(where, FREE_CPUS) == [64, 8]
    assert of_workers(where, GPUS) == [2, 0]
    assert [str(device) for device in where.gpus] == ["w0/gpu0", "w0/gpu1"]
    assert (len(where), "w1" in where, "w9" in where) == (2, True, False)


def test_a_claim_counts_wherever_it_has_a_part() -> None:
    where = fleet(worker("w0", 80, 80), worker("w1", 80))
    where.claim("i", ACROSS, "d", 3)
    assert of_gpus(where, FREE_BYTES) == [70, 60, 50]
    assert of_gpus(where, FREE_SHARE) == [1, 1, 0.5]
    assert of_gpus(where, TENANTS) == [1, 1, 1]
    assert of_workers(where, FREE_CPUS) == [62, 62]
    assert of_workers(where, FREE_MEMORY) == [511, 511]
    assert of_workers(where, INSTANCES) == [1, 1]
    known = where.occupants
    assert known["i"] == Occupant("i", ACROSS, "d", 3)
    assert known.on("w0") == known.on("w1") == known.of("d") == [known["i"]]
    assert known.on_gpus("d", "w0") == {0: 1, 1: 1}
    assert (known.on_gpus("e", "w0"), known.on_gpus("", "w0")) == ({}, {})


def test_it_is_released_once() -> None:
    where = fleet(worker("w0", 80, 80), worker("w1", 80))
    where.claim("i", ACROSS, "d")
    assert (where.release("i"), where.release("i"), where.release("other")) == (True, False, False)
    assert of_gpus(where, FREE_BYTES) == [80, 80, 80]
    assert (len(where.occupants), where.occupants.on("w0"), where.occupants.of("d")) == (0, [], [])


def test_fractions_leave_no_residue() -> None:
    parts = (0.7, 0.2, 0.1)
    where = fleet(worker("w0", 80, cpus=4))
    for part in parts:
        where.claim(str(part), place("w0", 0, 1, cpus=part, gpu_share=part))
    for part in parts:
        where.release(str(part))
    assert (float(where.gpus.columns[FREE_SHARE][0]), float(where.workers.columns[FREE_CPUS][0])) == (1.0, 4.0)


def test_gpus_of_unified_memory_use_that_of_the_machine() -> None:
    where = fleet(worker("w0", 80, memory=100, unified_memory=True), a=("w0", 0, 30))
    assert (of_gpus(where, FREE_BYTES), of_workers(where, FREE_MEMORY)) == ([50], [70])


@pytest.mark.parametrize(("shareable", "exclusive", "alone"), [(True, False, 0), (True, True, 1), (False, False, 1)])
def test_exclusive_gpus(shareable: bool, exclusive: bool, alone: int) -> None:
    where = fleet(worker("w0", gpu(0, 80, shareable=shareable)))
    where.claim("i", place("w0", 0, 1, exclusive=exclusive))
    assert of_gpus(where, EXCLUSIVE) == [alone]
    where.release("i")
    assert of_gpus(where, EXCLUSIVE) == [0]


def test_a_broken_claim_changes_nothing() -> None:
    where = fleet(worker("w0", 80), a=("w0", 0, 10))
    with pytest.raises(PointsmanError, match='instance "a" has a place already; release it first'):
        where.claim("a", place("w0", 0, 10))
    with pytest.raises(UnknownName, match='unknown worker "w9"'):
        where.claim("b", place("w9", 0, 10))
    with pytest.raises(UnknownName, match='unknown GPU of worker "w0" "7"; known: 0'):
        where.claim("b", place("w0", 7, 10))
    assert (of_gpus(where, FREE_BYTES), list(where.occupants)) == ([70], ["a"])


def test_removing_a_worker_releases_what_instances_have_there_and_nothing_else() -> None:
    where = fleet(worker("w0", 80, 80), worker("w1", 80), worker("w2", 80), b=("w1", 0, 5), c=("w2", 0, 7))
    where.claim("a", ACROSS)
    before = where.generation
    assert where.remove("w0") == ["a"]
    assert where.generation > before
    assert list(where.occupants) == ["b", "c", "a"]
    assert where.occupants["a"].place.workers == ("w1",), "its process may run there"
    assert of_gpus(where, FREE_BYTES) == [75 - 30, 73]
    assert where.release("a")
    assert of_gpus(where, FREE_BYTES) == [75, 73]
    assert [(str(host), host.row) for host in where.workers] == [("w1", 0), ("w2", 1)]
    with pytest.raises(UnknownName, match='unknown worker "w0"'):
        where.remove("w0")
    where.put(worker("w0", 80, 80))
    assert (where.occupants.on("w0"), of_gpus(where, FREE_BYTES)) == ([], [75, 73, 80, 80])


def test_claims_stay_when_a_worker_changes() -> None:
    where = fleet(worker("w0", 80), worker("w1", 80), a=("w0", 0, 10))
    assert where.put(worker("w0", gpu(0, 80, used_bytes=75 * GIB), memory=9), worker("w2", 24)) == []
    assert of_gpus(where, FREE_BYTES) == [-5, 80, 24]
    assert [str(host) for host in where.workers] == ["w0", "w1", "w2"], "known workers keep their rows"
    where.release("a")
    assert of_gpus(where, FREE_BYTES) == [5, 80, 24]


def test_an_instance_whose_gpu_is_gone_keeps_the_rest_of_its_place() -> None:
    where = fleet(worker("w0", 80, 80), worker("w1", 80), b=("w0", 0, 5))
    where.claim("a", ACROSS)
    assert where.put(worker("w0", 80)) == ["a"]
    assert list(where.occupants) == ["b", "a"]
    assert of_gpus(where, FREE_BYTES) == [75 - 10, 80 - 30]
    assert where.put(worker("w0", 80)) == [], "it is told once"
    assert where.release("a")
    assert of_gpus(where, FREE_BYTES) == [75, 80]


def test_two_gpus_with_one_index_are_refused_and_nothing_is_lost() -> None:
    twins = worker("w0", gpu(0, 80), gpu(0, 80))
    with pytest.raises(PointsmanError, match='worker "w0" has two GPUs with the same index'):
        fleet(twins)
    where = fleet(worker("w0", 80, 80), a=("w0", 1, 5))
    with pytest.raises(PointsmanError, match="same index"):
        where.put(twins)
    assert (of_gpus(where, FREE_BYTES), list(where.occupants)) == ([80, 75], ["a"])


def test_a_copy_is_equal_and_independent() -> None:
    where = fleet(worker("w0", 80, 80), worker("w1", 80), b=("w1", 0, 5))
    where.claim("a", ACROSS, "d", -1)
    copy = where.copy()
    assert of_gpus(copy, FREE_BYTES) == of_gpus(where, FREE_BYTES)
    assert (list(copy.occupants), copy.occupants["a"]) == (["b", "a"], Occupant("a", ACROSS, "d", -1))
    copy.release("a")
    assert where.occupants["a"].place == ACROSS


def test_released_claims_do_not_change_a_placement() -> None:
    where = fleet(worker("w0", 80, 80), worker("w1", 80), worker("w2", 60), a=("w1", 0, 30))
    before = placed(ask(40), where)
    placer = Placer(where)
    for number in range(3):
        placer.take(ask(20))
        where.release("new")
        where.claim(f"x{number}", place("w2", 0, 1, gpu_share=0.3, cpus=0.1))
    for number in range(3):
        where.release(f"x{number}")
    assert placed(ask(40), where) == before
