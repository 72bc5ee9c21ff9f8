"""Requests of clients as they come off a connection."""


class HttpRequest:
    """One request, read whole."""

    __slots__ = ("body", "headers", "is_http_1_0", "keep_alive", "method", "path", "query", "target")

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.path = b""
        self.query = b""
        self.headers: dict[bytes, bytes] = {}
        """Lower-cased names; what came twice is joined by a comma."""
        self.body = b""
        self.keep_alive = True
        self.is_http_1_0 = False


class Refused:
    """A request that could not be read: what to answer before the connection is closed."""

    __slots__ = ("message", "status")

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        self.message = message
