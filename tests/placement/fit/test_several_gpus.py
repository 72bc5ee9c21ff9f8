"""The second tier: tensor parallel on GPUs of one worker."""

import pytest

from pointsman.placement.asks import Arrangement, Ask, EngineAbility, Need
from pointsman.placement.fit import FitsOnSeveralGpus
from pointsman.placement.fleet import Fleet
from pointsman.types import Gpu
from tests.placement.fleets import GIB, ask, fit_of, fleet, gpu, gpus_of, need, places_in, why_not, worker

SPREAD = Arrangement.SPREAD


def linked(*links: str, size: float = 80) -> list[Gpu]:
    return [gpu(index, size, link=link) for index, link in enumerate(links)]


@pytest.mark.parametrize(
    ("asked", "where", "places"),
    [
        (ask(100), fleet(worker("w0", 80, 80), worker("w1", 80)), {"w0": "w0/0 w0/1"}),
        (ask(100), fleet(worker("w0", 80, 80, 80, 80)), {"w0": "w0/0 w0/1"}),  # as few as will do
        (ask(200), fleet(worker("w0", 80, 80, 80, 80)), {"w0": "w0/0 w0/1 w0/2 w0/3"}),
        (ask(200), fleet(worker("w0", 80, 80, 80)), {}),  # 3 divides nothing
        (ask(400), fleet(worker("w0", 80, 80, 80, 80)), {}),
        (ask(100), fleet(worker("w0", 80, 60, 50, 49)), {"w0": "w0/2 w0/1"}),  # the fullest that will do
        (ask(100, arrangement=SPREAD), fleet(worker("w0", 50, 60, 80)), {"w0": "w0/2 w0/1"}),
        (ask(100), fleet(worker("w0", 80, gpu(1, 80, model="A100"))), {}),
        (ask(100, mixed_gpus=True), fleet(worker("w0", 80, gpu(1, 80, model="H200"))), {"w0": "w0/0 w0/1"}),
        (ask(100), fleet(worker("w0", *linked("", "x", "", "x"))), {"w0": "w0/1 w0/3"}),
        (ask(100), fleet(worker("w0", *linked("y", "x", "x", "y"))), {"w0": "w0/0 w0/3"}),  # the first of equals
        (ask(100), fleet(worker("w0", *linked("", "x", "", ""))), {"w0": "w0/0 w0/1"}),
        (ask(100), fleet(worker("w0", 80, gpu(1, 80, pcie="s"), gpu(2, 80, pcie="s"))), {"w0": "w0/1 w0/2"}),
        (
            ask(100),
            fleet(worker("w0", gpu(0, 80, numa=0), gpu(1, 80, numa=1), gpu(2, 80, numa=0))),
            {"w0": "w0/0 w0/2"},
        ),
        (ask(100), fleet(worker("w0", 80, 80, memory=99, unified_memory=True)), {}),
        (ask(100), fleet(worker("w0", 80, 80, memory=100, unified_memory=True)), {"w0": "w0/0 w0/1"}),
        (ask(of=need(100, host=1)), fleet(worker("w0", 80, 80, memory=100, unified_memory=True)), {}),
        (ask(100, exclusive=True), fleet(worker("w0", 80, 80, 80), a=("w0", 0, 1)), {"w0": "w0/1 w0/2"}),
        (ask(of=Need.fixed(30 * GIB, gpus=3)), fleet(worker("w0", 80, 80, 24, 80)), {"w0": "w0/0 w0/1 w0/3"}),
    ],
)
def test_workers_that_fit_and_their_places(asked: Ask, where: Fleet, places: dict[str, str]) -> None:
    assert {name: gpus_of(found) for name, found in places_in(FitsOnSeveralGpus, asked, where).items()} == places


def test_it_claims_a_part_of_each_gpu_and_the_rest_once() -> None:
    asked = ask(of=need(50, 50, kv=4, overhead=1, host=6), cpus=2, gpu_share=0.5)
    found = places_in(FitsOnSeveralGpus, asked, fleet(worker("w0", 60, 60)))["w0"]
    assert [(one.gpu_bytes / GIB, one.memory_bytes / GIB, one.cpus) for one in found.claims] == [(55, 6, 2), (55, 0, 0)]
    assert (found.tensor_parallel_size, found.pipeline_parallel_size) == (2, 1)
    assert {one.gpu_share for one in found.claims} == {0.5}


def test_linked_gpus_are_better() -> None:
    where = fleet(worker("w0", 80, 80), worker("w1", *linked("x", "x")), worker("w2", *linked("x", "y")))
    quality = fit_of(FitsOnSeveralGpus, ask(100), where).quality
    assert quality is not None
    assert quality.tolist() == [0, 1, 0]
    other = fleet(worker("w0", gpu(0, 80, link="x"), gpu(1, 80, link="x", model="A100"), gpu(2, 80)))
    quality = fit_of(FitsOnSeveralGpus, ask(100), other).quality
    assert quality is not None
    assert quality.tolist() == [0], "those that are linked are not of one model"


@pytest.mark.parametrize(("arrangement", "free"), [(Arrangement.BINPACK, [60, 80]), (SPREAD, [70, 80])])
def test_how_much_is_free_where_it_would_be(arrangement: Arrangement, free: list[float]) -> None:
    where = fleet(worker("w0", 80, 50, 60, 70), worker("w1", 60, 80, 80, gpu(3, 99, model="A100")))
    fit = fit_of(FitsOnSeveralGpus, ask(100, arrangement=arrangement), where)
    assert [value / GIB for value in fit.free] == free, "on the last that would be taken"


@pytest.mark.parametrize(
    ("asked", "where", "reasons"),
    [
        (
            ask(200),
            fleet(worker("w0", 80, 80), worker("w1")),
            {
                "w0": "too few GPUs with room: needs 2 of one model with 100.0 GiB each; it has 2 GPUs, the largest "
                "free is 80.0 GiB",
                "w1": "no GPU",
            },
        ),
        (
            ask(100),
            fleet(worker("w0", 80, 80), worker("w1", 80), worker("w2", 80, gpu(1, 80, model="A100"))),
            {
                "w1": "too few GPUs with room: needs 2 with 50.0 GiB each, 1 have room",
                "w2": "too few GPUs with room: needs 2 of one model with 50.0 GiB each, 2 have room",
            },
        ),
        (ask(100, cpus=99), fleet(worker("w0", 80, 80)), {"w0": "too few CPUs: needs 99, 64 free"}),
        (
            ask(of=need(100, sizes=(1,))),
            fleet(worker("w0", 80, 80)),
            {"w0": "not allowed: the model cannot be split across GPUs"},
        ),
        (
            ask(of=need(100, sizes=())),
            fleet(worker("w0", 80, 80)),
            {"w0": "not allowed: the model cannot be split across GPUs"},
        ),
        (
            ask(100, several_gpus=False),
            fleet(worker("w0", 80, 80)),
            {"w0": "not allowed: severalGpus is off"},
        ),
        (
            ask(100, engine=EngineAbility(tensor_parallel=False)),
            fleet(worker("w0", 80, 80)),
            {"w0": "not allowed: the engine has no tensor parallelism"},
        ),
    ],
)
def test_why_not(asked: Ask, where: Fleet, reasons: dict[str, str]) -> None:
    assert why_not(FitsOnSeveralGpus, asked, where) == reasons
