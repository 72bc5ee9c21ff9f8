"""How much may wait in one place, and how much does."""

from pointsman.errors import ConfigError


def check_bounds(max_requests: int | None, max_bytes: int | None) -> None:
    """Raises ConfigError for bounds that would let nobody in."""
    problems = [
        f"{name} must be at least 1, it is {bound}; leave it out for the default"
        for name, bound in (("maxRequests", max_requests), ("maxBytes", max_bytes))
        if bound is not None and bound < 1
    ]
    if problems:
        raise ConfigError(problems)


class Occupancy:
    """Bounds in requests and in bytes, with what fills them. None: unlimited."""

    __slots__ = ("_place", "_setting", "max_bytes", "max_requests", "requests", "size_bytes")

    def __init__(self, max_requests: int | None, max_bytes: int | None, place: str, setting: str) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.requests = 0
        self.size_bytes = 0
        self._place = place
        """Where this is, as a part of a sentence: at priority 0."""
        self._setting = setting
        """What to change in the configuration for more room."""

    def fits(self, size_bytes: int) -> bool:
        """Whether one more request of this size may wait here."""
        return (self.max_requests is None or self.requests < self.max_requests) and (
            self.max_bytes is None or self.size_bytes + size_bytes <= self.max_bytes
        )

    def enter(self, size_bytes: int) -> None:
        self.requests += 1
        self.size_bytes += size_bytes

    def leave(self, size_bytes: int) -> None:
        self.requests -= 1
        self.size_bytes -= size_bytes

    def fits_without(self, size_bytes: int, fewer_requests: int, fewer_bytes: int) -> bool:
        """Whether it would fit if this much left."""
        return (self.max_requests is None or self.requests - fewer_requests < self.max_requests) and (
            self.max_bytes is None or self.size_bytes - fewer_bytes + size_bytes <= self.max_bytes
        )

    def shortage(self, size_bytes: int) -> str:
        """Which bound one more request of this size would break, and where it is set."""
        if self.max_requests is not None and self.requests >= self.max_requests:
            waiting = f"{self.requests:,} of {self.max_requests:,} requests waiting {self._place}"
            return f"{waiting} ({self._setting}.maxRequests)"
        waiting = f"{self.size_bytes:,} of {self.max_bytes:,} bytes waiting {self._place}"
        return f"{waiting}, and this request has {size_bytes:,} ({self._setting}.maxBytes)"
