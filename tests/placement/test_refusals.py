"""Why there is no place: every worker, every tier."""

from typing import Any

import pytest
from hypothesis import given

from pointsman.placement.asks import Ask, Tier
from pointsman.placement.placer import Placed, Placer
from pointsman.placement.refusals import Refused
from pointsman.reasons import Reason
from pointsman.selection import LabelSelector
from pointsman.types import WorkerStatus
from tests.placement.fleets import GIB, LLAMA, ask, fleet, need, place, refused, worker
from tests.placement.situations import asks

WHERE = fleet(
    worker("w0", 40),
    worker("w1", 24, 24),
    worker("w2", 80, labels={"zone": "b"}),
    worker("w3", 80, status=WorkerStatus.LOST),
)
ASKED = ask(50, selector=LabelSelector({"zone": "a"}))


def test_every_worker_and_every_tier_has_a_reason() -> None:
    found = refused(ask(50, workers=frozenset({"w0", "w1", "w3"})), WHERE).reasons()
    assert list(found) == ["not considered", *(tier.value for tier in Tier)]
    assert found["not considered"] == {
        "w2": Reason("not-chosen-by-hand"),
        "w3": Reason("worker-not-ready", {"status": "lost"}),
    }
    assert {name: str(reason) for name, reason in found["one GPU"].items()} == {
        "w0": "no room on one GPU: needs 50.0 GiB, the largest free is 40.0 GiB",
        "w1": "no room on one GPU: needs 50.0 GiB, the largest free is 24.0 GiB",
    }
    assert found["one GPU"]["w0"].facts == {"needed_bytes": 50 * GIB, "largest_free_bytes": 40 * GIB}
    assert str(found["CPU"]["w0"]) == "not allowed: the engine needs a GPU (cpu is off)"


def test_the_reasons_are_there_without_a_trace() -> None:
    found = Placer(WHERE).place(ASKED, traced=False)
    assert not isinstance(found, Placed)
    assert found.trace is None
    assert found.reasons() == refused(ASKED, WHERE).reasons()
    assert found.as_dict()["why"] == str(found.in_full)


def test_the_summary_of_all_tiers() -> None:
    assert str(refused(ask(50, workers=frozenset({"w0", "w1", "w3"})), WHERE).in_full) == (
        "not considered: 1 not ready, 1 not chosen by hand; one GPU: 2 no room on one GPU; "
        "several GPUs of one worker: 2 too few GPUs with room; "
        "several workers: 2 not allowed: severalWorkers is off; "
        "partly on a GPU, partly on the CPU: 2 not allowed: partialOffload is off; "
        "CPU: 2 not allowed: the engine needs a GPU (cpu is off)"
    )
    assert str(refused(ASKED, WHERE).in_full) == "not considered: 4 label mismatch", "no worker is left for any tier"
    assert str(refused(ASKED, fleet()).in_full) == "there are no workers"


ON_ANY: dict[str, Any] = {"engine": LLAMA, "cpu": True, "partial_offload": False, "several_gpus": False}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        # One reason for all is told in full; different figures are counted, and those of one are given.
        (
            refused(ask(50), fleet(worker("w0", 40))),
            "no room on one GPU: needs 50.0 GiB, the largest free is 40.0 GiB",
        ),
        (
            refused(ask(50), fleet(worker("w0", 40), worker("w1", 40))),
            "no room on one GPU: needs 50.0 GiB, the largest free is 40.0 GiB",
        ),
        (
            refused(ask(50), fleet(worker("w0", 40), worker("w1", 24), worker("w2", 40, status=WorkerStatus.LOST))),
            "1 not ready (lost), 2 no room on one GPU (w0: needs 50.0 GiB, the largest free is 40.0 GiB)",
        ),
        # A tier that is not open to it is not told of, also where some workers are turned away before any tier.
        (
            refused(ask(of=need(10, 10, sizes=(2,))), fleet(worker("w0", 8), worker("w1", status=WorkerStatus.LOST))),
            "1 not ready (lost), 1 too few GPUs with room (needs 2 of one model with 10.0 GiB each; it has 1 GPUs, "
            "the largest free is 8.0 GiB)",
        ),
        # Where there is no GPU, what matters is the memory of the machine.
        (
            refused(ask(100, **ON_ANY), fleet(worker("w0", memory=16))),
            "too little memory: needs 100.0 GiB, 16.0 GiB free",
        ),
        (refused(ASKED, fleet()), "there are no workers"),
        (
            refused(ask(50, cpu=False, several_gpus=False, of=need(25, 25, sizes=(2,))), fleet(worker("w0", 40, 40))),
            "one GPU: 1 not allowed: the model must be split across several GPUs; "
            "several GPUs of one worker: 1 not allowed: severalGpus is off; "
            "several workers: 1 not allowed: severalWorkers is off; "
            "partly on a GPU, partly on the CPU: 1 not allowed: partialOffload is off; "
            "CPU: 1 not allowed: the engine needs a GPU (cpu is off)",
        ),
    ],
)
def test_the_reason_names_what_is_in_the_way(found: Refused, words: str) -> None:
    assert str(found.reason) == f"no place: {words}"


def test_reasons_stay_true_when_the_fleet_changes() -> None:
    where = fleet(worker("w0", 80, 80), worker("w1", 80, cpus=2), a=("w0", 0, 60), b=("w0", 1, 60), c=("w1", 0, 60))
    told = [
        refused(asked, where)
        for asked in (ask(30, 30, several_workers=True, partial_offload=True), ask(15, cpus=99), ask(1, exclusive=True))
    ]
    before = [(one.reasons(), one.in_full) for one in told]
    for instance_id in "abc":
        where.release(instance_id)
    where.remove("w0")
    where.claim("d", place("w1", 0, 1, cpus=2))
    assert [(one.reasons(), one.in_full) for one in told] == before


@given(asks())
def test_every_worker_has_one_reason_per_tier(asked: Ask) -> None:
    found = Placer(WHERE).place(asked)
    if not isinstance(found, Placed):
        reasons = found.reasons()
        everywhere = reasons.pop("not considered", {})
        assert reasons or len(everywhere) == 4
        for one in reasons.values():
            assert {*everywhere, *one} == {"w0", "w1", "w2", "w3"}
            assert not everywhere.keys() & one.keys()
        assert str(found.reason).startswith("no place: ")
