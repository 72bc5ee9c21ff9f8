"""Plain requests: nearly all that come, read in a fraction of the time that the parser takes.

A request is plain if every line of its head can be read in one way only, and says nothing beyond what a POST of JSON
needs. Whatever is unusual, be it right or wrong, is left to the parser: the one rule is that nothing is judged here.
Clients say the same again and again, so what was read before is not read once more.
"""

import re
from functools import lru_cache

from pointsman.http.requests import HttpRequest

LONG_BYTES = 256
"""Longer lines are left to the parser: they are not worth remembering."""

_REQUEST_LINE = re.compile(rb"POST (/[!$%&'()*+,./0-9:;=@A-Z_a-z~-]*) HTTP/1\.1")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ ]*([!-~](?:[ -~]*[!-~])?)[ ]*")
_DIGITS = re.compile(rb"[0-9]{1,15}")
_UNUSUAL = frozenset(b"transfer-encoding upgrade expect te trailer keep-alive proxy-connection http2-settings".split())
"""What says how a message is framed, or what becomes of the connection."""


def read_fast(data: bytes, most_head_bytes: int) -> tuple[HttpRequest, int, int] | None:
    """The request that these bytes are, as far as they have come; where its body starts and how long it is. None: they
    are not plain, or are more than one."""
    end = data.find(b"\r\n\r\n", 0, most_head_bytes)
    if end < 0:
        return None
    first, *lines = data[:end].split(b"\r\n")
    path = _path_in(first) if len(first) < LONG_BYTES else None
    if path is None:
        return None
    headers: dict[bytes, bytes] = {}
    for line in lines:
        header = _header_in(line) if len(line) < LONG_BYTES else None
        if header is None:
            return None
        headers[header[0]] = header[1]
    length = headers.get(b"content-length")
    if length is None or b"host" not in headers or len(headers) != len(lines):  # one came twice
        return None
    if end + 4 + int(length) < len(data):
        return None  # others come right behind it, perhaps many: the parser takes them in one go
    return HttpRequest(b"POST", path, path, b"", headers), end + 4, int(length)


@lru_cache(maxsize=64)
def _path_in(line: bytes) -> bytes | None:
    found = _REQUEST_LINE.fullmatch(line)
    return None if found is None else found[1]


@lru_cache(maxsize=1024)
def _header_in(line: bytes) -> tuple[bytes, bytes] | None:
    """(lower-cased name, value)"""
    found = _HEADER.fullmatch(line)
    if found is None:
        return None
    name, value = found[1].lower(), found[2]
    if name in _UNUSUAL:
        return None
    if name == b"connection" and value.lower() != b"keep-alive":
        return None
    if name == b"content-length" and not _DIGITS.fullmatch(value):
        return None
    return name, value
