"""The last tier: on the CPU, if the memory of the machine suffices."""

from pointsman.placement.asks import Ask, Claim, Place, Tier
from pointsman.placement.fit.base import Fit, FitFilter, Mask
from pointsman.placement.fleet import FREE_MEMORY, Host
from pointsman.selection.arrays import np


class FitsOnCpu(FitFilter):
    """Demands memory of the machine for all of it."""

    tier = Tier.CPU

    def forbidden(self, ask: Ask) -> str | None:
        return "the engine needs a GPU" if ask.engine.needs_gpu and not ask.cpu else None

    def fit(self, ask: Ask, among: Mask) -> Fit:
        needed = ask.need.cpu_bytes
        free = np.asarray(self.fleet.workers.columns[FREE_MEMORY])
        fits = self.has_host_room(ask, needed) & among

        def place(host: Host) -> Place:
            return Place(
                tier=self.tier,
                claims=(Claim(worker=str(host), cpus=ask.cpus, memory_bytes=needed),),
                gpu_layers=0,
            )

        return Fit(fits, free.copy(), needed, place, lambda host: self.lacks_host_room(ask, needed, host) or "no room")
