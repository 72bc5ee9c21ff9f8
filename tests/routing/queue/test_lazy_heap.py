from hypothesis import given
from hypothesis import strategies as st

from pointsman.routing.queue.lazy_heap import SLACK, LazyHeap

MEMBERS = st.integers(0, 12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), MEMBERS, st.integers(0, 5)),
        st.tuples(st.just("discard"), MEMBERS, st.just(0)),
        st.tuples(st.just("pop"), st.just(0), st.just(0)),
    ),
    max_size=120,
)


@given(STEPS)
def test_it_agrees_with_a_sorted_dictionary_after_every_step(steps: list[tuple[str, int, int]]) -> None:
    heap: LazyHeap[int] = LazyHeap()
    model: dict[int, int] = {}

    def expected() -> list[int]:
        return sorted(model, key=lambda member: (model[member], member))

    for step, member, key in steps:
        if step == "put":
            heap.put(member, key, member)
            model[member] = key
        elif step == "discard":
            assert heap.discard(member) is (member in model)
            model.pop(member, None)
        elif model:
            assert heap.pop() == expected()[0]
            del model[expected()[0]]
        assert list(heap.in_order()) == expected()
        assert heap.first() == (expected()[0] if model else None)
        assert heap.first_key() == (model[expected()[0]] if model else None)
        assert len(heap) == len(model)
        assert all((member in heap) is (member in model) for member in range(13))


def test_dead_entries_stay_fewer_than_live_ones() -> None:
    heap: LazyHeap[int] = LazyHeap()
    heap.put(-1, -1, 0)  # stays first, so that no entry below it becomes the first
    for step in range(10_000):
        heap.put(step % 50, step, step)
        heap.discard((step * 7) % 50)
        assert len(heap._entries) <= 2 * len(heap) + SLACK
