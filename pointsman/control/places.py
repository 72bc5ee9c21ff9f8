"""The places of instances: claimed when an instance is launched, released when its process is gone."""

from collections.abc import Iterable, Mapping

import msgspec

from pointsman.control.desired import DesiredDeployment
from pointsman.placement.asks import Place
from pointsman.placement.fleet import Fleet, Snapshot
from pointsman.placement.moves import preempt
from pointsman.placement.placer import Placer
from pointsman.placement.refusals import Refused
from pointsman.placement.workload import KindCount, LearnedWorkload
from pointsman.types import Worker

WORKLOAD = "/workload"
"""The name under which a plane stores what was learned; no deployment may have it."""


class Places:
    """The known workers, and the claims on them. While no worker is known, instances need no place.

    A placer takes memory, so it is created when the first instance needs a place.
    """

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._pending: dict[str, Worker] = {}
        """Workers that were not passed to the placer yet, because thousands may come before it is used again."""
        self._placer: Placer | None = None
        self.learned = LearnedWorkload()
        """What was learned from the asks so far. Packing keeps room for similar asks."""

    @property
    def placer(self) -> Placer:
        if self._placer is None:
            self._placer = Placer(Fleet(self._workers.values()), learned=self.learned)
        elif self._pending:
            self._placer.fleet.put(*self._pending.values())
        self._pending = {}
        return self._placer

    @property
    def fleet(self) -> Fleet:
        return self.placer.fleet

    @property
    def taken(self) -> Fleet | None:
        """The fleet; None if no instance has needed a place yet."""
        return None if self._placer is None else self.fleet

    def snapshot(self) -> Snapshot:
        return Snapshot(tuple(self._workers.values())) if self._placer is None else self.fleet.snapshot()

    def seen(self, worker: Worker) -> list[str]:
        """A worker is new or has changed. Returns the instances whose GPUs are gone."""
        is_new = worker.name not in self._workers
        self._workers[worker.name] = worker
        if is_new or self._placer is None:
            self._pending[worker.name] = worker
            return []
        return self.fleet.put(worker)

    def lost(self, worker: str) -> list[str]:
        """A worker is gone. Returns the instances that were on it."""
        if self._workers.pop(worker, None) is None or self._placer is None:
            return []
        return self.fleet.remove(worker)

    def take(self, instance_id: str, spec: DesiredDeployment) -> Place | Refused | None:
        """Claim a place for an instance. Returns the place, why there is no place, or None if no place is needed."""
        if spec.ask is None or not self._workers:
            return None
        placer = self.placer
        ask, missing = msgspec.structs.replace(spec.ask, instance_id=instance_id), 1
        if ask.all_or_nothing:
            missing = spec.replicas - len(placer.fleet.occupants.of(spec.name))
        outcome = placer.take(ask, missing)
        return outcome if isinstance(outcome, Refused) else outcome.place

    def copy(self) -> "Places":
        made = Places()
        made._workers = dict(self._workers)
        made.learned = self.learned.copy()
        made._placer = None if self._placer is None else Placer(self.fleet.copy(), learned=made.learned)
        return made

    def in_the_way(self, instance_id: str, spec: DesiredDeployment) -> tuple[str, ...]:
        """The instances to evict for an instance that may preempt others; empty if evictions would not help."""
        if spec.ask is None or not spec.ask.preempts:
            return ()
        found = preempt(msgspec.structs.replace(spec.ask, instance_id=instance_id), self.fleet)
        return () if found is None else found.victims

    def keep(self, instance_id: str, place: Place, deployment: str) -> list[str]:
        """Claim the place of an adopted instance, if the worker that it runs on is known. Returns the workers of its
        place that are missing."""
        if place.home not in self._workers or instance_id in self.fleet.occupants:
            return []
        there = tuple(claim for claim in place.claims if claim.worker in self._workers)
        self.fleet.claim(instance_id, msgspec.structs.replace(place, claims=there), deployment)
        return [worker for worker in place.workers if worker not in self._workers]

    def give_back(self, instance_id: str) -> bool:
        """Release a place. Returns False if the instance had no place."""
        return self._placer is not None and self.fleet.release(instance_id)


def labels_at(places: Places, place: Place | None) -> dict[str, str]:
    """The labels that all workers of a place share. Without a place, the labels of the only worker, if any."""
    names = places._workers if place is None else place.workers
    on = [places._workers[name].labels for name in names if name in places._workers]
    if not on or (place is None and len(on) > 1):
        return {}
    return {name: value for name, value in on[0].items() if all(other.get(name) == value for other in on[1:])}


def labels_change(places: Places, worker: Worker) -> bool:
    """Whether a known worker would get other labels or another price."""
    known = places._workers.get(worker.name)
    before = None if known is None else (known.labels, known.price_per_gpu_hour)
    return known is not None and before != (worker.labels, worker.price_per_gpu_hour)


def price_at(places: Places, place: Place | None) -> float | None:
    """The hourly price of the GPUs of a place, by the prices of its workers; None if a worker has no price."""
    if place is None or not place.gpus:
        return None
    known = [places._workers[name].price_per_gpu_hour for name, _ in place.gpus if name in places._workers]
    prices = [price for price in known if price is not None]
    return sum(prices) if len(prices) == len(place.gpus) else None


def preview(
    places: Places, wanted: Mapping[str, DesiredDeployment], leaving: Iterable[str]
) -> dict[str, Place | Refused]:
    """What `take` would return for each instance in turn, on a copy of the fleet. Refused instances are tried again
    after others have left.

    Instances that need no known place are left out.
    """
    trial = places.copy()
    found = {name: outcome for name, spec in wanted.items() if (outcome := trial.take(name, spec)) is not None}
    for instance_id in leaving:
        trial.give_back(instance_id)
    refused = [name for name, outcome in found.items() if isinstance(outcome, Refused)]
    return found | {name: outcome for name in refused if (outcome := trial.take(name, wanted[name])) is not None}


def remember(places: Places, stored: str) -> None:
    """Restore what an earlier controller has learned about expected asks, as `LearnedWorkload.as_json` returned it. If
    `stored` is empty, there is nothing to restore."""
    counts = msgspec.json.decode(stored, type=list[KindCount]) if stored else []
    places.learned = LearnedWorkload([*counts, *places.learned.counts()])
    if places._placer is not None:
        places._placer = Placer(places._placer.fleet, learned=places.learned)
