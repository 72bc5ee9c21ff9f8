"""The fourth tier: as many layers as possible on a GPU, the rest on the CPU."""

from typing import Any

import msgspec
import pytest

from pointsman.placement.asks import Arrangement, Ask
from pointsman.placement.fit import FitsPartly
from pointsman.placement.fleet import Fleet
from tests.placement.fleets import GIB, LLAMA, ask, fit_of, fleet, gpus_of, need, places_in, why_not, worker


def eight(**more: Any) -> Ask:
    return ask(*(10,) * 8, engine=LLAMA, partial_offload=True, **more)


@pytest.mark.parametrize(
    ("asked", "where", "places"),
    [
        (eight(), fleet(worker("w0", 24)), {"w0": ("w0/0", 2)}),
        (eight(), fleet(worker("w0", 24, 48, 49)), {"w0": ("w0/1", 4)}),  # the most layers, then the tightest
        (eight(arrangement=Arrangement.SPREAD), fleet(worker("w0", 24, 48, 49)), {"w0": ("w0/2", 4)}),
        (eight(), fleet(worker("w0", 9), worker("w1", 10)), {"w1": ("w1/0", 1)}),
        (eight(), fleet(worker("w0", 24, memory=59), worker("w1", 24, memory=60)), {"w1": ("w1/0", 2)}),
        (eight(), fleet(worker("w0", 24, memory=79, unified_memory=True)), {}),
        (eight(), fleet(worker("w0", 24, memory=80, unified_memory=True)), {"w0": ("w0/0", 2)}),
        (eight(cpus=8), fleet(worker("w0", 24, cpus=4)), {}),
        (eight(), fleet(worker("w0", 75)), {"w0": ("w0/0", 7)}),
        (
            ask(of=need(*(10,) * 8, first=10), engine=LLAMA, partial_offload=True),
            fleet(worker("w0", 80)),
            {"w0": ("w0/0", 8)},  # all layers, while the embeddings stay in memory
        ),
    ],
)
def test_workers_that_fit_and_their_layers(asked: Ask, where: Fleet, places: dict[str, tuple[str, int]]) -> None:
    found = places_in(FitsPartly, asked, where)
    assert {name: (gpus_of(one), one.gpu_layers) for name, one in found.items()} == places


def test_it_claims_both_memories() -> None:
    asked = ask(of=need(*(10,) * 8, kv=1, overhead=2, host=3), engine=LLAMA, partial_offload=True, cpus=4)
    [claim] = places_in(FitsPartly, asked, fleet(worker("w0", 24)))["w0"].claims
    assert (claim.gpu_bytes, claim.memory_bytes, claim.cpus) == (24 * GIB, 69 * GIB, 4)


def test_more_layers_are_better_and_the_rest_is_what_is_left() -> None:
    where = fleet(worker("w0", 24), worker("w1", 48), worker("w2", 55, memory=1), worker("w3", 35))
    fit = fit_of(FitsPartly, eight(), where)
    assert fit.quality is not None
    assert [round(value, 2) for value in fit.quality[[0, 1, 3]].tolist()] == [0.33, 1, 0.5]
    assert ((fit.free - fit.needed) / GIB).tolist() == [4, 8, 5, 5]


@pytest.mark.parametrize(
    ("asked", "reasons"),
    [
        (
            eight(),
            {
                "w0": "no room for a layer: needs 10.0 GiB, the largest free is 8.0 GiB",
                "w1": "too little memory for the other layers: with 2 layers on a GPU needs 60.0 GiB, 16.0 GiB free",
                "w2": "no GPU",
                "w3": "too few CPUs: needs 0, -1 free",
            },
        ),
        (
            msgspec.structs.replace(eight(), partial_offload=False),
            dict.fromkeys(("w0", "w1", "w2", "w3"), "not allowed: partialOffload is off"),
        ),
        (
            ask(10, 10, partial_offload=True),
            dict.fromkeys(("w0", "w1", "w2", "w3"), "not allowed: the engine cannot offload a part"),
        ),
        (
            ask(10, partial_offload=True, engine=LLAMA),
            dict.fromkeys(("w0", "w1", "w2", "w3"), "not allowed: the model has one layer"),
        ),
    ],
)
def test_why_not(asked: Ask, reasons: dict[str, str]) -> None:
    where = fleet(worker("w0", 8), worker("w1", 24, memory=16), worker("w2"), worker("w3", 24, cpus=-1))
    assert why_not(FitsPartly, asked, where) == reasons
