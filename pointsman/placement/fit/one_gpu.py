"""The first tier: all of it on one GPU."""

from pointsman.placement.asks import Arrangement, Ask, Place, Tier
from pointsman.placement.fit.base import Fit, FitFilter, Mask, claims_of, tightest_first
from pointsman.placement.fleet import Host
from pointsman.placement.words import gib
from pointsman.selection.arrays import np


class FitsOnOneGpu(FitFilter):
    """Demands a GPU with room for all of it."""

    tier = Tier.ONE_GPU

    def forbidden(self, ask: Ask) -> str | None:
        return None if 1 in ask.need.tensor_parallel_sizes else "it must be divided among several GPUs"

    def fit(self, ask: Ask, among: Mask) -> Fit:
        devices, needed = self.devices(), ask.need.gpu_bytes(1)
        able, free = devices.able(ask), devices.free(ask)
        room = able & (free >= needed)
        if ask.arrangement is Arrangement.BINPACK:
            best = devices.smallest(np.where(room, free, np.inf))
        else:
            best = devices.largest(np.where(room, free, -np.inf))
        host_room = self.has_host_room(ask, ask.need.host_bytes)
        fits = np.isfinite(best) & host_room & among
        largest = devices.largest(np.where(able, free, -np.inf))

        def place(host: Host) -> Place:
            fitting = [device for device in host.devices if room[device.row]]
            chosen = tightest_first(ask, fitting, free)[:1]
            return Place(tier=self.tier, claims=claims_of(ask, chosen, needed))

        def why(host: Host) -> str:
            lacking = self.lacks_gpus(able, host)
            if lacking is None and largest[host.row] < needed:
                lacking = f"no room on one GPU: needs {gib(needed)}, the largest free is {gib(largest[host.row])}"
            return lacking or self.lacks_host_room(ask, ask.need.host_bytes, host) or "no room"

        return Fit(fits, best, needed, place, why)
