"""Plans that make room: which instances would have to stop or to move."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.placement.asks import Ask, Need
from pointsman.placement.fleet import FREE_BYTES, Fleet
from pointsman.placement.moves import defragment, preempt
from pointsman.placement.placer import Placed, Placer
from pointsman.placement.refusals import Refused
from pointsman.types import Gpu, Worker
from tests.properties import examples

GIB = 1 << 30


def ask(name: str, size: int, **more: object) -> Ask:
    return Ask(instance_id=name, need=Need.fixed(gpu_bytes=size * GIB), **more)  # type: ignore[arg-type]


def fleet_of(*workers: tuple[int, ...]) -> Fleet:
    """Each worker by the sizes of its GPUs."""
    return Fleet(
        Worker(
            name=f"w{number}",
            cpus=64,
            memory_bytes=512 * GIB,
            gpus=tuple(Gpu(index=index, memory_bytes=size * GIB) for index, size in enumerate(sizes)),
        )
        for number, sizes in enumerate(workers)
    )


def put(fleet: Fleet, one: Ask, worker: str, gpu: int) -> Ask:
    """On the chosen GPU."""
    placed = Placer(fleet).place(Ask(instance_id=one.instance_id, need=one.need, gpus=frozenset({(worker, gpu)})))
    assert isinstance(placed, Placed)
    fleet.claim(one.instance_id, placed.place, one.deployment, one.priority)
    return one


def test_the_least_important_are_stopped_and_no_more_than_needed() -> None:
    fleet = fleet_of((24,), (24,))
    for name, size, worker, priority in [("a", 20, "w0", -1), ("b", 8, "w1", -2), ("c", 12, "w1", -1)]:
        put(fleet, ask(name, size, priority=priority), worker, 0)
    before = list(fleet.occupants)
    wanted = ask("new", 12, priority=1, preempts=True)
    found = preempt(wanted, fleet)
    assert found is not None
    assert (found.victims, found.placed.place.gpus) == (("b",), (("w1", 0),))
    assert list(fleet.occupants) == before, "nothing is done"


def test_preemption_must_be_allowed_and_must_help() -> None:
    fleet = fleet_of((24,))
    put(fleet, ask("sheddable", 20, priority=-1), "w0", 0)
    assert preempt(ask("new", 12, priority=1), fleet) is None
    assert preempt(ask("new", 32, priority=1, preempts=True), fleet) is None
    fleet = fleet_of((24,))
    put(fleet, ask("important", 20), "w0", 0)
    assert preempt(ask("new", 12, priority=5, preempts=True), fleet) is None


def test_one_move_makes_room() -> None:
    fleet = fleet_of((24, 24), (24,))
    residents = [
        put(fleet, ask("a", 10), "w0", 0),
        put(fleet, ask("b", 10), "w0", 1),
        put(fleet, ask("c", 10), "w1", 0),
    ]
    big = ask("big", 20)
    assert isinstance(Placer(fleet).place(big), Refused)
    plan = defragment(big, fleet, residents)
    assert plan is not None
    [move] = plan.moves
    assert move.before.gpus == plan.placed.place.gpus
    assert move.after.gpus != move.before.gpus
    assert list(fleet.occupants) == ["a", "b", "c"], "nothing is done"


def test_instances_without_an_ask_do_not_move() -> None:
    fleet = fleet_of((24,), (24,))
    stays, moves = put(fleet, ask("stays", 10), "w0", 0), put(fleet, ask("moves", 10), "w1", 0)
    assert defragment(ask("big", 20), fleet, []) is None
    plan = defragment(ask("big", 20), fleet, [moves])
    assert plan is not None
    assert plan.placed.place.gpus == (("w1", 0),)
    assert stays.instance_id not in {move.instance_id for move in plan.moves}


@given(
    st.lists(st.lists(st.sampled_from([16, 24]), min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(2, 14), max_size=6),
    st.integers(8, 24),
)
@settings(max_examples=examples(150))
def test_plans_can_be_carried_out(workers: list[list[int]], residents: list[int], size: int) -> None:
    """In order, and every instance always has room."""
    fleet = fleet_of(*map(tuple, workers))
    asks = []
    for number, resident in enumerate(residents):
        one = ask(f"r{number}", resident)
        placed = Placer(fleet).place(one)
        if isinstance(placed, Placed):
            fleet.claim(one.instance_id, placed.place)
            asks.append(one)
    wanted = ask("wanted", size)
    plan = defragment(wanted, fleet, asks)
    if plan is None:
        return
    for move in plan.moves:
        assert fleet.release(move.instance_id)
    fleet.claim("wanted", plan.placed.place)
    for move in plan.moves:
        fleet.claim(move.instance_id, move.after)
    assert (fleet.gpus.columns[FREE_BYTES] >= 0).all()  # type: ignore[operator]


def test_what_was_put_there_by_hand_does_not_move() -> None:
    fleet = fleet_of((80,), (40,))
    moves = put(fleet, ask("a", 20), "w0", 0)
    assert defragment(ask("big", 70), fleet, [moves]) is not None
    assert defragment(ask("big", 70), fleet, [ask("a", 20, workers=frozenset({"w0"}))]) is None
    assert defragment(ask("big", 70), fleet, [ask("a", 20, gpus=frozenset({("w0", 0)}))]) is None


def test_no_plan_against_a_choice_by_hand() -> None:
    fleet = fleet_of((80,), (40,))
    moves = put(fleet, ask("a", 20), "w0", 0)
    assert defragment(ask("big", 70, workers=frozenset({"w1"})), fleet, [moves]) is None
