"""Large bodies that begin like an earlier body: only the new part of such a body is decoded.

Conversations grow, and clients ask several questions about one document. So most of a large prompt has been decoded
already. Comparing this part with a remembered body takes a fifteenth of the time that decoding takes. Theory of
operation: let P be the bytes of a valid body up to the end of an element of `messages`. A decoder that has read P is
inside that array, after an element. A shorter text can lead the decoder to the same state: the fields before
`messages`, and one element. So this text replaces P, and the full decoder reads it together with the rest of the body.
The decoder then accepts and refuses the same bodies, and finds the same fields.

Enters: bodies from clients, who are not trusted. Leaves: fields, or the refusal by the full decoder. The one rule:
bytes are skipped only if they are equal to bytes that were read in a valid body.
"""

import re
import secrets
from bisect import bisect_right
from collections import OrderedDict

import msgspec
from msgspec import Raw
from xxhash import xxh3_64_intdigest

from pointsman.gateway.openai import BadRequest, Body, read_body
from pointsman.http.buffers import LARGE_BYTES, placed
from pointsman.http.heads import Bytes

LONG_BYTES = 32 * 1024
"""Minimum size: for shorter bodies, decoding is as fast as comparing and remembering."""
KEY_BYTES = 4 * 1024
"""Maximum number of bytes after the shared beginning that are compared to tell two bodies apart."""
KEPT_BYTES = 8 * 1024 * 1024
"""Maximum total size of remembered bodies, in bytes; the least recently used bodies are dropped."""
MAX_SEEN = 1024
"""Maximum number of beginnings that are noted when they are first seen. A body is remembered when its beginning is seen
again."""
SAMPLE_BYTES = 16
MAX_ENDS = 64
"""Maximum number of element ends that are remembered per body."""

MAX_COMMAS, MAX_ELEMENTS = 50_000, 4096
"""Bodies with more commas or elements are not remembered, because their elements would have to be separated one by
one."""

BRACE = ord("{")
_BETWEEN = re.compile(rb"[ \t\r\n,]*")
_elements = msgspec.json.Decoder(list[Raw]).decode


class KnownBeginning(msgspec.Struct):
    """The bytes of a valid body, up to the end of its last message."""

    data: bytes
    start: int
    """The offset of `messages`."""
    ends: list[int]
    """The offsets at which messages end, in ascending order."""

    def shared_with(self, body: bytes | bytearray, at: int) -> int:
        """The last of `ends` up to which both bodies are equal; 0 if there is none. `at` is the offset of `messages` in
        `body`."""
        data = memoryview(self.data)

        def differs(end: int) -> bool:
            return not body.startswith(data[:end], at)

        # Most bodies differ in their last messages: compare from the last end backwards.
        last = len(self.ends) - 1
        while last > 0 and not body.startswith(
            data[self.ends[last] - SAMPLE_BYTES : self.ends[last]], at + self.ends[last] - SAMPLE_BYTES
        ):
            last -= 1
        if not differs(self.ends[last]):
            return self.ends[last]
        same = bisect_right(self.ends[:last], 0, key=differs)
        return self.ends[same - 1] if same else 0


class KnownBodies:
    """Reads bodies, and remembers the beginnings of large ones."""

    def __init__(self, min_bytes: int = LONG_BYTES, max_kept: int = KEPT_BYTES) -> None:
        self._min_bytes, self._max_kept = min_bytes, max_kept
        self._beginnings: OrderedDict[int, KnownBeginning] = OrderedDict()
        """Remembered bodies by the hash of their first bytes, least recently used first."""
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._element = b'{"%b":0}' % secrets.token_hex(16).encode()
        """The element that replaces skipped messages. It is secret, so that no client can send it."""
        self.kept = 0
        """Total size of the remembered bodies, in bytes."""

    def __len__(self) -> int:
        return len(self._beginnings)

    def read(self, body: Bytes) -> Body:
        """Returns the same as `read_body`."""
        if not self._min_bytes <= len(body) < LARGE_BYTES:
            return read_body(body)
        whole, at = placed(body)
        view = memoryview(body)
        key = xxh3_64_intdigest(view[: self._min_bytes])
        known, shared = self._known(key, whole, at)
        if known is not None and self._is_worth_it(body, shared):  # a body remembered by the longer key may share more
            key = xxh3_64_intdigest(view[shared : shared + KEY_BYTES], key)
            other, more = self._known(key, whole, at)
            if more > shared:
                known, shared = other, more
        found = None if known is None or not shared else self._read_rest(view, known.start, shared)
        read = read_body(body) if found is None else found
        if self._is_worth_it(body, shared):
            if key in self._seen:
                self._remember(key, bytes(body), read)
            self._seen[key] = None
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
        return read

    def _known(self, key: int, body: bytes | bytearray, at: int) -> tuple[KnownBeginning | None, int]:
        known = self._beginnings.get(key)
        if known is None:
            return None, 0
        self._beginnings.move_to_end(key)
        return known, known.shared_with(body, at)

    def _is_worth_it(self, body: Bytes, shared: int) -> bool:
        """Whether the new part of a body is large enough for the body to be remembered."""
        return len(body) - shared > max(self._min_bytes // 2, len(body) // 8)

    def _read_rest(self, view: memoryview, start: int, shared: int) -> Body | None:
        """Read a body that is known up to `shared`. Returns None if the body must be read as a whole."""
        short = b"".join((view[:start], b"[", self._element, view[shared:]))
        try:
            read = read_body(short)
        except BadRequest:
            return None  # the position in the error must be that in the whole body
        found = memoryview(read.messages)
        if bytes(found[1 : 1 + len(self._element)]) != self._element:
            return None  # the body has another field `messages` after these
        read.messages = Raw(view[start : start + len(found) + len(view) - len(short)])
        return read

    def _remember(self, key: int, body: bytes, read: Body) -> None:
        """Remember the beginning of a body that was read, provided that its messages can be separated."""
        messages = memoryview(read.messages)
        start = body.find(messages[:KEY_BYTES])
        if bytes(messages).count(b",") > MAX_COMMAS:
            return
        try:
            elements = _elements(messages)
        except (msgspec.DecodeError, RecursionError):
            return
        if len(elements) > MAX_ELEMENTS:
            return
        ends, at = [], start + 1
        for raw in elements:
            element: memoryview[int] = memoryview(raw)
            between = _BETWEEN.match(body, at)
            assert between is not None, "it matches nothing, too"
            at = between.end() + len(element)
            if element[0] == BRACE:
                ends.append(at)
        if not ends:
            return
        ends = [*ends[: -1 : -(-len(ends) // MAX_ENDS)], ends[-1]]
        if self._read_rest(memoryview(body), start, ends[-1]) is None:
            return  # `messages` is not at the offset that was found
        self._forget(key)
        self._beginnings[key] = KnownBeginning(body[: ends[-1]], start, ends)
        self.kept += ends[-1]
        while self.kept > self._max_kept:
            self._forget(next(iter(self._beginnings)))

    def _forget(self, key: int) -> None:
        beginning = self._beginnings.pop(key, None)
        if beginning is not None:
            self.kept -= len(beginning.data)
