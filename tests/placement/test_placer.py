"""The placer: filters, tiers in order, the best of the workers that fit."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.placement.asks import Arrangement, Ask, Tier
from pointsman.placement.fleet import FREE_BYTES, TENANTS, Fleet
from pointsman.placement.placer import Placed, Placer
from pointsman.placement.refusals import Refused
from pointsman.render.text import trace_table
from pointsman.selection import LabelSelector
from pointsman.types import WorkerStatus
from tests.placement.fleets import GIB, LLAMA, ask, fleet, gpu, gpus_of, need, placed, refused, worker

SPREAD = Arrangement.SPREAD
ALL: dict[str, Any] = {"several_workers": True, "partial_offload": True, "engine": LLAMA}


@pytest.mark.parametrize(
    ("where", "tier"),
    [
        (fleet(worker("w0", 80, 80), worker("w1", 80)), Tier.ONE_GPU),
        (fleet(worker("w0", 50, 50), worker("w1", 79)), Tier.SEVERAL_GPUS),
        (fleet(worker("w0", 50), worker("w1", 79)), Tier.SEVERAL_WORKERS),
        (fleet(worker("w0", 50), worker("w1")), Tier.PARTIAL_OFFLOAD),
        (fleet(worker("w0", 9), worker("w1")), Tier.CPU),
    ],
)
def test_tiers_in_their_order(where: Fleet, tier: Tier) -> None:
    asked = ask(*(10,) * 8, **ALL)
    assert placed(asked, where).tier is tier


@pytest.mark.parametrize(
    ("off", "tier"),
    [
        ({"several_gpus": False}, Tier.SEVERAL_WORKERS),
        ({"several_gpus": False, "several_workers": False}, Tier.PARTIAL_OFFLOAD),
        ({"several_gpus": False, "several_workers": False, "partial_offload": False}, Tier.CPU),
    ],
)
def test_tiers_that_are_off_are_left_out(off: dict[str, bool], tier: Tier) -> None:
    where = fleet(worker("w0", 50, 50), worker("w1", 50))
    assert placed(ask(*(10,) * 8, **{**ALL, **off}), where).tier is tier


@pytest.mark.parametrize(
    ("asked", "where", "gpus"),
    [
        (ask(40), fleet(worker("w0", 80), worker("w1", 48, 41), worker("w2", 42)), "w1/1"),  # the tightest
        (ask(40), fleet(worker("w0", 80), worker("w1", 80)), "w0/0"),  # of equals the first
        (ask(40, arrangement=SPREAD), fleet(worker("w0", 80), worker("w1", 80)), "w0/0"),
        (ask(40), fleet(worker("w0", 80), worker("w1", 80, cpus=32)), "w1/0"),  # the fullest
        (ask(40, arrangement=SPREAD), fleet(worker("w0", 48), worker("w1", 80)), "w0/0"),  # the large hole stays
        (ask(40, near="p"), fleet(worker("w0", 40), worker("w1", 80), p1=("w1", 0, 1)), "w1/0"),
        (
            ask(40, near="p"),
            fleet(
                worker("w0", 40),
                worker("w1", 24, labels={"rack": "a"}),
                worker("w2", 80, labels={"rack": "a"}),
                p1=("w1", 0, 1),
            ),
            "w2/0",
        ),
        (
            ask(100),
            fleet(worker("w0", 50, 50), worker("w1", gpu(0, 80, link="x"), gpu(1, 80, link="x"))),
            "w1/0 w1/1",  # linked before tight
        ),
        (
            ask(40, selector=LabelSelector({"a": "b"})),
            fleet(worker("w0", 80), worker("w1", 80, labels={"a": "b"})),
            "w1/0",
        ),
        (ask(40, workers=frozenset({"w1"})), fleet(worker("w0", 80), worker("w1", 80)), "w1/0"),
        (ask(40, gpus=frozenset({("w1", 1)})), fleet(worker("w0", 80), worker("w1", 80, 80)), "w1/1"),
        (ask(40), fleet(worker("w0", 80, status=WorkerStatus.DRAINING), worker("w1", 80)), "w1/0"),
    ],
)
def test_the_best_place(asked: Ask, where: Fleet, gpus: str) -> None:
    assert gpus_of(placed(asked, where)) == gpus


def test_files_decide_between_equals() -> None:
    where = fleet(worker("w0", 80), worker("w1", 80, files=frozenset({"llama"})))
    asked = ask(of=msgspec.structs.replace(need(40), model="llama"))
    assert gpus_of(placed(asked, where)) == "w1/0"
    assert gpus_of(placed(msgspec.structs.replace(asked, arrangement=SPREAD), where)) == "w1/0"


def test_most_layers_before_a_tight_fit() -> None:
    where = fleet(worker("w0", 20), worker("w1", 39), worker("w2", 30), a=("w0", None, 1), b=("w2", None, 1))
    found = placed(ask(*(10,) * 8, engine=LLAMA, partial_offload=True), where)
    assert (gpus_of(found), found.gpu_layers) == ("w2/0", 3), "three layers, and nothing left"


def test_another_worker_before_a_link_and_before_nearness() -> None:
    linked = worker("w0", *(gpu(index, 80, link="x") for index in range(4)))
    where = fleet(linked, worker("w1", 80, 80), d1=("w0", 0, 1), p1=("w0", 1, 1))
    asked = ask(100, deployment="d", near="p", arrangement=SPREAD)
    assert gpus_of(placed(asked, where)) == "w1/0 w1/1"
    assert placed(msgspec.structs.replace(asked, deployment="e"), where).workers == ("w0",)


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=6), st.data())
def test_spread_uses_every_worker_before_any_twice(racks: list[str], data: st.DataObject) -> None:
    sizes = [data.draw(st.sampled_from([40, 80])) for _ in racks]
    names = [f"w{number}" for number in range(len(racks))]
    listed = zip(names, sizes, racks, strict=True)
    where = fleet(*(worker(name, size, size, labels={"rack": rack}) for name, size, rack in listed))
    rack_of = dict(zip(names, racks, strict=True))
    asks = [
        Ask(instance_id=f"d{number}", deployment="d", need=need(1), arrangement=SPREAD)
        for number in range(2 * len(racks))
    ]
    chosen: list[str] = []
    for found in map(Placer(where).take, asks):
        assert isinstance(found, Placed)
        chosen += found.place.workers
    assert sorted(chosen[: len(racks)]) == names, "every worker has one"
    assert sorted(chosen[len(racks) :]) == names, "then every worker has two"
    different = len(set(racks))
    assert len({rack_of[name] for name in chosen[:different]}) == different, "and every rack before one has two"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.lists(st.integers(20, 80), min_size=1, max_size=6))
def test_packing_takes_a_gpu_in_use_and_then_the_tightest(wanted: list[int], sizes: list[int]) -> None:
    where = fleet(worker("w0", *sizes))
    for number, size in enumerate(wanted):
        free = [float(value) for value in where.gpus.columns[FREE_BYTES]]
        used = [one > 0 for one in where.gpus.columns[TENANTS]]
        enough = [(not used[at], left) for at, left in enumerate(free) if left >= size * GIB]
        asked = Ask(instance_id=str(number), need=need(size, sizes=(1,)))
        found = Placer(where).place(asked)
        assert isinstance(found, Placed) is bool(enough)
        if isinstance(found, Placed):
            [(_, index)] = found.place.gpus
            assert (not used[index], free[index]) == min(enough)
            where.claim(asked.instance_id, found.place)


def test_runner_ups() -> None:
    where = fleet(*(worker(f"w{number}", 40 + number) for number in range(8)))
    found = Placer(where).place(ask(42))
    assert isinstance(found, Placed)
    assert [name for name, _ in found.runner_ups] == ["w3", "w4", "w5", "w6"]
    assert found.score == pytest.approx(10.0)
    assert [round(score, 2) for _, score in found.runner_ups] == [5, 3.33, 2.5, 2]
    assert found.trace is not None
    assert "no room on one GPU" in trace_table(found.trace.as_dict())


def test_place_claims_nothing() -> None:
    where = fleet(worker("w0", 80))
    Placer(where).place(ask(40))
    assert not where.occupants


def test_places_are_claimed_as_long_as_there_is_room() -> None:
    where = fleet(worker("w0", 80), worker("w1", 40))
    asks = [Ask(instance_id=f"d{number}", deployment="d", need=need(40)) for number in range(4)]
    outcomes = list(map(Placer(where).take, asks))
    assert [isinstance(one, Placed) for one in outcomes] == [True, True, True, False]
    assert list(where.occupants) == ["d0", "d1", "d2"]


def test_all_or_nothing_needs_room_for_all_that_are_missing() -> None:
    where = fleet(worker("w0", 80), worker("w1", 40), other=("w1", 0, 1))
    asks = [Ask(instance_id=f"d{number}", deployment="d", need=need(40), all_or_nothing=True) for number in range(3)]
    placer = Placer(where)
    outcome = placer.take(asks[0], missing=3)
    assert isinstance(outcome, Refused)
    assert (outcome.ask.instance_id, list(where.occupants)) == ("d0", ["other"])
    for number in (0, 1):
        assert isinstance(placer.take(asks[number], missing=2 - number), Placed)


def test_a_placer_follows_its_fleet() -> None:
    where = fleet(worker("w0", 24))
    placer = Placer(where)
    assert isinstance(placer.place(ask(40)), Refused)
    where.put(worker("w1", 80, 48))
    found = placer.place(ask(40))
    assert isinstance(found, Placed)
    assert gpus_of(found.place) == "w1/1"
    where.remove("w1")
    assert isinstance(placer.place(ask(40)), Refused)


def test_admitted_workers() -> None:
    where = fleet(worker("w0", 1), worker("w1"), worker("w2", 1, status=WorkerStatus.LOST))
    assert Placer(where).admitted(ask(40)).tolist() == [True, False, False]
    assert Placer(fleet()).admitted(ask(40)).tolist() == []


# Although there is no room


@pytest.mark.parametrize(
    ("asked", "where", "gpus", "workers"),
    [
        (ask(100), fleet(worker("w0", 24), worker("w1", 40, 80)), "w1/1", "w1"),
        (ask(100), fleet(worker("w0", 24), worker("w1", 80, status=WorkerStatus.LOST)), "w0/0", "w0"),
        (ask(100, workers=frozenset({"w0"})), fleet(worker("w0", 24), worker("w1", 80)), "w0/0", "w0"),
        (ask(of=need(400, sizes=(2, 4))), fleet(worker("w0", 99), worker("w1", 20, 40, 30)), "w1/1 w1/2", "w1"),
        (ask(of=need(400, sizes=(2,)), several_gpus=False), fleet(worker("w1", 20, 40)), None, None),
        (ask(900, engine=LLAMA), fleet(worker("w0", memory=9), worker("w1", memory=16)), "", "w1"),
        (ask(100), fleet(worker("w0")), None, None),
        (ask(100), fleet(), None, None),
    ],
)
def test_overcommit_must_be_requested(asked: Ask, where: Fleet, gpus: str | None, workers: str | None) -> None:
    assert isinstance(Placer(where).place(asked), Refused)
    found = Placer(where).place(msgspec.structs.replace(asked, overcommit=True))
    if gpus is None:
        assert isinstance(found, Refused)
    else:
        assert isinstance(found, Placed)
        assert (gpus_of(found.place), " ".join(found.place.workers)) == (gpus, workers)
        assert found.place.overcommitted, "and it is said"


def test_an_ask_that_fits_is_not_overcommitted() -> None:
    assert not placed(ask(40, overcommit=True), fleet(worker("w0", 80))).overcommitted


def test_overcommit_does_not_share_exclusive_gpus() -> None:
    where = fleet(worker("w0", 80, 24))
    where.claim("a", placed(ask(40, exclusive=True), where))
    assert gpus_of(placed(ask(100, overcommit=True), where)) == "w0/1"
    assert refused(ask(100), where).reasons()
