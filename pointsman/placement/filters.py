"""Filters of workers, in their order: labels, status, choice by hand, engine. Whether there is room, tiers say."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from pointsman.placement.asks import Ask
from pointsman.placement.fleet import Host
from pointsman.reasons import Reason
from pointsman.selection import Cycle, PerMembers, Positions, Rejected, RejectedEach, Roster
from pointsman.types import WorkerStatus

AskCycle: TypeAlias = Cycle[Ask]
Hosts: TypeAlias = Roster[Host]
Rejections: TypeAlias = Iterable[tuple[Host, Reason | str]]

MOST_KINDS = 256
"""Of asks, for which it is remembered whom they turn away."""


class Remembered:
    """Whom asks of one kind turn away, until the members change."""

    def __init__(self) -> None:
        self._known: PerMembers[Host, dict[object, list[int]]] = PerMembers(lambda _: {})

    def rows(self, kind: object, hosts: Hosts, turns_away: Callable[[Host], bool]) -> Positions:
        known = self._known.of(hosts)
        rows = known.get(kind)
        if rows is None:
            if len(known) >= MOST_KINDS:
                known.clear()
            rows = known[kind] = [host.row for host in hosts.whole if turns_away(host)]
        if not rows or hosts.rows is None:
            return rows
        gone = set(rows)
        return [position for position, row in enumerate(hosts.rows) if int(row) in gone]


class MatchesLabels:
    """Demands the labels of the selector."""

    def __init__(self) -> None:
        self._others = Remembered()

    def rejections(self, cycle: AskCycle, candidates: Hosts) -> Rejections:
        selector = cycle.request.selector
        if not selector.expressions:
            return ()
        others = self._others.rows(selector.expressions, candidates, lambda host: not selector.matches(host.labels))
        if not len(others):
            return ()
        return RejectedEach(
            candidates, others, lambda host: Reason("label-differs", selector.mismatch(host.labels) or {})
        )


class IsReady:
    """Demands that the worker takes new instances."""

    def __init__(self) -> None:
        self._others = Remembered()

    def rejections(self, cycle: AskCycle, candidates: Hosts) -> Rejections:
        others = self._others.rows(None, candidates, lambda host: host.worker.status is not WorkerStatus.READY)
        return Worded(candidates, others, lambda host: f"not ready: {host.worker.status.value}") if len(others) else ()


class ChosenByHand:
    """Demands a worker, or a worker with a GPU, that was chosen by hand; if none was, anybody will do."""

    def __init__(self) -> None:
        self._others = Remembered()

    def rejections(self, cycle: AskCycle, candidates: Hosts) -> Rejections:
        ask = cycle.request
        if not ask.workers and not ask.gpus:
            return ()
        chosen = ask.workers or frozenset(worker for worker, _ in ask.gpus)
        others = self._others.rows(chosen, candidates, lambda host: str(host) not in chosen)
        return Rejected(candidates, others, "not-chosen-by-hand") if len(others) else ()


class SuitsEngine:
    """Demands GPUs that the engine runs on, of a model that is allowed, unless it runs without."""

    def __init__(self) -> None:
        self._others = Remembered()

    def rejections(self, cycle: AskCycle, candidates: Hosts) -> Rejections:
        ask = cycle.request
        if not ask.engine.needs_gpu or ask.cpu:
            return ()
        vendors, models = ask.engine.vendors, ask.gpu_models

        def unsuited(host: Host) -> bool:
            gpus = host.worker.gpus
            return not any(gpu.vendor in vendors and (not models or gpu.model in models) for gpu in gpus)

        others = self._others.rows((vendors, models), candidates, unsuited)
        if not len(others):
            return ()
        wanted = " or ".join(sorted(models or vendors))
        return Worded(candidates, others, lambda host: f"no GPU for the engine: it has {_gpus(host)}, not {wanted}")


class Worded(Rejected[Host]):
    """Rejections whose reasons are written when somebody reads them."""

    __slots__ = ("_why",)

    def __init__(self, candidates: Hosts, positions: Positions, why: Callable[[Host], str]) -> None:
        super().__init__(candidates, positions, "")
        self._why = why

    def _reason(self, position: int) -> Reason:
        return Reason("text", {"text": self._why(self.candidate(position))})


def _gpus(host: Host) -> str:
    return ", ".join(sorted({gpu.model or gpu.vendor for gpu in host.worker.gpus})) or "none"
