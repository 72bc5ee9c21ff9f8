"""The last tier: on the CPU."""

import pytest

from pointsman.placement.asks import Ask
from pointsman.placement.fit import FitsOnCpu
from pointsman.placement.fleet import Fleet
from tests.placement.fleets import GIB, LLAMA, ask, fit_of, fleet, need, places_in, why_not, worker


@pytest.mark.parametrize(
    ("asked", "where", "fits"),
    [
        (ask(40, engine=LLAMA), fleet(worker("w0", memory=39), worker("w1", memory=40)), ["w1"]),
        (ask(40, cpu=True), fleet(worker("w0", memory=40)), ["w0"]),
        (ask(of=need(40, host=1), cpu=True), fleet(worker("w0", memory=40)), []),
        (ask(40, cpu=True), fleet(worker("w0", memory=80), a=("w0", None, 41)), []),
        (ask(40, cpu=True), fleet(worker("w0", memory=40, used_memory_bytes=1)), []),
        (ask(40, cpu=True), fleet(worker("w0", memory=40, reserved_memory_bytes=1)), []),
        (ask(40, cpu=True), fleet(worker("w0", 80, memory=80, unified_memory=True), a=("w0", 0, 41)), []),
        (ask(40, cpu=True), fleet(worker("w0", 80, memory=80), a=("w0", 0, 41)), ["w0"]),
        (ask(40, cpu=True, cpus=8), fleet(worker("w0", cpus=4)), []),
    ],
)
def test_workers_that_fit(asked: Ask, where: Fleet, fits: list[str]) -> None:
    assert list(places_in(FitsOnCpu, asked, where)) == fits


def test_it_claims_memory_and_no_gpu() -> None:
    found = places_in(
        FitsOnCpu, ask(of=need(40, kv=1, host=2, activation=3), cpu=True, cpus=2), fleet(worker("w0", 80))
    )
    [claim] = found["w0"].claims
    assert (claim.gpu, claim.gpu_bytes, claim.memory_bytes, claim.cpus) == (None, 0, 46 * GIB, 2)
    assert found["w0"].gpu_layers == 0


def test_what_is_free_there_is_memory() -> None:
    fit = fit_of(FitsOnCpu, ask(40, cpu=True), fleet(worker("w0", memory=100)))
    assert (fit.free.tolist(), fit.needed) == ([100 * GIB], 40 * GIB)


def test_why_not() -> None:
    where = fleet(worker("w0", memory=30), worker("w1", cpus=1))
    assert why_not(FitsOnCpu, ask(40, cpu=True, cpus=2), where) == {
        "w0": "too little memory: needs 40.0 GiB, 30.0 GiB free",
        "w1": "too few CPUs: needs 2, 1 free",
    }
    off = "not allowed: the engine needs a GPU (cpu is off)"
    assert why_not(FitsOnCpu, ask(40), where) == {"w0": off, "w1": off}
