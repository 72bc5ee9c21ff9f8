"""Random fleets and asks of a few bytes each, so that everything is nearly full and every way can be tried."""

from hypothesis import strategies as st

from pointsman.placement.asks import Arrangement, Ask, EngineAbility, Need, Tier
from pointsman.selection import LabelSelector
from pointsman.types import Gpu, Worker, WorkerStatus

few = st.integers(0, 3)
rarely = st.sampled_from([False] * 7 + [True])
often = st.sampled_from([True] * 7 + [False])


@st.composite
def gpus(draw: st.DrawFn, most: int = 3) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            index=2 * place + 1,
            memory_bytes=draw(st.sampled_from([10, 16])),
            model=draw(st.sampled_from(["A", "A", "B"])),
            vendor=draw(st.sampled_from(["nvidia"] * 7 + ["other"])),
            used_bytes=draw(few),
            link=draw(st.sampled_from(["", "x"])),
            shareable=draw(often),
        )
        for place in range(min(most, draw(st.sampled_from([2, 3, 1, 3, 2, 0]))))
    )


@st.composite
def workers(draw: st.DrawFn, name: str, *, shared_memory: bool = True) -> Worker:
    """`shared_memory`: several GPUs may use the memory of the machine; else one at most."""
    unified = draw(rarely)
    return Worker(
        name=name,
        cpus=draw(st.sampled_from([2.0, 4.0])),
        memory_bytes=draw(st.sampled_from([16, 32, 24])),
        gpus=draw(gpus(most=3 if shared_memory or not unified else 1)),
        labels=draw(st.sampled_from([{}, {"rack": "r0"}, {"rack": "r0"}, {"rack": "r1"}])),
        status=draw(st.sampled_from([*[WorkerStatus.READY] * 7, WorkerStatus.DRAINING])),
        used_memory_bytes=draw(few),
        reserved_memory_bytes=draw(few),
        reserved_gpu_bytes=draw(st.integers(0, 1)),
        unified_memory=unified,
        files=draw(st.sampled_from([frozenset(), frozenset({"m"})])),
    )


@st.composite
def needs(draw: st.DrawFn) -> Need:
    layers = draw(st.sampled_from([2, 3, 4, 3, 4, 1]))
    parts = st.lists(few, min_size=layers, max_size=layers)
    ends = st.sampled_from([0, 1, 3, 6])
    return Need(
        model="m",
        layer_bytes=tuple(1 + size * draw(st.integers(1, 2)) for size in draw(parts)),
        first_bytes=draw(ends),
        last_bytes=draw(ends),
        kv_layer_bytes=tuple(draw(parts)),
        kv_splits=draw(st.sampled_from([1, 2])),
        activation_bytes=draw(st.integers(0, 1)),
        overhead_bytes=draw(st.integers(0, 1)),
        host_bytes=draw(few),
        context=draw(st.sampled_from([0, 1024])),
        tensor_parallel_sizes=draw(st.sampled_from([(1,), (1, 2), (1, 2, 3), (1, 3), (2,)])),
    )


engines = st.builds(
    EngineAbility, needs_gpu=often, tensor_parallel=often, distributed=often, partial_offload=often, name=st.just("e")
)


@st.composite
def asks(draw: st.DrawFn, name: str = "new") -> Ask:
    return Ask(
        instance_id=name,
        deployment=draw(st.sampled_from(["", "d", "e"])),
        need=draw(needs()),
        engine=draw(engines),
        cpus=draw(st.sampled_from([0.0, 0.0, 0.1, 0.7, 2.0])),
        gpu_share=draw(st.sampled_from([None, None, 0.1, 0.5, 0.7])),
        exclusive=draw(rarely),
        gpu_models=draw(st.sampled_from([frozenset()] * 7 + [frozenset({"A"})])),
        selector=draw(st.sampled_from([LabelSelector()] * 7 + [LabelSelector({"rack": "r0"})])),
        workers=draw(st.sampled_from([frozenset()] * 7 + [frozenset({"w0", "w2"})])),
        gpus=draw(st.sampled_from([frozenset()] * 7 + [frozenset({("w0", 1), ("w1", 1), ("w1", 3)})])),
        arrangement=draw(st.sampled_from(Arrangement)),
        several_gpus=draw(often),
        several_workers=draw(often),
        partial_offload=draw(often),
        cpu=draw(rarely),
        gpu_only=draw(rarely),
        tiers=draw(st.sampled_from([()] * 7 + [(Tier.CPU, Tier.ONE_GPU), (Tier.SEVERAL_GPUS,)])),
        mixed_gpus=draw(st.sampled_from([False, False, False, True, "generations"])),
        near=draw(st.sampled_from(["", "d"])),
    )
