"""The last tier: on the CPU, if the memory of the machine suffices."""

from pointsman.placement.asks import Ask, Claim, Place, Tier
from pointsman.placement.fit.base import FitFilter, HostRoom, Mask, TierFit
from pointsman.placement.fleet import Host


class FitsOnCpu(FitFilter):
    """Demands memory of the machine for all of it."""

    tier = Tier.CPU

    def forbidden(self, ask: Ask) -> str | None:
        return "the engine needs a GPU (CPU is off)" if ask.engine.needs_gpu and not ask.cpu else None

    def fit(self, ask: Ask, among: Mask) -> TierFit:
        needed = ask.need.cpu_bytes
        hosts = HostRoom(self.fleet, ask.cpus, needed)

        def place(host: Host) -> Place:
            claim = Claim(worker=str(host), cpus=ask.cpus, memory_bytes=needed)
            return Place(tier=self.tier, claims=(claim,), gpu_layers=0)

        return TierFit(
            hosts.enough & among, hosts.memory, needed, place, lambda host: hosts.lacking(host) or "no room", gpus=0
        )
