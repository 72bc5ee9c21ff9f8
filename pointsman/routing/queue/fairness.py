"""Fairness between the flows of a band: which flow is next.

The configuration names a policy, and each band gets its own `Turns` from the policy. Turns keep track of the flows that
have waiting requests, and of the head of each. Every method takes at most O(log n) steps in the number of flows.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol, runtime_checkable

from pointsman.routing.queue.items import Queued
from pointsman.routing.queue.lazy_heap import LazyHeap


class Turns(ABC):
    """The turns of one band. Overriding the last three methods is optional."""

    forgets: ClassVar[bool] = False
    """Whether past turns make no difference once no flow waits. Then requests sent without waiting are not reported."""

    @abstractmethod
    def waits(self, flow: str, head: Queued) -> None:
        """Note that a flow has waiting requests, of which `head` is the first. This is called when the flow starts to
        wait, and whenever its head changes."""

    @abstractmethod
    def leaves(self, flow: str) -> None:
        """Note that a flow has no more waiting requests."""

    @abstractmethod
    def next(self) -> str | None:
        """The flow whose turn it is; None if none waits. Has no side effects."""

    def taken(self, item: Queued) -> None:
        """Note that a request is taken, to be served. It is mostly the head of the next flow, but may be out of turn.
        `waits` or `leaves` follows. Charge the request now: others may be taken before it is sent."""

    def returned(self, item: Queued) -> None:
        """Note that a taken request was not served after all. If it is in the order again, `waits` was called before
        this."""

    def ended(self, item: Queued, output_tokens: int) -> None:
        """Note that a taken request has been served."""


@runtime_checkable
class FairnessPolicy(Protocol):
    """Shares a band between its flows."""

    def for_band(self) -> Turns:
        """Turns for one more band, in which nothing waits."""
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

    The round continues after the flow chosen last, even if that flow has no requests left.
    """

    def for_band(self) -> Turns:
        return _InTurn()


class _InTurn(Turns):
    """Two heaps: flows after the flow that was chosen last, and flows whose turn comes in the next round."""

    forgets = True

    def __init__(self) -> None:
        self._last = ""
        self._ahead: LazyHeap[str] = LazyHeap()
        self._behind: LazyHeap[str] = LazyHeap()

    def waits(self, flow: str, head: Queued) -> None:
        if flow not in self._ahead and flow not in self._behind:
            (self._ahead if flow > self._last else self._behind).put(flow, flow, 0)

    def leaves(self, flow: str) -> None:
        self._ahead.discard(flow)
        self._behind.discard(flow)

    def next(self) -> str | None:
        return (self._ahead or self._behind).first()

    def taken(self, item: Queued) -> None:
        if item.flow != self.next():
            return  # out of turn: the round continues where it was
        if not self._ahead:
            self._ahead, self._behind = self._behind, self._ahead
        self._ahead.discard(item.flow)
        self._behind.put(item.flow, item.flow, 0)
        self._last = item.flow
