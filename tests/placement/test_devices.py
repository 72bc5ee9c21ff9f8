"""The GPUs of a fleet in arrays."""

import pytest

from pointsman.placement.asks import Ask, EngineAbility
from pointsman.placement.devices import ABLE, NOT_ALONE, OTHER_KIND, SMALL_SHARE, TAKEN, Devices
from pointsman.placement.fleet import Fleet
from pointsman.selection.arrays import np
from tests.placement.fleets import GIB, ask, fleet, gpu, need, place, worker


def five() -> Fleet:
    """One GPU as it should be, one taken alone, one with a tenant, one of another maker, one that is not shared."""
    where = fleet(worker("w0", 80, 80, 80, gpu(3, 80, vendor="amd", model="MI300X"), gpu(4, 80, shareable=False)))
    where.claim("alone", place("w0", 1, 1, exclusive=True))
    where.claim("tenant", place("w0", 2, 1, gpu_share=0.6))
    return where


@pytest.mark.parametrize(
    ("asked", "obstacles"),
    [
        (ask(1), [ABLE, TAKEN, ABLE, ABLE, ABLE]),
        (ask(1, exclusive=True), [ABLE, TAKEN, NOT_ALONE, ABLE, ABLE]),
        (ask(1, gpu_share=0.5), [ABLE, TAKEN, SMALL_SHARE, ABLE, ABLE]),
        (ask(1, gpu_share=0.4), [ABLE, TAKEN, ABLE, ABLE, ABLE]),
        (ask(1, gpu_models=frozenset({"MI300X"})), [OTHER_KIND] * 3 + [ABLE, OTHER_KIND]),
        (ask(1, engine=EngineAbility(vendors=frozenset({"amd"}))), [OTHER_KIND] * 3 + [ABLE, OTHER_KIND]),
        (ask(1, gpus=frozenset({("w0", 0), ("w1", 2)})), [ABLE] + [OTHER_KIND] * 4),
    ],
)
def test_obstacles(asked: Ask, obstacles: list[int]) -> None:
    devices = Devices(five())
    assert devices.obstacles(asked).tolist() == obstacles
    assert devices.able(asked).tolist() == [found == ABLE for found in obstacles]


def test_a_gpu_that_is_not_shared_is_taken_by_its_first_tenant() -> None:
    where = five()
    devices = Devices(where)
    where.claim("own", place("w0", 4, 1))
    assert devices.obstacles(ask(1))[4] == TAKEN
    where.release("own")
    assert devices.obstacles(ask(1))[4] == ABLE


def test_what_is_free() -> None:
    where = fleet(worker("w0", 80, 40), worker("w1", 64, 64, memory=50, unified_memory=True), a=("w0", 1, 5))
    devices = Devices(where)
    assert (devices.free(ask(1)) / GIB).tolist() == [80, 35, 50, 50]
    assert (devices.free(ask(of=need(1, host=10))) / GIB).tolist() == [80, 35, 40, 40]
    assert (devices.machine_free(ask(of=need(1, host=10))) / GIB).tolist() == [np.inf, 40]
    free = devices.free(ask(1))
    where.release("a")
    assert free[1] == 35 * GIB, "a copy"


def test_per_worker() -> None:
    where = fleet(worker("none"), worker("w0", 10, 30, 20), worker("also none"), worker("w1", 5))
    devices = Devices(where)
    free = devices.free(ask(1)) / GIB
    assert devices.by_worker.smallest(free).tolist() == [np.inf, 10, np.inf, 5]
    assert devices.by_worker.largest(free).tolist() == [-np.inf, 30, -np.inf, 5]
    assert devices.by_worker.count(free >= 10).tolist() == [0, 3, 0, 0]
    assert devices.by_worker.nth_smallest(free, 2).tolist() == [np.inf, 20, np.inf, np.inf]
    assert devices.by_worker.nth_smallest(free, 9).tolist() == [np.inf] * 4
    assert devices.of(where["w1"]) == slice(3, 4)
    assert free[devices.of(where["none"])].tolist() == []


def test_a_fleet_without_gpus() -> None:
    devices = Devices(fleet(worker("w0"), worker("w1")))
    assert devices.by_worker.smallest(devices.free(ask(1))).tolist() == [np.inf, np.inf]
    assert devices.by_worker.nth_smallest(devices.free(ask(1)), 1).tolist() == [np.inf, np.inf]
    assert devices.kinds(devices.able(ask(1)), mixed=False) == []


def test_kinds_and_links() -> None:
    where = fleet(
        worker("w0", gpu(0, 80, link="x"), gpu(1, 80, link="x"), gpu(2, 80), gpu(3, 80, model="A100", link="x")),
        worker("w1", gpu(0, 80, link="x"), gpu(1, 80)),
    )
    devices = Devices(where)
    everything = devices.able(ask(1))
    models = [kind.tolist() for kind in devices.kinds(everything, mixed=False)]
    assert models == [[True, True, True, False, True, True], [False, False, False, True, False, False]]
    assert [kind.tolist() for kind in devices.kinds(everything, mixed="generations")] == [[True] * 6]
    assert devices.by_worker.count_linked(everything).tolist() == [3, 1], "links of two workers are two links"
    assert devices.by_worker.count_linked(devices.kinds(everything, mixed=False)[0]).tolist() == [2, 1]


def test_the_cache_of_masks_is_bounded() -> None:
    devices = Devices(fleet(worker("w0", 80)))
    for number in range(1000):
        assert not devices.able(ask(1, gpu_models=frozenset({str(number)}))).any()
    assert devices.able(ask(1)).all()
    assert len(devices._masks) <= 256
