"""Small fleets and asks in one line. Sizes are in GiB."""

from collections.abc import Mapping, Sequence
from typing import Any

from pointsman.placement.asks import Ask, Claim, EngineAbility, Need, Place, Tier
from pointsman.placement.devices import Devices
from pointsman.placement.filters import Hosts
from pointsman.placement.fit import ResourceFit, TierFit
from pointsman.placement.fleet import Fleet, Host
from pointsman.placement.placer import Placed, Placer
from pointsman.placement.refusals import Refused
from pointsman.selection import Cycle, Filter, Scorer
from pointsman.types import Gpu, Worker

GIB = 1 << 30

LLAMA = EngineAbility(name="llama", needs_gpu=False, partial_offload=True)
"""An engine that can do everything."""


def gpu(index: int, size: float, **more: Any) -> Gpu:
    return Gpu(index=index, memory_bytes=int(size * GIB), **{"model": "H100", **more})


def worker(name: str, *gpus: float | Gpu, memory: float = 512, cpus: float = 64, **more: Any) -> Worker:
    """GPUs by their size; more about one of them as a `gpu(...)`."""
    listed = tuple(one if isinstance(one, Gpu) else gpu(index, one) for index, one in enumerate(gpus))
    return Worker(name=name, cpus=cpus, memory_bytes=int(memory * GIB), gpus=listed, **more)


def fleet(*workers: Worker, **claims: tuple[str, int | None, float]) -> Fleet:
    """Workers, and instances by their name: (worker, GPU, size)."""
    made = Fleet(workers)
    for instance_id, (where, index, size) in claims.items():
        made.claim(instance_id, place(where, index, size), deployment=instance_id.rstrip("0123456789"))
    return made


def place(where: str, index: int | None, size: float, **more: Any) -> Place:
    """On one GPU, or in the memory of a worker."""
    if index is None:
        claim = Claim(worker=where, memory_bytes=int(size * GIB), **more)
        return Place(tier=Tier.CPU, claims=(claim,), gpu_layers=0)
    return Place(tier=Tier.ONE_GPU, claims=(Claim(worker=where, gpu=index, gpu_bytes=int(size * GIB), **more),))


def need(*layers: float, kv: float = 0, sizes: Sequence[int] = (1, 2, 4), **more: float) -> Need:
    """Layers of these sizes, each with so much KV cache; `first=1` and so on for the other parts."""
    parts: dict[str, Any] = {f"{name}_bytes": int(size * GIB) for name, size in more.items()}
    return Need(
        layer_bytes=tuple(int(size * GIB) for size in layers),
        kv_layer_bytes=(int(kv * GIB),) * len(layers),
        kv_splits=8,
        tensor_parallel_sizes=tuple(sizes),
        **parts,
    )


def ask(*layers: float, of: Need | None = None, **more: Any) -> Ask:
    """For layers of these sizes, or for a need."""
    return Ask(instance_id="new", need=of or need(*layers), **more)


def placed(asked: Ask, where: Fleet) -> Place:
    """The place that there must be."""
    found = Placer(where).place(asked)
    assert isinstance(found, Placed), str(found.in_full)
    return found.place


def refused(asked: Ask, where: Fleet) -> Refused:
    """The refusal that there must be."""
    found = Placer(where).place(asked)
    assert isinstance(found, Refused), found.place
    return found


def gpus_of(found: Place) -> str:
    """w0/0 w0/1"""
    return " ".join(f"{name}/{index}" for name, index in found.gpus)


# What a plugin is handed, and what it says


def rejections(chooser: Filter[Host], asked: Ask, where: Fleet, among: Sequence[str] | None = None) -> dict[str, str]:
    """By worker: why it is turned away, of all workers or of these."""
    return {str(host): str(reason) for host, reason in chooser.rejections(Cycle(asked), roster(where, among))}


def roster(where: Fleet, among: Sequence[str] | None = None) -> Hosts:
    if among is None:
        return where.workers
    return where.workers.without([host.row for host in where.workers if str(host) not in among])


def fit_of(tier: type[ResourceFit], asked: Ask, where: Fleet, among: Sequence[str] | None = None) -> TierFit:
    """What a tier finds."""
    devices = Devices(where)
    return tier(where, lambda: devices).among(asked, roster(where, among))


def why_not(tier: type[ResourceFit], asked: Ask, where: Fleet, among: Sequence[str] | None = None) -> dict[str, str]:
    """By worker: why it does not fit in a tier."""
    fit = fit_of(tier, asked, where, among)
    return {str(host): str(fit.why(host)) for host in roster(where, among) if not fit.fits[host.row]}


def places_in(tier: type[ResourceFit], asked: Ask, where: Fleet) -> Mapping[str, Place]:
    """By worker that fits: the place it would be."""
    fit = fit_of(tier, asked, where)
    return {str(host): fit.place(host) for host in where.workers if fit.fits[host.row]}


def scores(
    scorer: Scorer[Host], asked: Ask, where: Fleet, tier: type[ResourceFit], among: Sequence[str] | None = None
) -> list[float]:
    """What a scorer says of these workers, after a tier has looked at all of them."""
    cycle = Cycle(fit_of(tier, asked, where))
    return [round(float(score), 3) for score in scorer.scores(cycle, roster(where, among))]
