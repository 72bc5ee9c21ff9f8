"""How many retries the fleet can bear: a share of the requests, so that failures do not multiply the load."""


class RetryBudget:
    """Every request adds a share of a retry; some are allowed in any case, and come back with time."""

    def __init__(self, share: float, *, reserve: float = 50.0, per_second: float = 10.0) -> None:
        self.share = share
        """Of a retry, that each request adds."""
        self.requests = 0
        """That have come since a retry was last asked for. Whoever takes them in counts them here."""
        self._most = self._left = reserve
        self._per_second = per_second
        self._at = 0.0

    def allows(self, now: float) -> bool:
        """Whether one more retry may be made now; it is counted if so."""
        earned = self.requests * self.share + (now - self._at) * self._per_second
        self._left = min(self._most, self._left + earned)
        self._at, self.requests = now, 0
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
