"""Where instances are: a place is claimed when one is launched, and given back, once, when its process is gone."""

from collections.abc import Iterable, Mapping

import msgspec

from pointsman.control.desired import DesiredDeployment
from pointsman.placement.asks import Place
from pointsman.placement.fleet import Fleet, Snapshot
from pointsman.placement.moves import preempt
from pointsman.placement.placer import Placer
from pointsman.placement.refusals import Refused
from pointsman.types import Worker


class Places:
    """The workers that are known, and what was claimed of them. While none is known, instances get no place.

    A placer takes memory of its own, so there is one only from the first time that somebody needs a place.
    """

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._news: dict[str, Worker] = {}
        """Workers that the placer has not been told of yet: thousands may come before it is asked again."""
        self._placer: Placer | None = None

    @property
    def placer(self) -> Placer:
        if self._placer is None:
            self._placer = Placer(Fleet(self._workers.values()))
        elif self._news:
            self._placer.fleet.put(*self._news.values())
        self._news = {}
        return self._placer

    @property
    def fleet(self) -> Fleet:
        return self.placer.fleet

    @property
    def taken(self) -> Fleet | None:
        """The same, if anybody has ever needed a place."""
        return None if self._placer is None else self.fleet

    def snapshot(self) -> Snapshot:
        """The fleet as it is now."""
        return Snapshot(tuple(self._workers.values())) if self._placer is None else self.fleet.snapshot()

    def seen(self, worker: Worker) -> list[str]:
        """A worker is there, or something about it has changed. The instances whose GPUs are not there any more."""
        is_new = worker.name not in self._workers
        self._workers[worker.name] = worker
        if is_new or self._placer is None:
            self._news[worker.name] = worker
            return []
        return self.fleet.put(worker)

    def lost(self, worker: str) -> list[str]:
        """A worker is gone: the instances that had a part of it have no place any more."""
        if self._workers.pop(worker, None) is None or self._placer is None:
            return []
        return self.fleet.remove(worker)

    def take(self, instance_id: str, spec: DesiredDeployment) -> Place | Refused | None:
        """A place for an instance, claimed; why there is none; or None if it needs none that we know of."""
        if spec.ask is None or not self._workers:
            return None
        placer = self.placer
        ask, missing = msgspec.structs.replace(spec.ask, instance_id=instance_id), 1
        if ask.all_or_nothing:
            missing = spec.replicas - len(placer.fleet.occupants.of(spec.name))
        outcome = placer.take(ask, missing)
        return outcome if isinstance(outcome, Refused) else outcome.place

    def copy(self) -> "Places":
        """The same workers and claims, to try things out on."""
        made = Places()
        made._workers = dict(self._workers)
        made._placer = None if self._placer is None else Placer(self.fleet.copy())
        return made

    def preview(self, wanted: Mapping[str, DesiredDeployment], leaving: Iterable[str]) -> dict[str, Place | Refused]:
        """What `take` gives one instance after the other, on a copy; for those refused, after others have left.

        Instances that need no known place are left out.
        """
        trial = self.copy()
        found = {name: outcome for name, spec in wanted.items() if (outcome := trial.take(name, spec)) is not None}
        for instance_id in leaving:
            trial.give_back(instance_id)
        refused = [name for name, outcome in found.items() if isinstance(outcome, Refused)]
        return found | {name: outcome for name in refused if (outcome := trial.take(name, wanted[name])) is not None}

    def in_the_way(self, instance_id: str, spec: DesiredDeployment) -> tuple[str, ...]:
        """Whom to stop so that there is a place for an instance that may preempt others; empty: that would not help."""
        if spec.ask is None or not spec.ask.preempts:
            return ()
        found = preempt(msgspec.structs.replace(spec.ask, instance_id=instance_id), self.fleet)
        return () if found is None else found.victims

    def keep(self, instance_id: str, place: Place, deployment: str) -> None:
        """An instance that was there before us has this place, as far as its workers are known."""
        known = all(worker in self._workers for worker in place.workers)
        if known and instance_id not in self.fleet.occupants:
            self.fleet.claim(instance_id, place, deployment)

    def give_back(self, instance_id: str) -> bool:
        """Its process is gone. False: it had no place."""
        return self._placer is not None and self.fleet.release(instance_id)
