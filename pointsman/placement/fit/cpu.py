"""The last tier: on the CPU, if the memory of the machine suffices."""

from pointsman.placement.asks import Ask, Claim, Place, Tier
from pointsman.placement.devices import Mask
from pointsman.placement.fit.base import HostRoom, ResourceFit, TierFit
from pointsman.placement.fleet import Host
from pointsman.reasons import Reason


class FitsOnCpu(ResourceFit):
    """Demands memory of the machine for the whole instance."""

    tier = Tier.CPU

    def forbidden(self, ask: Ask) -> Reason | None:
        if ask.open_to(self.tier):
            return None
        return Reason("engine-needs-gpu" if ask.engine.needs_gpu else "means-gpus")

    def fit(self, ask: Ask, among: Mask) -> TierFit:
        needed = ask.need.cpu_bytes
        hosts = HostRoom(self.fleet, ask.cpus, needed)

        def place(host: Host) -> Place:
            claim = Claim(worker=str(host), cpus=ask.cpus, memory_bytes=needed)
            return Place(tier=self.tier, claims=(claim,), gpu_layers=0)

        def why(host: Host) -> Reason:
            return hosts.lacking(host) or Reason("no-room")

        return TierFit(ask, hosts.enough & among, hosts.memory, needed, place, why, gpus=0)
