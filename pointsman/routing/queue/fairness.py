"""Whose turn it is, among the flows of a band.

A policy is named in configuration; each band gets `Turns` of its own from it. Turns know which flows have waiting work
and who stands first in each. Every method costs at most log-many steps in the number of flows.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol, runtime_checkable

from pointsman.routing.queue.items import Queued
from pointsman.routing.queue.lazy_heap import LazyHeap


class Turns(ABC):
    """The turns of one band. The last three methods may be left as they are."""

    forgets: ClassVar[bool] = False
    """Whether who went before makes no difference once nobody waits. Then a request that need not wait is not told."""

    @abstractmethod
    def waits(self, flow: str, head: Queued) -> None:
        """This flow has waiting work, first of it `head`. Called when it starts, and whenever its head changes."""

    @abstractmethod
    def leaves(self, flow: str) -> None:
        """This flow has no waiting work any more."""

    @abstractmethod
    def next(self) -> str | None:
        """The flow whose turn it is; None when nobody waits. Asking changes nothing."""

    def taken(self, item: Queued) -> None:
        """A request goes to be served: mostly the head of the next flow, but others may be taken out of turn. `waits`
        or `leaves` follows. Charge it now, as more may be taken before this one is sent."""

    def returned(self, item: Queued) -> None:
        """What was taken was not served after all. If it is in the order again, `waits` has been called before."""

    def ended(self, item: Queued, output_tokens: int) -> None:
        """What was taken has been served."""


@runtime_checkable
class FairnessPolicy(Protocol):
    """Shares a band between its flows."""

    def for_band(self) -> Turns:
        """Turns for one more band, with nobody waiting."""
        ...


class GlobalStrictFairnessPolicy:
    """No fairness: the flow whose head comes first under the band's ordering."""

    def for_band(self) -> Turns:
        return _ByHead()


class _ByHead(Turns):
    forgets = True

    def __init__(self) -> None:
        self._flows: LazyHeap[str] = LazyHeap()

    def waits(self, flow: str, head: Queued) -> None:
        self._flows.put(flow, head.order_key, head.seq)

    def leaves(self, flow: str) -> None:
        self._flows.discard(flow)

    def next(self) -> str | None:
        return self._flows.first()


class RoundRobinFairnessPolicy:
    """One request of each flow in turn, flows in order of their ids: each of n waiting flows gets one of n turns.

    The turn goes on from where the last chosen flow stands, also when that flow has no work left.
    """

    def for_band(self) -> Turns:
        return _InTurn()


class _InTurn(Turns):
    """Two heaps, as an elevator has: flows beyond the last chosen one, and those whose turn is in the next round."""

    forgets = True

    def __init__(self) -> None:
        self._last = ""
        self._ahead: LazyHeap[str] = LazyHeap()
        self._behind: LazyHeap[str] = LazyHeap()

    def waits(self, flow: str, head: Queued) -> None:
        if flow not in self._ahead and flow not in self._behind:
            self._side_of(flow).put(flow, flow, 0)

    def leaves(self, flow: str) -> None:
        self._ahead.discard(flow)
        self._behind.discard(flow)

    def next(self) -> str | None:
        return (self._ahead or self._behind).first()

    def taken(self, item: Queued) -> None:
        if item.flow != self.next():
            return  # out of turn: the round goes on where it was
        if not self._ahead:
            self._ahead, self._behind = self._behind, self._ahead
        self._ahead.discard(item.flow)
        self._behind.put(item.flow, item.flow, 0)
        self._last = item.flow

    def _side_of(self, flow: str) -> LazyHeap[str]:
        return self._ahead if flow > self._last else self._behind
