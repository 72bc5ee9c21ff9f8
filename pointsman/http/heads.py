"""HTTP/1.1 as bytes: heads of answers, and what must not be passed on from one side to the other."""

from http import HTTPStatus
from typing import Any

import msgspec

REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade http2-settings".split()
)
"""Headers about one connection: nobody passes them on."""

NOT_FOR_ENGINES = HOP_BY_HOP | frozenset(
    b"host content-length expect authorization accept-encoding x-api-key content_length transfer_encoding "
    b"x-prefiller-host-port x-encoder-hosts-ports".split()
)
"""Of a client's request. Keys are ours alone; engines answer uncompressed, so that we can read along. Lengths are ours
to say, also in a spelling that some servers take for the proper one; so is whom an engine works together with."""

PIECES = b"x-pointsman-pieces"
"""A replica of ours says so if its answer is to be passed on piece by piece, whatever its type."""

NOT_FOR_CLIENTS = HOP_BY_HOP | frozenset(
    b"content-length date server x-request-id x-pointsman-instance x-pointsman-pieces".split()
)
"""Of an engine's answer; lengths and names are ours to say."""

LAST_CHUNK = b"0\r\n\r\n"
KEEP_ALIVE = b"connection: keep-alive\r\n"
"""What a client of HTTP/1.0 must be told; later ones take it for granted."""


def error_body(message: str, kind: str, code: str | None = None, **extra: Any) -> bytes:
    """An error in OpenAI's shape."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code, **extra}})


ERROR_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}
"""What OpenAI calls errors of these statuses; others are server errors, or invalid requests below 500."""


def error_kind(status: int) -> str:
    """OpenAI's type of an error of this status."""
    return ERROR_KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")


def head_of(status: int, content_type: bytes, length: int, *, close: bool, headers: bytes = b"") -> bytes:
    """The head of an answer of our own; `headers` are lines, each with its end."""
    return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
        status,
        REASONS.get(status, b"Unknown"),
        content_type,
        length,
        headers,
        b"connection: close\r\n" if close else b"",
    )
