from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.placement.asks import Ask, Claim, EngineAbility, Need, Place, Tier
from pointsman.placement.devices import Devices
from pointsman.placement.fleet import FREE_CPUS, FREE_MEMORY, FREE_SHARE, Fleet
from pointsman.placement.fragmentation import (
    LOST,
    MAX_KINDS,
    MIXTURE,
    PARTS,
    AskKind,
    Fragmentation,
    Make,
    Workload,
    hole_values,
)
from pointsman.types import Gpu, Worker

GIB = 1 << 30


def worker(
    name: str, gpus: int = 2, cpus: float = 32, memory: int = 128, model: str = "a", shareable: bool = True
) -> Worker:
    cards = tuple(Gpu(index=index, memory_bytes=80 * GIB, model=model, shareable=shareable) for index in range(gpus))
    return Worker(name=name, cpus=cpus, memory_bytes=memory * GIB, gpus=cards)


def ask(share: float | None, gpus: int = 1, cpus: float = 1, memory: int = 1, gpu_gib: int = 0, **more: object) -> Ask:
    need = Need.fixed(gpu_bytes=gpu_gib * GIB, host_bytes=memory * GIB, gpus=gpus)
    return Ask(instance_id="x", need=need, cpus=cpus, gpu_share=share, **more)  # type: ignore[arg-type]


def fragmentation(fleet: Fleet, workload: Sequence[Ask]) -> Fragmentation:
    return Fragmentation(fleet, Workload(workload), lambda: Devices(fleet))


def claim(fleet: Fleet, instance: str, where: str, gpu: int | None, share: float = 0.0, cpus: float = 0.0) -> None:
    place = Place(tier=Tier.ONE_GPU, claims=(Claim(worker=where, gpu=gpu, gpu_share=share, cpus=cpus),))
    fleet.claim(instance, place)


def best(fleet: Fleet, workload: Sequence[Ask], wanted: Ask, gpus: int = 1) -> tuple[str, str]:
    """(worker, its GPU) where fragmentation grows least."""
    growth = fragmentation(fleet, workload).growth(wanted, gpus)
    row = int(np.argmin(growth.amount))
    return str(fleet.workers[row]), str(fleet.gpus[int(growth.device[row])])


# Where an ask goes


def test_two_halves_share_a_gpu() -> None:
    fleet = Fleet([worker("w1"), worker("w2")])
    claim(fleet, "first", "w2", 1, 0.47)
    assert best(fleet, [ask(0.47), ask(1.0)], ask(0.47)) == ("w2", "w2/gpu1")


def test_a_small_ask_goes_where_nothing_else_can() -> None:
    fleet = Fleet([worker("w1", gpus=1), worker("w2", gpus=1), worker("w3", gpus=1)])
    claim(fleet, "half", "w2", 0, 0.47)
    claim(fleet, "most", "w3", 0, 0.81)
    workload = [ask(0.81)] * 10 + [ask(0.47)] * 10 + [ask(0.16)]
    assert best(fleet, workload, ask(0.16)) == ("w3", "w3/gpu0")


def test_an_ask_for_many_cpus_goes_to_a_worker_with_many() -> None:
    fleet = Fleet([worker("few", cpus=16), worker("plenty", cpus=96)])
    assert best(fleet, [ask(1.0, cpus=8)], ask(1.0, cpus=12))[0] == "plenty"
    assert best(fleet, [ask(1.0, cpus=8)], ask(None, gpus=0, cpus=12), gpus=0)[0] == "plenty"


def test_an_ask_without_gpus_goes_to_a_worker_without_gpus() -> None:
    fleet = Fleet([worker("gpus", cpus=16), worker("none", gpus=0, cpus=16)])
    assert best(fleet, [ask(1.0, cpus=8)], ask(None, gpus=0, cpus=9), gpus=0)[0] == "none"


def test_a_scarce_gpu_model_is_kept_for_asks_that_need_it() -> None:
    fleet = Fleet([worker("scarce", model="b"), worker("common", model="a")])
    workload = [ask(1.0), ask(1.0, gpu_models=frozenset({"b"}))]
    assert best(fleet, workload, ask(1.0))[0] == "common"
    assert best(fleet, workload, ask(1.0, gpu_models=frozenset({"b"})))[0] == "scarce"


def test_a_whole_worker_is_kept_for_asks_that_need_all_its_gpus() -> None:
    fleet = Fleet([worker("whole"), worker("begun")])
    claim(fleet, "first", "begun", 0, 1.0)
    assert best(fleet, [ask(1.0), ask(1.0, gpus=2)], ask(1.0)) == ("begun", "begun/gpu1")


def test_memory_alone_makes_shares_too() -> None:
    fleet = Fleet([worker("w1"), worker("w2")])
    place = Place(tier=Tier.ONE_GPU, claims=(Claim(worker="w2", gpu=0, gpu_bytes=40 * GIB),))
    fleet.claim("first", place)
    half = ask(None, gpu_gib=40)
    assert best(fleet, [half, ask(None, gpu_gib=80)], half) == ("w2", "w2/gpu0")


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        (ask(0.3), (1, 0.3)),
        (ask(0.3, exclusive=True), (1, 1.0)),
        (ask(None, gpu_gib=20), (1, 0.25)),
        (ask(0.3, gpu_gib=40), (1, 0.5)),
        (ask(1.0, gpus=4), (4, 1.0)),
        (ask(None, gpu_gib=81), None),
        (ask(0.3, gpu_models=frozenset({"a", "b"})), (1, 0.3)),
        (ask(0.3, gpu_models=frozenset({"b"})), None),
        (ask(0.3, engine=EngineAbility(vendors=frozenset({"amd"}))), None),
    ],
)
def test_what_a_kind_of_ask_takes_of_a_make_of_gpu(wanted: Ask, taken: tuple[int, float] | None) -> None:
    assert AskKind.of(wanted).on(Make("a", "nvidia", 80.0 * GIB)) == taken


def test_a_model_that_can_be_divided_takes_as_few_gpus_as_hold_it() -> None:
    need = Need(layer_bytes=(60 * GIB, 60 * GIB), tensor_parallel_sizes=(1, 2, 4))
    kind = AskKind.of(Ask(instance_id="x", need=need))
    assert kind.on(Make("a", "nvidia", 80.0 * GIB)) == (2, 0.75)
    assert kind.on(Make("a", "nvidia", 40.0 * GIB)) == (4, 0.75)


# How much it grows


@pytest.mark.parametrize(
    ("wanted", "gpus", "fits"),
    [
        (ask(0.5), 1, True),
        (ask(0.6), 1, False),
        (ask(0.5, cpus=9), 1, False),
        (ask(0.5, memory=129), 1, False),
        (ask(0.5, exclusive=True), 1, False),
        (ask(None, gpu_gib=80), 1, True),  # no memory is claimed
        (ask(0.5, gpus=2), 2, False),
        (ask(None, gpus=0), 0, True),
        (ask(0.5, gpu_models=frozenset({"b"})), 1, False),
    ],
)
def test_where_it_does_not_fit_growth_is_endless(wanted: Ask, gpus: int, fits: bool) -> None:
    fleet = Fleet([worker("w1", gpus=1, cpus=8)])
    claim(fleet, "first", "w1", 0, 0.5)
    assert np.isfinite(fragmentation(fleet, [ask(0.5)]).growth(wanted, gpus).amount[0]) == fits


def test_an_exclusive_ask_takes_the_whole_gpu() -> None:
    shared, alone = ask(0.3), ask(0.3, exclusive=True)
    for fleet, wanted in ((Fleet([worker("w1")]), alone), (Fleet([worker("w1", shareable=False)]), shared)):
        whole = fragmentation(Fleet([worker("w1")]), [shared]).growth(ask(1.0), 1)
        assert fragmentation(fleet, [shared]).growth(wanted, 1).amount == pytest.approx(whole.amount)


def test_without_a_workload_all_places_are_equal_but_for_what_is_taken() -> None:
    fleet = Fleet([worker("w1"), worker("w2", cpus=8)])
    growth = fragmentation(fleet, []).growth(ask(0.5), 1)
    assert growth.amount[0] == growth.amount[1]


def test_fleets_without_gpus_or_workers() -> None:
    assert len(fragmentation(Fleet(), [ask(1.0)]).growth(ask(1.0), 1).amount) == 0
    assert fragmentation(Fleet([worker("w1", gpus=0)]), [ask(1.0)]).growth(ask(1.0), 1).amount[0] == np.inf


def test_a_workload_counts_equal_asks_and_keeps_the_most_common() -> None:
    many = [ask(0.01 * number, cpus=number) for number in range(1, 90)]
    workload = Workload([*many, ask(0.5, cpus=50), ask(None, gpus=0)])
    assert len(workload.kinds) == MAX_KINDS
    assert workload.kinds[0].cpus == 50
    assert sum(workload.weights) == pytest.approx(1.0)
    assert workload.weights[0] == 2 * workload.weights[1]


# Against the definition

SHARES = (0.05, 0.16, 0.23, 0.32, 0.47, 0.5, 0.65, 0.81, 1.0)
KINDS = st.builds(
    ask,
    st.sampled_from(SHARES),
    gpus=st.just(1),
    cpus=st.sampled_from((0.0, 1.0, 3.5, 8.0, 12.0)),
    memory=st.sampled_from((1, 16, 60)),
    gpu_models=st.sampled_from((frozenset[str](), frozenset({"b"}))),
)
SEVERAL = st.builds(ask, st.sampled_from((0.4, 1.0)), gpus=st.sampled_from((2, 3)), cpus=st.sampled_from((2.0, 9.0)))
FLEETS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from((8.0, 20.0, 64.0)), st.sampled_from("ab")), min_size=1, max_size=4
)


def by_definition(fleet: Fleet, row: int, workload: Workload) -> float:
    """The fragmentation of one worker, in the words of the module."""
    host = fleet.workers[row]
    free = [round(float(fleet.gpus.columns[FREE_SHARE][device.row]), 6) for device in host.devices]
    cpus, memory = float(fleet.workers.columns[FREE_CPUS][row]), float(fleet.workers.columns[FREE_MEMORY][row])
    if not free:
        return 0.0
    able = [not kind.gpu_models or host.worker.gpus[0].model in kind.gpu_models for kind in workload.kinds]
    demand: dict[int, float] = {}
    unused = 0.0
    for kind, weight, may in zip(workload.kinds, workload.weights, able, strict=True):
        gpus, share = kind.need.tensor_parallel_sizes[0], kind.gpu_share or 0.0
        roomy = [part for part in free if part >= share - 1e-6]
        runs = may and len(roomy) >= gpus and cpus >= kind.cpus - 1e-6 and memory >= kind.need.host_bytes
        lasts = min(cpus / kind.cpus if kind.cpus else np.inf, memory / kind.need.host_bytes) * gpus * share
        unused += weight * (sum(free) - (min(sum(roomy), MIXTURE * lasts) if runs else 0.0))
        if may:
            demand[round(share * PARTS)] = demand.get(round(share * PARTS), 0.0) + weight * gpus
    values = hole_values(demand)
    lost = sum(part - float(values[int(part * PARTS + 1e-6)]) for part in free)
    return LOST * lost + unused if workload.kinds else LOST * sum(free) + sum(free)


@given(FLEETS, st.lists(st.one_of(KINDS, SEVERAL), min_size=1, max_size=6), st.data())
def test_growth_is_the_difference_of_what_is_and_what_would_be(
    machines: list[tuple[int, float, str]], typical: list[Ask], data: st.DataObject
) -> None:
    fleet = Fleet([worker(f"w{n}", gpus, cpus, model=model) for n, (gpus, cpus, model) in enumerate(machines)])
    workload = Workload(typical)
    remembering = fragmentation(fleet, typical)
    for step in range(data.draw(st.integers(1, 8))):
        wanted = data.draw(st.sampled_from(typical))
        gpus = wanted.need.tensor_parallel_sizes[0]
        growth = remembering.growth(wanted, gpus)
        anew = fragmentation(fleet, typical).growth(wanted, gpus)
        assert growth.amount.tolist() == anew.amount.tolist()
        fitting = np.flatnonzero(np.isfinite(growth.amount))
        if not len(fitting) or (step and data.draw(st.booleans())):
            gone = data.draw(st.sampled_from([*fleet.occupants, "unknown"]))
            fleet.release(gone)
            continue
        row = int(data.draw(st.sampled_from(fitting.tolist())))
        before = by_definition(fleet, row, workload)
        options = options_on(fleet, row, wanted, gpus)
        spoilt = []
        for devices in options:
            take(fleet, "tried", wanted, row, devices)
            spoilt.append(by_definition(fleet, row, workload) - before)
            fleet.release("tried")
        assert growth.amount[row] == pytest.approx(min(spoilt), abs=1e-6)
        chosen = [devices for devices, worse in zip(options, spoilt, strict=True) if worse <= min(spoilt) + 1e-6]
        if gpus == 1:
            assert int(growth.device[row]) in [devices[0] for devices in chosen]
        take(fleet, f"i{step}", wanted, row, chosen[0])


def options_on(fleet: Fleet, row: int, wanted: Ask, gpus: int) -> list[list[int]]:
    """Rows of the GPUs it might take: any one, or the fullest that will do."""
    free = np.asarray(fleet.gpus.columns[FREE_SHARE])
    fitting = [
        device.row for device in fleet.workers[row].devices if free[device.row] >= (wanted.gpu_share or 0) - 1e-9
    ]
    if gpus == 1:
        return [[device] for device in fitting]
    return [sorted(fitting, key=lambda device: (round(float(free[device]), 6), device))[:gpus]]


def take(fleet: Fleet, instance: str, wanted: Ask, row: int, devices: list[int]) -> None:
    name = str(fleet.workers[row])
    host = Claim(worker=name, cpus=wanted.cpus, memory_bytes=wanted.need.host_bytes)
    share = wanted.gpu_share or 0.0
    cards = (Claim(worker=name, gpu=fleet.gpus[device].gpu.index, gpu_share=share) for device in devices)
    fleet.claim(instance, Place(tier=Tier.ONE_GPU, claims=(host, *cards)))


def test_a_worker_that_comes_is_seen() -> None:
    fleet = Fleet([worker("w1")])
    watching = fragmentation(fleet, [ask(1.0)])
    assert len(watching.growth(ask(1.0), 1).amount) == 1
    fleet.put(worker("w2", gpus=4))
    assert len(watching.growth(ask(1.0), 1).amount) == 2
