"""A heap whose members can also move, or leave from the middle."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

M = TypeVar("M")

SLACK = 16
"""Number of dead entries that are not worth removing, however few live ones there are."""


class LazyHeap(Generic[M]):
    """Members by key, smallest first. Equal keys are ordered by `tie`, which is different for each member.

    An outdated entry stays where it is, and counts as dead. Dead entries are never first. They are removed once they
    are more than half of all entries. So every operation takes O(log n) comparisons on average, and memory is
    proportional to the number of members.
    """

    __slots__ = ("_entries", "_live")

    def __init__(self) -> None:
        self._entries: list[tuple[Any, Any, M]] = []
        self._live: dict[M, tuple[Any, Any, M]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, member: M) -> bool:
        return member in self._live

    def first(self) -> M | None:
        """The member with the smallest key; None if the heap is empty."""
        return self._entries[0][2] if self._entries else None

    def first_key(self) -> Any:
        """The smallest key; None if the heap is empty."""
        return self._entries[0][0] if self._entries else None

    def put(self, member: M, key: Any, tie: Any) -> None:
        """Add a member, or move it to another key. A member whose key cannot be compared is not added."""
        entries, entry = self._entries, (key, tie, member)
        old = self._live.get(member)
        self._live[member] = entry
        try:
            if old is not None and old is entries[0]:
                heapreplace(entries, entry)
                self._uncover()
            else:
                heappush(entries, entry)
                self._sweep()
        except Exception:
            self._restore(member, old)
            raise

    def _restore(self, member: M, old: tuple[Any, Any, M] | None) -> None:
        """Undo the addition of an entry that cannot be compared."""
        if old is None:
            del self._live[member]
        else:
            self._live[member] = old
        self._entries[:] = self._live.values()
        heapify(self._entries)

    def pop(self) -> M:
        """Remove the first member."""
        member = heappop(self._entries)[2]
        del self._live[member]
        self._uncover()
        return member

    def discard(self, member: M) -> bool:
        """Remove a member. Returns False if it was not here."""
        entry = self._live.pop(member, None)
        if entry is None:
            return False
        if entry is self._entries[0]:
            heappop(self._entries)
            self._uncover()
        else:
            self._sweep()
        return True

    def in_order(self) -> Iterator[M]:
        """All members, smallest first. Costs a sort; for display."""
        return (member for _, _, member in sorted(self._live.values()))

    def _uncover(self) -> None:
        entries, live = self._entries, self._live
        while entries and live.get(entries[0][2]) is not entries[0]:
            heappop(entries)

    def _sweep(self) -> None:
        if len(self._entries) > 2 * len(self._live) + SLACK:
            self._entries[:] = self._live.values()
            heapify(self._entries)
