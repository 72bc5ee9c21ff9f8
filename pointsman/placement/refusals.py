"""Why there is no place, and what would have to change."""

from typing import Any

import msgspec

from pointsman.placement.asks import Ask, Claim, Place, Tier
from pointsman.placement.devices import Devices
from pointsman.placement.fit.base import claims_of
from pointsman.placement.fleet import Fleet, Host
from pointsman.placement.words import gib
from pointsman.selection import SchedulingFailure, Trace
from pointsman.selection.arrays import np


class Refused(msgspec.Struct, frozen=True, eq=False):
    """An ask for which there is no place: a value, because that is an ordinary outcome."""

    ask: Ask
    failure: SchedulingFailure[Host]
    trace: Trace | None = None

    def reasons(self) -> dict[str, dict[str, str]]:
        """By tier and worker: why not. The last tier that was tried has the reasons of the filters before it too."""
        runs = () if self.trace is None else self.trace.profiles
        return {
            run.profile: {str(who): f"{name}: {why}" for name, rejected in run.stages for who, why in rejected}
            for run in runs
        }

    def in_words(self) -> str:
        """Why, by tier, in how many workers."""
        told = []
        for run in () if self.trace is None else self.trace.profiles:
            kinds: dict[str, int] = {}
            for _, rejected in run.stages:
                for _, why in rejected:
                    kind = why if why.startswith("not allowed") else why.partition(":")[0]
                    kinds[kind] = kinds.get(kind, 0) + 1
            told.append(f"{run.profile}: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
        return "; ".join(told) or str(self.failure)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"instance": self.ask.instance_id, "why": self.in_words(), "reasons": self.reasons()}


def hints(ask: Ask, fleet: Fleet, devices: Devices) -> list[str]:
    """What would have to change for there to be a place, as the fleet stands."""
    told = []
    able, free = devices.able(ask), devices.free(ask)
    need = ask.need
    if able.any() and 1 in need.tensor_parallel_sizes:
        row = int(np.argmax(np.where(able, free, -np.inf)))
        largest = float(free[row])
        if largest < need.gpu_bytes(1):
            where = fleet.gpus[row]
            told.append(f"needs {gib(need.gpu_bytes(1))} on one GPU; largest free is {gib(largest)} on {where}")
            context = need.context_within(largest)
            if context:
                told.append(f"context {context:,} would fit there")
    if not ask.several_gpus and max(need.tensor_parallel_sizes) > 1:
        told.append("several GPUs of one worker are not allowed")
    if not ask.several_workers and ask.engine.distributed and need.layers > 1:
        told.append("several workers are not allowed")
    if not ask.partial_offload and ask.engine.partial_offload and need.layers > 1:
        told.append("partial offload is not allowed")
    return told


def forced(ask: Ask, fleet: Fleet, devices: Devices) -> Place | None:
    """A place although there is no room: on the GPU with the most left, or on the worker with the most memory."""
    able, free = devices.able(ask), devices.free(ask)
    if able.any() and 1 in ask.need.tensor_parallel_sizes:
        device = fleet.gpus[int(np.argmax(np.where(able, free, -np.inf)))]
        claims = claims_of(ask, [device], ask.need.gpu_bytes(1))
        return Place(tier=Tier.ONE_GPU, claims=claims, overcommitted=True)
    if (ask.engine.needs_gpu and not ask.cpu) or not len(fleet):
        return None
    host = max(fleet.workers, key=lambda one: one.worker.memory_bytes)
    claim = Claim(worker=str(host), cpus=ask.cpus, memory_bytes=ask.need.cpu_bytes)
    return Place(tier=Tier.CPU, claims=(claim,), gpu_layers=0, overcommitted=True)
