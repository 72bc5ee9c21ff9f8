"""Scores of workers that fit."""

import pytest

from pointsman.placement.asks import Arrangement, Ask
from pointsman.placement.fit import FitsOnCpu, FitsOnOneGpu, FitsOnSeveralGpus, FitsPartly, ResourceFit
from pointsman.placement.fleet import Fleet
from pointsman.placement.scorers import Apart, FilesAreThere, Fullest, LeastClaimed, NearTo, TierQuality, TightFit
from tests.placement.fleets import LLAMA, ask, fleet, gpu, need, place, scores, worker

SPREAD = Arrangement.SPREAD


@pytest.mark.parametrize(
    ("asked", "where", "tier", "expected"),
    [
        (ask(40), fleet(worker("w0", 40), worker("w1", 41), worker("w2", 43)), FitsOnOneGpu, [1, 0.5, 0.25]),
        (ask(40), fleet(worker("w0", 80, 41), worker("w1", 43, 24)), FitsOnOneGpu, [0.5, 0.25]),
        (ask(80), fleet(worker("w0", 40, 41), worker("w1", 40, 40)), FitsOnSeveralGpus, [0.5, 1]),
        (ask(40, cpu=True), fleet(worker("w0", memory=41), worker("w1", memory=40)), FitsOnCpu, [0.5, 1]),
        (
            ask(10, 10, 10, 10, engine=LLAMA, partial_offload=True),
            fleet(worker("w0", 21), worker("w1", 30)),
            FitsPartly,
            [0.5, 1],
        ),
    ],
)
def test_tight_fit_leaves_the_least(asked: Ask, where: Fleet, tier: type[ResourceFit], expected: list[float]) -> None:
    assert scores(TightFit(), asked, where, tier) == expected


def test_fullest_has_the_fewest_gpus_and_cpus_free() -> None:
    where = fleet(worker("w0", 80, 80), worker("w1", 80, 80, cpus=32), worker("w2", 80), worker("w3"), a=("w0", 0, 40))
    assert scores(Fullest(where), ask(1), where, FitsOnOneGpu) == [0.125, 0.25, 0.25, 0.5]
    assert scores(Fullest(where), ask(1), where, FitsOnOneGpu, ["w1", "w3"]) == [0.25, 0.5]
    where.claim("half", place("w2", 0, 1, gpu_share=0.5))
    assert scores(Fullest(where), ask(1), where, FitsOnOneGpu) == [0.125, 0.25, 0.375, 0.5]


def test_least_loaded_has_the_most_room_and_memory() -> None:
    where = fleet(
        worker("w0", 40, memory=100),
        worker("w1", 80, memory=100),
        worker("w2", 80, memory=100),
        c=("w2", None, 50),
    )
    spread = ask(20, arrangement=SPREAD)
    assert scores(LeastClaimed(), spread, where, FitsOnOneGpu) == [0.6, 1, 0.9]
    assert scores(LeastClaimed(), spread, where, FitsOnOneGpu, ["w0", "w2"]) == [0.6, 0.9]
    assert scores(LeastClaimed(), spread, fleet(worker("w0", 80, memory=0)), FitsOnOneGpu) == [0.8]


def test_least_loaded_looks_at_all_gpus_that_it_would_take() -> None:
    where = fleet(worker("w0", 99, 50), worker("w1", 80, 80))
    first, second = scores(LeastClaimed(), ask(100, arrangement=SPREAD), where, FitsOnSeveralGpus)
    assert first < second


def racks(**claims: tuple[str, int | None, float]) -> Fleet:
    """Two workers in one rack, one in another, one in none."""
    where = [("w0", "a"), ("w1", "a"), ("w2", "b")]
    workers = [worker(name, 80, labels={"rack": rack}) for name, rack in where]
    return fleet(*workers, worker("w3", 80), **claims)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (racks(), [1, 1, 1, 1]),
        (racks(e1=("w0", 0, 1)), [1, 1, 1, 1]),
        (racks(d1=("w3", 0, 1)), [1, 1, 1, 0.5]),
        (racks(d1=("w0", 0, 1)), [0.25, 0.5, 1, 1]),
        (racks(d1=("w0", 0, 1), d2=("w2", 0, 1), d3=("w3", 0, 1)), [0.333, 1, 0.333, 0.5]),
        (racks(d1=("w0", 0, 1), d2=("w1", 0, 1), d3=("w2", 0, 1), d4=("w3", 0, 1)), [0.333, 0.333, 0.5, 1]),
    ],
)
def test_apart(where: Fleet, expected: list[float]) -> None:
    assert scores(Apart(where), ask(1, deployment="d"), where, FitsOnOneGpu) == expected
    assert scores(Apart(where), ask(1), where, FitsOnOneGpu) == [1, 1, 1, 1], (
        "an instance without a deployment is apart anywhere"
    )


def test_the_least_crowded_lead_by_a_half_however_many_there_are() -> None:
    many = {f"d{number}": (f"w{number % 2}", 0, 0.1) for number in range(21)}
    where = fleet(worker("w0", 80), worker("w1", 80), **many)
    assert scores(Apart(where), ask(1, deployment="d"), where, FitsOnOneGpu) == [0.5, 1]


def test_files() -> None:
    where = fleet(worker("w0", 80), worker("w1", 80, files=frozenset({"llama"})))
    known = ask(of=need(1, sizes=(1,)))
    assert scores(FilesAreThere(), known, where, FitsOnOneGpu) == [0, 0]
    named = Ask(instance_id="new", need=type(known.need)(model="llama", layer_bytes=(1,)))
    assert scores(FilesAreThere(), named, where, FitsOnOneGpu) == [0, 1]


def test_quality_is_what_the_tier_says() -> None:
    linked = worker("w1", gpu(0, 80, link="x"), gpu(1, 80, link="x"))
    assert scores(TierQuality(), ask(100), fleet(worker("w0", 80, 80), linked), FitsOnSeveralGpus) == [0, 1]
    assert scores(TierQuality(), ask(1), fleet(worker("w0", 80), linked), FitsOnOneGpu) == [0, 0]


def test_near() -> None:
    where = racks(p1=("w0", 0, 1))
    assert scores(NearTo(where), ask(1, near="p"), where, FitsOnOneGpu) == [1, 0.5, 0, 0]
    assert scores(NearTo(where), ask(1, near="p"), where, FitsOnOneGpu, ["w1", "w3"]) == [0.5, 0]
    assert scores(NearTo(where), ask(1, near="unknown"), where, FitsOnOneGpu) == [0, 0, 0, 0]
    assert scores(NearTo(where), ask(1), where, FitsOnOneGpu) == [0, 0, 0, 0]
    off = racks(p1=("w3", 0, 1))
    assert scores(NearTo(off), ask(1, near="p"), off, FitsOnOneGpu) == [0, 0, 0, 1], "no rack is not a rack"
