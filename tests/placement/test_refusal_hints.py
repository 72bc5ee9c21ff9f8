"""Hints: an ask that takes one fits."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.placement.asks import Ask, Need
from pointsman.placement.fleet import Fleet
from pointsman.placement.hints import hints, why_never
from pointsman.placement.placer import Placed, Placer
from pointsman.placement.refusals import Refused
from pointsman.render.sentences import detail
from pointsman.selection import LabelSelector
from pointsman.types import WorkerStatus
from tests.placement.fleets import GIB, LLAMA, ask, fleet, gpu, need, place, worker
from tests.placement.situations import asks, workers
from tests.properties import examples

LONG = Need(
    layer_bytes=(GIB,) * 32,
    kv_layer_bytes=(GIB // 4,) * 32,
    kv_splits=8,
    context=32768,
    tensor_parallel_sizes=(1, 2, 4),
)
"""32 GiB and 8 for the context."""


def told(asked: Ask, where: Fleet) -> list[str]:
    return [str(hint) for hint in hints(asked, Placer(where))]


@pytest.mark.parametrize(
    ("asked", "where", "expected"),
    [
        (
            ask(of=msgspec.structs.replace(LONG, tensor_parallel_sizes=(1,))),
            fleet(worker("w0", 24), worker("w3", 24, 38)),
            [
                "needs 40.0 GiB on one GPU; largest free is 38.0 GiB on w3/gpu1",
                "context 24,576 would fit on w3/gpu1",
                "with several workers allowed it would fit on w3/gpu1, w3/gpu0",
            ],
        ),
        (
            ask(of=LONG, several_gpus=False),
            fleet(worker("w0", 24, 24), worker("w1", 80, status=WorkerStatus.LOST)),
            [
                "needs 40.0 GiB on one GPU; largest free is 24.0 GiB on w0/gpu0",
                "with several GPUs of one worker allowed it would fit on w0/gpu0, w0/gpu1",
                "with several workers allowed it would fit on w0/gpu0, w0/gpu1",
            ],
        ),
        (
            ask(8),
            fleet(worker("w0"), worker("w1")),
            ["if its engine runs without a GPU, set placement.cpu: then it would fit on w0"],
        ),
        (
            ask(40, 40, 40),
            fleet(worker("w0", 44), worker("w1", 80)),
            [
                "needs 120.0 GiB on one GPU; largest free is 80.0 GiB on w1/gpu0",
                "with several workers allowed it would fit on w1/gpu0, w0/gpu0",
            ],
        ),
        (
            ask(of=need(10, 10, sizes=(2,)), several_workers=True),
            fleet(worker("w0", 8, 8)),
            ["needs 10.0 GiB on each of 2 GPUs; largest free is 8.0 GiB on w0/gpu0"],
        ),
        (
            ask(30, 30, 30, engine=msgspec.structs.replace(LLAMA, needs_gpu=True)),
            fleet(worker("w0", 40)),
            [
                "needs 90.0 GiB on one GPU; largest free is 40.0 GiB on w0/gpu0",
                "with partial offload allowed it would fit on w0/gpu0",
            ],
        ),
        (
            ask(50, several_workers=True),
            fleet(worker("w0", 40, gpu(1, 40, model="L40"))),
            [
                "needs 50.0 GiB on one GPU; largest free is 40.0 GiB on w0/gpu0",
                "with GPUs of different generations allowed it would fit on w0/gpu0, w0/gpu1",
            ],
        ),
        (
            ask(10, cpus=8),
            fleet(worker("w0", 40, cpus=4)),
            ["with fewer than 8 CPUs it would fit on w0/gpu0"],
        ),
        (
            ask(10, selector=LabelSelector({"a": "b"})),
            fleet(worker("w0", 40)),
            ["without its label selector it would fit on w0/gpu0"],
        ),
        (
            ask(10, workers=frozenset({"w7"})),
            fleet(worker("w0", 40)),
            ["without the choice of workers and GPUs it would fit on w0/gpu0"],
        ),
        (
            ask(10, gpu_models=frozenset({"B200"})),
            fleet(worker("w0", 40)),
            ["with any GPU model it would fit on w0/gpu0"],
        ),
        (
            ask(10, exclusive=True),
            fleet(worker("w0", 40), a=("w0", 0, 1)),
            ["if it is not exclusive it would fit on w0/gpu0"],
        ),
        (
            ask(20, 20, 20, several_gpus=False),
            fleet(worker("w0", 20), worker("w1", gpu(0, 40, model="L40"))),
            [
                "needs 60.0 GiB on one GPU; largest free is 40.0 GiB on w1/gpu0",
                "with several workers and GPUs of different generations allowed it would fit on w1/gpu0, w0/gpu0",
            ],
        ),
        (ask(10), fleet(), []),
        (ask(900), fleet(worker("w0", 40)), ["needs 900.0 GiB on one GPU; largest free is 40.0 GiB on w0/gpu0"]),
    ],
)
def test_what_would_help(asked: Ask, where: Fleet, expected: list[str]) -> None:
    assert isinstance(Placer(where).place(asked), Refused)
    assert told(asked, where) == expected


def test_the_context_is_the_largest_that_fits() -> None:
    where = fleet(worker("w0", 38))
    [_, shorter] = hints(ask(of=LONG), Placer(where))
    assert shorter.ask is not None
    assert shorter.ask.need.context == 24576
    longer = msgspec.structs.replace(shorter.ask, need=LONG.with_context(24576 + 256))
    assert isinstance(Placer(where).place(shorter.ask), Placed)
    assert isinstance(Placer(where).place(longer), Refused)


def test_nothing_is_claimed_by_hinting() -> None:
    where = fleet(worker("w0", 38), a=("w0", 0, 1))
    assert told(ask(of=LONG), where)
    assert list(where.occupants) == ["a"]


def test_a_gpu_that_another_has_alone_is_not_the_largest() -> None:
    where = fleet(worker("w0", 80, 24))
    where.claim("a", place("w0", 0, 1, exclusive=True))
    assert told(ask(900), where) == ["needs 900.0 GiB on one GPU; largest free is 24.0 GiB on w0/gpu1"]


LOST = WorkerStatus.LOST


@pytest.mark.parametrize(
    ("asked", "where", "why"),
    [
        (ask(50), fleet(worker("w0", 80), a=("w0", 0, 60)), ""),  # others only have to leave
        (ask(50), fleet(worker("w0", gpu(0, 80, used_bytes=60 * GIB))), ""),  # other processes too
        (ask(50), fleet(worker("w0", 80, status=LOST)), ""),  # it may come back
        (ask(50), fleet(), ""),  # no worker is known
        (ask(90), fleet(worker("w0", 80)), "no room on one GPU: needs 90.0 GiB, the largest free is 80.0 GiB"),
        (
            ask(90),
            fleet(worker("w0", 80), worker("w1", 40), a=("w0", 0, 60)),
            "2 no room on one GPU (w0: needs 90.0 GiB, the largest free is 80.0 GiB)",
        ),
    ],
)
def test_whether_there_will_ever_be_room(asked: Ask, where: Fleet, why: str) -> None:
    before = where.snapshot()
    never = why_never(asked, where)
    assert ("" if never is None else detail(never.code, never.facts)) == why
    assert where.snapshot() == before


@given(st.tuples(*(workers(f"w{number}") for number in range(3))), asks())
@settings(max_examples=examples(200))
def test_every_hint_that_is_taken_helps(listed: tuple[object, ...], asked: Ask) -> None:
    where = Fleet(listed)  # type: ignore[arg-type]
    placer = Placer(where)
    if isinstance(placer.place(asked), Placed):
        return
    for hint in hints(asked, placer):
        if hint.ask is not None:
            found = Placer(where).place(hint.ask)
            assert isinstance(found, Placed), str(hint)
            assert all(name in str(hint) for name in found.place.workers)
