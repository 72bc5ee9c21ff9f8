"""Where instances are: a place is claimed when one is launched, and given back, once, when its process is gone."""

import msgspec

from pointsman.control.desired import DesiredDeployment
from pointsman.placement.asks import Place
from pointsman.placement.fleet import Fleet
from pointsman.placement.placer import Placer
from pointsman.placement.refusals import Refused
from pointsman.types import Worker


class Places:
    """The fleet as far as it is known. While no worker is known, instances are launched without a place."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self._placer = Placer(self.fleet)

    def seen(self, worker: Worker) -> None:
        """A worker is there, or something about it has changed."""
        self.fleet.put(worker)

    def lost(self, worker: str) -> list[str]:
        """A worker is gone: the instances that had a part of it have no place any more."""
        return self.fleet.remove(worker) if worker in self.fleet else []

    def take(self, instance_id: str, spec: DesiredDeployment) -> Place | Refused | None:
        """A place for an instance, claimed; why there is none; or None if it needs none that we know of."""
        if spec.ask is None or not len(self.fleet):
            return None
        ask = msgspec.structs.replace(spec.ask, instance_id=instance_id)
        outcome = self._placer.place(ask)
        if isinstance(outcome, Refused):
            return outcome
        self.fleet.claim(instance_id, outcome.place, ask.deployment, ask.priority)
        return outcome.place

    def keep(self, instance_id: str, place: Place, deployment: str) -> None:
        """An instance that was there before us has this place, as far as its workers are known."""
        known = all(worker in self.fleet for worker in place.workers)
        if known and self.fleet.place_of(instance_id) is None:
            self.fleet.claim(instance_id, place, deployment)

    def give_back(self, instance_id: str) -> bool:
        """Its process is gone. False: it had no place."""
        return self.fleet.release(instance_id)
