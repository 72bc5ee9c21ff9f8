"""The first tier: the whole instance on one GPU."""

import pytest

from pointsman.placement.asks import Arrangement, Ask, Need
from pointsman.placement.fit import FitsOnOneGpu
from pointsman.placement.fleet import Fleet
from tests.placement.fleets import GIB, ask, fit_of, fleet, gpu, gpus_of, need, place, places_in, why_not, worker

SPREAD = Arrangement.SPREAD


@pytest.mark.parametrize(
    ("asked", "where", "places"),
    [
        (ask(40), fleet(worker("w0", 80), worker("w1", 24)), {"w0": "w0/0"}),
        (ask(80), fleet(worker("w0", 80)), {"w0": "w0/0"}),
        (ask(40), fleet(worker("w0", 80, 48, 40, 24)), {"w0": "w0/2"}),  # the tightest
        (ask(40, arrangement=SPREAD), fleet(worker("w0", 48, 80, 80)), {"w0": "w0/1"}),  # the emptiest, the first
        (ask(40), fleet(worker("w0", 80, 80), a=("w0", 0, 30)), {"w0": "w0/0"}),
        (ask(40), fleet(worker("w0", 80, 80), a=("w0", 0, 41)), {"w0": "w0/1"}),
        (ask(40), fleet(worker("w0", gpu(0, 80, used_bytes=41 * GIB), gpu(7, 80))), {"w0": "w0/7"}),
        (ask(40), fleet(worker("w0", 40, reserved_gpu_bytes=1)), {}),
        (ask(40), fleet(worker("w0", 80, memory=64, unified_memory=True)), {"w0": "w0/0"}),
        (ask(40), fleet(worker("w0", 80, memory=39, unified_memory=True)), {}),
        (ask(of=need(40, host=30)), fleet(worker("w0", 80, memory=64, unified_memory=True)), {}),
        (ask(of=need(40, host=30)), fleet(worker("w0", 80, memory=64)), {"w0": "w0/0"}),
        (ask(40, cpus=8), fleet(worker("w0", 80, cpus=4), worker("w1", 80, cpus=8)), {"w1": "w1/0"}),
        (ask(40, gpus=frozenset({("w0", 1)})), fleet(worker("w0", 80, 80)), {"w0": "w0/1"}),
        (ask(40, gpu_models=frozenset({"L4"})), fleet(worker("w0", 80, gpu(1, 80, model="L4"))), {"w0": "w0/1"}),
        (ask(40), fleet(worker("w0", gpu(0, 80, vendor="apple"))), {}),
    ],
)
def test_workers_that_fit_and_their_places(asked: Ask, where: Fleet, places: dict[str, str]) -> None:
    assert {name: gpus_of(found) for name, found in places_in(FitsOnOneGpu, asked, where).items()} == places


def test_it_claims_what_it_needs() -> None:
    asked = ask(of=need(10, 20, kv=1, first=2, last=3, activation=4, overhead=5, host=6), cpus=2)
    [claim] = places_in(FitsOnOneGpu, asked, fleet(worker("w0", 80)))["w0"].claims
    assert (claim.gpu_bytes, claim.memory_bytes, claim.cpus) == (46 * GIB, 6 * GIB, 2)


@pytest.mark.parametrize(
    ("asked", "where", "reasons"),
    [
        (
            ask(40),
            fleet(worker("w0", 24, 32), worker("w1")),
            {"w0": "no room on one GPU: needs 40.0 GiB, the largest free is 32.0 GiB", "w1": "no GPU"},
        ),
        (ask(40, cpus=8), fleet(worker("w0", 80, cpus=4)), {"w0": "too few CPUs: needs 8, 4 free"}),
        (
            ask(of=need(40, host=30)),
            fleet(worker("w0", 80, memory=20)),
            {"w0": "too little memory: needs 30.0 GiB, 20.0 GiB free"},
        ),
        (
            ask(40, of=Need.fixed(1, gpus=2)),
            fleet(worker("w0", 80)),
            {"w0": "not allowed: the model must be split across several GPUs"},
        ),
        (ask(of=need(40, sizes=())), fleet(worker("w0", 80)), {"w0": "not allowed: the model uses no GPU"}),
        (
            ask(40, gpu_share=0.5),
            fleet(worker("w0", 80, 80, gpu(2, 80, vendor="apple"))),
            {},
        ),
    ],
)
def test_why_not(asked: Ask, where: Fleet, reasons: dict[str, str]) -> None:
    assert why_not(FitsOnOneGpu, asked, where) == reasons


def test_why_no_gpu_is_available() -> None:
    where = fleet(worker("w0", 80, 80, gpu(2, 80, vendor="apple"), gpu(3, 80, shareable=False)))
    where.claim("alone", place("w0", 0, 1, exclusive=True))
    where.claim("half", place("w0", 1, 1, gpu_share=0.6))
    where.claim("own", place("w0", 3, 1))
    share = "no GPU available: 1 of another kind or not chosen, 2 held exclusively, 1 with too small a share free"
    assert why_not(FitsOnOneGpu, ask(40, gpu_share=0.5), where) == {"w0": share}
    alone = "no GPU available: 1 of another kind or not chosen, 2 held exclusively, 1 not empty"
    assert why_not(FitsOnOneGpu, ask(40, exclusive=True), where) == {"w0": alone}
    assert gpus_of(places_in(FitsOnOneGpu, ask(40, gpu_share=0.4), where)["w0"]) == "w0/1"


def test_only_candidates_fit() -> None:
    where = fleet(worker("w0", 80), worker("w1", 80))
    assert fit_of(FitsOnOneGpu, ask(40), where, among=["w1"]).fits.tolist() == [False, True]


def test_reasons_stay_true_when_the_fleet_changes() -> None:
    where = fleet(worker("w0", 24, cpus=4), worker("w1", 80, cpus=4), a=("w1", 0, 50))
    fit, busy = fit_of(FitsOnOneGpu, ask(40), where), fit_of(FitsOnOneGpu, ask(10, cpus=8), where)
    w1 = where["w1"]
    where.release("a")
    where.remove("w0")
    assert str(fit.why(w1)) == "no room on one GPU: needs 40.0 GiB, the largest free is 30.0 GiB"
    assert str(busy.why(w1)) == "too few CPUs: needs 8, 4 free"


def test_replicas_of_a_deployment_go_to_other_gpus_first() -> None:
    where = fleet(worker("w0", 80, 60, 40), d1=("w0", 0, 10))
    spread = ask(10, arrangement=SPREAD, deployment="d")
    assert gpus_of(places_in(FitsOnOneGpu, spread, where)["w0"]) == "w0/1", "the emptiest has one already"
