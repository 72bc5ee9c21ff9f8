"""The second tier: divided among GPUs of one worker, as few as will do."""

from collections.abc import Callable
from itertools import groupby

from pointsman.placement.asks import Ask, Place, Tier
from pointsman.placement.devices import Devices
from pointsman.placement.fit.base import Fit, FitFilter, Floats, Mask, claims_of, nowhere, tightest_first
from pointsman.placement.fleet import Device, Host
from pointsman.placement.words import gib
from pointsman.selection.arrays import np


class FitsOnSeveralGpus(FitFilter):
    """Demands so many GPUs of one worker, of one model unless they may be mixed, each with room for its part."""

    tier = Tier.SEVERAL_GPUS

    def forbidden(self, ask: Ask) -> str | None:
        if max(ask.need.tensor_parallel_sizes) < 2:
            return "it cannot be divided"
        if not ask.several_gpus or not ask.engine.tensor_parallel:
            return "it may have one GPU only"
        return None

    def fit(self, ask: Ask, among: Mask) -> Fit:
        devices = self.devices()
        able, free = devices.able(ask), devices.free(ask)
        host_room = self.has_host_room(ask, ask.need.host_bytes) & among
        sizes = [size for size in ask.need.tensor_parallel_sizes if size > 1]
        for size in sizes:
            needed = ask.need.gpu_bytes(size)
            room = able & (free >= needed)
            counts = devices.count(room) if ask.mixed_gpus else devices.count_alike(room)
            fits = (counts >= size) & host_room
            if fits.any():
                return self._found(ask, devices, size, needed, room, fits, free)
        return self._nobody(ask, sizes, able, free)

    def _found(self, ask: Ask, devices: Devices, size: int, needed: int, room: Mask, fits: Mask, free: Floats) -> Fit:
        tight = devices.smallest(np.where(room, free, np.inf))
        linked = (devices.count_linked(room) >= size).astype(np.float64)

        def place(host: Host) -> Place:
            chosen = self._chosen(ask, host, room, free, size)
            return Place(tier=self.tier, claims=claims_of(ask, chosen, needed), tensor_parallel_size=size)

        def why(host: Host) -> str:
            lacking = self.lacks_host_room(ask, ask.need.host_bytes, host)
            fitting = int(room[devices.of(host)].sum())
            return lacking or f"too few GPUs with room: {size} with {gib(needed)} each are needed, {fitting} have it"

        return Fit(fits, tight, needed, place, why, linked)

    def _nobody(self, ask: Ask, sizes: list[int], able: Mask, free: Floats) -> Fit:
        devices = self.devices()
        largest = devices.largest(np.where(able, free, -np.inf))

        def why(host: Host) -> str:
            lacking = self.lacks_gpus(able, host) or self.lacks_host_room(ask, ask.need.host_bytes, host)
            if lacking is not None:
                return lacking
            most = max((size for size in sizes if size <= len(host.devices)), default=sizes[0])
            each = f"{most} with {gib(ask.need.gpu_bytes(most))} each"
            here = f"{len(host.devices)} GPUs, the largest free is {gib(largest[host.row])}"
            return f"too few GPUs with room: needs {each}; it has {here}"

        return nowhere(len(self.fleet), why)

    def _chosen(self, ask: Ask, host: Host, room: Mask, free: Floats, size: int) -> list[Device]:
        """Linked ones if there are enough, else any; of one model unless they may be mixed."""
        fitting = [device for device in host.devices if room[device.row]]
        alike = [fitting] if ask.mixed_gpus else _groups(fitting, lambda device: device.gpu.model)
        options = [group for group in alike if len(group) >= size]
        linked = [
            links
            for group in options
            for links in _groups([device for device in group if device.gpu.link], lambda device: device.gpu.link)
            if len(links) >= size
        ]
        rows = [tightest_first(ask, group, free)[:size] for group in linked or options]
        return min(rows, key=lambda row: sum(float(free[device.row]) for device in row))


def _groups(devices: list[Device], key: Callable[[Device], str]) -> list[list[Device]]:
    return [list(group) for _, group in groupby(sorted(devices, key=key), key)]
