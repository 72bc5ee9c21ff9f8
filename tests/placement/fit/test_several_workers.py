"""The third tier: pipeline stages, on several workers if need be."""

from typing import Any

import pytest

from pointsman.placement.asks import Ask, EngineAbility, Place
from pointsman.placement.fit import FitsOnSeveralWorkers
from pointsman.placement.fleet import Fleet
from tests.placement.fleets import GIB, ask, fit_of, fleet, gpu, gpus_of, need, places_in, why_not, worker


def eight(size: float = 10, **more: Any) -> Ask:
    return ask(*(size,) * 8, several_workers=True, **more)


def only_place(asked: Ask, where: Fleet) -> Place | None:
    found = places_in(FitsOnSeveralWorkers, asked, where)
    assert len(found) < 2
    return next(iter(found.values()), None)


@pytest.mark.parametrize(
    ("asked", "where", "gpus", "tp", "layers"),
    [
        (eight(), fleet(worker("w0", 40), worker("w1", 40)), "w0/0 w1/0", 1, (4, 4)),
        (eight(), fleet(worker("w0", 20), worker("w1", 60)), "w1/0 w0/0", 1, (6, 2)),
        (eight(), fleet(worker("w0", 40), worker("w1", 30)), "", 1, ()),
        (eight(), fleet(worker("w0", 30), worker("w1", 30), worker("w2", 30)), "w0/0 w1/0 w2/0", 1, (3, 3, 2)),
        (eight(), fleet(worker("w0", 30), worker("w1", 50), worker("w2", 30)), "w1/0 w0/0", 1, (5, 3)),
        (eight(), fleet(worker("w0", 20, 20), worker("w1", 20, 20)), "w0/0 w0/1 w1/0 w1/1", 2, (4, 4)),
        (eight(), fleet(worker("w0", 20, 20), worker("w1", 40)), "w0/0 w0/1 w1/0", 1, (2, 2, 4)),  # unequal counts
        (eight(), fleet(worker("w0", 20, 20, 40)), "w0/2 w0/0 w0/1", 1, (4, 2, 2)),  # also in one
        (eight(), fleet(worker("w0", 40), worker("w1", gpu(0, 40, model="A100"))), "", 1, ()),
        (
            eight(mixed_gpus="generations"),
            fleet(worker("w0", 40), worker("w1", gpu(0, 40, model="A100"))),
            "w0/0 w1/0",
            1,
            (4, 4),
        ),
        (
            eight(),
            fleet(worker("w0", 40), worker("w1", *(gpu(n, 20, model="A100") for n in range(4)))),
            "w1/0 w1/1 w1/2 w1/3",
            4,
            (8,),
        ),
        (eight(several_gpus=False), fleet(worker("w0", 20, 20), worker("w1", 40)), "w0/0 w0/1 w1/0", 1, (2, 2, 4)),
        (
            eight(engine=EngineAbility(tensor_parallel=False)),
            fleet(worker("w0", 20, 20), worker("w1", 20, 20)),
            "w0/0 w0/1 w1/0 w1/1",
            1,
            (2, 2, 2, 2),
        ),
        (eight(cpus=8), fleet(worker("w0", 40), worker("w1", 40, cpus=4)), "", 1, ()),
        (
            ask(*(10,) * 4, of=need(*(10,) * 4, last=30), several_workers=True),
            fleet(worker("w0", 50), worker("w1", 20)),
            "w1/0 w0/0",
            1,
            (2, 2),
        ),
    ],
)
def test_how_it_is_split(asked: Ask, where: Fleet, gpus: str, tp: int, layers: tuple[int, ...]) -> None:
    found = only_place(asked, where)
    assert ("" if found is None else gpus_of(found)) == gpus
    if found is not None:
        assert (found.tensor_parallel_size, found.stage_layers) == (tp, layers)
        assert found.pipeline_parallel_size == len(layers)


def test_few_workers_rather_than_many() -> None:
    small = [worker(f"s{number}", 30, 30) for number in range(4)]
    where = fleet(*small[:2], worker("big", 60, 60, 60, 60), *small[2:])
    found = only_place(eight(25), where)
    assert found is not None
    assert found.workers == ("big",)


def test_a_fleet_of_many_takes_those_with_the_most_room() -> None:
    where = fleet(*(worker(f"w{number}", *[20 + number % 5] * 4) for number in range(40)))
    found = only_place(eight(30), where)
    assert found is not None
    assert found.workers == ("w4", "w9", "w14")


def test_cpus_and_memory_are_claimed_once_on_each_worker() -> None:
    asked = ask(of=need(*(10,) * 8, host=5, sizes=(1,)), cpus=3, several_workers=True)
    found = only_place(asked, fleet(worker("w0", 20, 20), worker("w1", 40)))
    assert found is not None
    claims = [(one.worker, one.cpus, one.memory_bytes // GIB, one.gpu_bytes // GIB) for one in found.claims]
    assert claims == [("w0", 3, 5, 20), ("w0", 0, 0, 20), ("w1", 3, 5, 40)]


def test_unified_memory_is_counted_once() -> None:
    shared = worker("w0", 40, 40, memory=50, unified_memory=True)
    assert only_place(eight(), fleet(shared)) is None
    found = only_place(ask(*(10,) * 5, of=need(*(10,) * 5, sizes=(1,)), several_workers=True), fleet(shared))
    assert found is not None
    assert sum(one.gpu_bytes for one in found.claims) == 50 * GIB


@pytest.mark.parametrize(
    ("asked", "reasons"),
    [
        (
            eight(30),
            {
                "w0": "too little room in total: needs 240.0 GiB and room for the engine on each GPU, at most "
                "120.0 GiB free on GPUs of one model",
                "w1": "no GPU",
                "w2": "too few CPUs: needs 0, -1 free",
            },
        ),
        (
            ask(30, 30),
            dict.fromkeys(("w0", "w1", "w2"), "not allowed: severalWorkers is off"),
        ),
        (
            ask(30, several_workers=True),
            dict.fromkeys(("w0", "w1", "w2"), "not allowed: the model has one layer"),
        ),
        (
            eight(engine=EngineAbility(distributed=False)),
            dict.fromkeys(("w0", "w1", "w2"), "not allowed: the engine cannot span workers"),
        ),
        (
            ask(of=need(30, 30, sizes=(2,)), several_workers=True, several_gpus=False),
            dict.fromkeys(("w0", "w1", "w2"), "not allowed: the model must be split across GPUs (severalGpus is off)"),
        ),
    ],
)
def test_why_not(asked: Ask, reasons: dict[str, str]) -> None:
    where = fleet(worker("w0", 80, 40), worker("w1"), worker("w2", 80, cpus=-1))
    assert why_not(FitsOnSeveralWorkers, asked, where) == reasons


def test_why_the_others_are_not_chosen() -> None:
    where = fleet(worker("w0", 40), worker("w1", 40), worker("w2", 30), worker("w3", 30, cpus=1))
    told = why_not(FitsOnSeveralWorkers, eight(cpus=2), where)
    assert told == {
        "w1": "has a later stage",
        "w2": "not needed: the stages are elsewhere",
        "w3": "too few CPUs: needs 2, 1 free",
    }
    assert fit_of(FitsOnSeveralWorkers, eight(), where).fits.tolist() == [True, False, False, False]
