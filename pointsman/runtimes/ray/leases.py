"""Leases of nodes, on the granting side. They show when all processes of a silent node have certainly ended.

A node sends stamps of its own clock, and the plane echoes them. The node's supervisor ends its engines `lease_s` after
the last echoed stamp (see `runtimes/machine/supervisor.py`). A stamp is older than its receipt, so counting from the
receipt is safe without comparing clocks; only the rates of the clocks must agree.
"""

import math

MARGIN_S = 0.5
"""Margin for the kernel to end killed processes, and for clocks that run at different rates."""


class NodeLease:
    """The leases that were granted to one node."""

    def __init__(self, lease_s: float, stop_grace_s: float) -> None:
        self.lease_s = lease_s
        self.over_at = -math.inf
        """When everything that was started on the node under this lease has ended."""
        self._overtime_s = lease_s + stop_grace_s + MARGIN_S
        self._stamp: float | None = None
        self._heard_at = -math.inf

    def heard(self, stamp: float, at: float) -> None:
        """Note an answer from the node, with the time of its clock."""
        self._stamp, self._heard_at = stamp, at

    def echo(self) -> float | None:
        """The stamp to send with the next renewal, which grants another lease; None if no stamp was received yet."""
        if self._stamp is not None:
            self.over_at = max(self.over_at, self._heard_at + self._overtime_s)
        return self._stamp

    def forget(self) -> None:
        """Drop the stamp: the node was replaced by another, with its own clock."""
        self._stamp = None

    def until_over(self, at: float) -> float:
        """Seconds until nothing runs on the node any more; 0 if nothing runs on it now."""
        return max(self.over_at - at, 0.0)
