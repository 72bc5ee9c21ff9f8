"""Requests of clients as they come off a connection."""

import msgspec


class HttpRequest(msgspec.Struct, eq=False):
    """One request, read whole."""

    method: bytes = b""
    target: bytes = b""
    path: bytes = b""
    query: bytes = b""
    headers: dict[bytes, bytes] = {}
    """Lower-cased names; what came twice is joined by a comma."""
    body: bytes = b""
    keep_alive: bool = True
    is_http_1_0: bool = False


class Refused(msgspec.Struct):
    """A request that could not be read: what to answer before the connection is closed."""

    status: int
    message: str
