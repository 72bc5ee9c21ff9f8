"""Requests of clients as they come off a connection."""

from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    pass


Bytes: TypeAlias = bytes | memoryview
COPIED_BYTES = 16 * 1024
"""Longer bodies and prompts are not copied out of what they came in."""


class HttpRequest(msgspec.Struct, eq=False):
    """One request, read whole."""

    method: bytes = b""
    target: bytes = b""
    path: bytes = b""
    query: bytes = b""
    headers: dict[bytes, bytes] = {}
    """Lower-cased names; what came twice is joined by a comma."""
    body: Bytes = b""
    keep_alive: bool = True
    is_http_1_0: bool = False


class HttpRefused(msgspec.Struct):
    """A request that could not be read: what to answer before the connection is closed."""

    status: int
    message: str
