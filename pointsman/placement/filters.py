"""The workers that an ask may be on, by labels, status, choice by hand and engine. The tiers check for room."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TypeAlias

from pointsman.placement.asks import Ask, Tier
from pointsman.placement.fleet import Fleet, Host
from pointsman.placement.gpu_models import is_model
from pointsman.reasons import Reason
from pointsman.selection import Cycle, PerMembers, Positions, Rejected, RejectedEach, Roster
from pointsman.types import WorkerStatus

AskCycle: TypeAlias = Cycle[Ask]
Hosts: TypeAlias = Roster[Host]
Rejections: TypeAlias = Iterable[tuple[Host, Reason]]

MAX_CACHED_ASKS = 256


class RejectionCache:
    """Caches the rows that are rejected for each kind of ask, until the members change."""

    def __init__(self) -> None:
        self._known: PerMembers[Host, dict[object, list[int]]] = PerMembers(lambda _: {})

    def _rejected(self, kind: object, hosts: Hosts, rejects: Callable[[Host], bool]) -> Positions:
        """Positions of rejected workers in `hosts`. `rejects` is evaluated once per kind of ask."""
        known = self._known.of(hosts)
        rows = known.get(kind)
        if rows is None:
            if len(known) >= MAX_CACHED_ASKS:
                known.clear()
            rows = known[kind] = [host.row for host in hosts.whole if rejects(host)]
        if not rows or hosts.rows is None:
            return rows
        rejected = set(rows)
        return [position for position, row in enumerate(hosts.rows) if int(row) in rejected]


class MatchesLabels(RejectionCache):
    """Demands the labels of the selector."""

    def rejections(self, cycle: AskCycle, candidates: Hosts) -> Rejections:
        selector = cycle.request.selector
        if not selector.expressions:
            return ()
        rejected = self._rejected(selector.expressions, candidates, lambda host: not selector.matches(host.labels))

        def why(host: Host) -> Reason:
            return Reason("label-differs", selector.mismatch(host.labels) or {})

        return RejectedEach(candidates, rejected, why) if len(rejected) else ()


class IsReady(RejectionCache):
    """Demands that the worker takes new instances."""

    def rejections(self, cycle: AskCycle, candidates: Hosts) -> Rejections:
        rejected = self._rejected(None, candidates, lambda host: host.worker.status is not WorkerStatus.READY)

        def why(host: Host) -> Reason:
            return Reason("worker-not-ready", {"status": host.worker.status.value})

        return RejectedEach(candidates, rejected, why) if len(rejected) else ()


class ChosenByHand(RejectionCache):
    """Demands a worker, or a worker with a GPU, that was chosen by hand, if any was."""

    def rejections(self, cycle: AskCycle, candidates: Hosts) -> Rejections:
        ask = cycle.request
        if not ask.workers and not ask.gpus:
            return ()
        chosen = ask.workers or frozenset(worker for worker, _ in ask.gpus)
        rejected = self._rejected(chosen, candidates, lambda host: str(host) not in chosen)
        return Rejected(candidates, rejected, "not-chosen-by-hand") if len(rejected) else ()


class SuitsEngine(RejectionCache):
    """Demands a GPU that the engine runs on, of an allowed model, unless the engine runs without."""

    def rejections(self, cycle: AskCycle, candidates: Hosts) -> Rejections:
        ask = cycle.request
        if ask.open_to(Tier.CPU):
            return ()
        vendors, models = ask.engine.vendors, ask.gpu_models

        def unsuited(host: Host) -> bool:
            gpus = host.worker.gpus
            return not any(gpu.vendor in vendors and (not models or is_model(gpu.model, models)) for gpu in gpus)

        def why(host: Host) -> Reason:
            found = sorted({gpu.model or gpu.vendor for gpu in host.worker.gpus})
            return Reason("no-gpu-for-engine", {"found": found, "wanted": sorted(models or vendors)})

        rejected = self._rejected((vendors, models), candidates, unsuited)
        return RejectedEach(candidates, rejected, why) if len(rejected) else ()


def unknown_choice(fleet: Fleet, ask: Ask) -> Reason | None:
    """A reason with the first worker or GPU chosen by hand that has never existed. None if all of them have existed, or
    if the fleet has never had a worker."""
    for worker in sorted({*ask.workers, *(worker for worker, _ in ask.gpus)}) if fleet.seen else ():
        if worker not in fleet.seen:
            near = get_close_matches(worker, fleet.seen, n=1, cutoff=0.0)
            return Reason("no-such-worker", {"worker": worker, "nearest": near[0]})
    for worker, index in sorted(ask.gpus) if fleet.seen else ():
        if index not in fleet.seen[worker]:
            there = sorted(fleet.seen[worker], key=lambda one: (abs(one - index), one))
            return Reason("no-such-gpu", {"worker": worker, "gpu": index, "nearest": there[0] if there else None})
    return None


def knows_a_choice(fleet: Fleet, ask: Ask) -> bool:
    """Whether at least one of the workers, and one of the GPUs, that were chosen by hand exists or has existed."""
    known = any(worker in fleet.seen for worker in ask.workers) or not ask.workers
    return known and (any(index in fleet.seen.get(worker, ()) for worker, index in ask.gpus) or not ask.gpus)
