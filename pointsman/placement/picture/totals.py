"""A whole fleet in a few numbers: in one sentence, and by GPU model."""

import msgspec

from pointsman.placement.fleet import EXCLUSIVE, FREE_BYTES, TENANTS, Fleet
from pointsman.placement.gpu_models import short_gpu_name
from pointsman.placement.picture.parts import counted, gib
from pointsman.types import WorkerStatus


class Total(msgspec.Struct):
    """All GPUs of one model."""

    gpus: int = 0
    total_bytes: int = 0
    reserved_bytes: int = 0
    others_bytes: int = 0
    free_bytes: int = 0
    """That somebody could still have: not what is held, and never below 0."""
    held_bytes: int = 0
    empty: int = 0
    """GPUs that nobody has a part of."""
    largest_bytes: int = 0
    """The most that is free on one GPU."""

    @property
    def claimed_bytes(self) -> int:
        rest = self.total_bytes - self.reserved_bytes - self.others_bytes - self.free_bytes - self.held_bytes
        return max(rest, 0)


def totals(fleet: Fleet) -> dict[str, Total]:
    """By model, in the order of the fleet. GPUs of unified memory are not counted: their memory is the machine's."""
    found: dict[str, Total] = {}
    names: dict[str, str] = {}
    columns = fleet.gpus.columns
    numbers = zip(columns[FREE_BYTES], columns[TENANTS], columns[EXCLUSIVE], strict=True)
    for device, (free, tenants, exclusive) in zip(fleet.gpus, numbers, strict=True):
        gpu, worker = device.gpu, device.host.worker
        if worker.unified_memory:
            continue
        name = names.get(gpu.model) or names.setdefault(gpu.model, short_gpu_name(gpu.model) or "GPU")
        one = found.setdefault(name, Total())
        one.gpus += 1
        one.total_bytes += gpu.memory_bytes
        one.reserved_bytes += worker.reserved_gpu_bytes
        one.others_bytes += gpu.used_bytes
        one.empty += not tenants and not gpu.used_bytes
        rest = max(int(free), 0)
        if exclusive:
            one.held_bytes += rest
        else:
            one.free_bytes += rest
            if worker.status is WorkerStatus.READY:
                one.largest_bytes = max(one.largest_bytes, rest)
    return found


def headline(fleet: Fleet) -> str:
    """11 workers, 47 GPUs with 2,921 GiB: 41 % claimed, 1 % used by others, 58 % free"""
    by_model = totals(fleet)
    workers = counted(len(fleet), "worker")
    size = sum(one.total_bytes for one in by_model.values())
    if not size:
        return f"{workers}, {counted(len(fleet.gpus), 'GPU')}"
    own = sum(one.gpus for one in by_model.values())
    gpus = f"{counted(own, 'GPU')} with {gib(size)} GiB"
    if own < len(fleet.gpus):
        gpus += f" (and {len(fleet.gpus) - own:,} of unified memory)"
    shares = {
        "claimed": sum(one.claimed_bytes for one in by_model.values()),
        "used by others": sum(one.others_bytes for one in by_model.values()),
        "free": sum(one.free_bytes for one in by_model.values()),
    }
    words = ", ".join(f"{share / size:.0%} {word}".replace("%", " %") for word, share in shares.items() if share)
    return f"{workers}, {gpus}: {words}"


SUMMARY_HEADS = ("GPU", "count", "GiB", "claimed", "by others", "free", "empty GPUs", "largest free")


def summary_rows(fleet: Fleet) -> list[list[str]]:
    """Cells of the table by model."""
    return [
        [
            name,
            f"{one.gpus:,}",
            gib(one.total_bytes),
            gib(one.claimed_bytes),
            gib(one.others_bytes),
            gib(one.free_bytes),
            f"{one.empty:,}",
            gib(one.largest_bytes),
        ]
        for name, one in totals(fleet).items()
    ]
