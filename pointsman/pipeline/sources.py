"""The code of a version as data: the content of its files when the version took effect."""

import zlib
from base64 import b85decode, b85encode
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from msgspec import MsgspecError, msgpack

Sources: TypeAlias = Mapping[Path, bytes]
"""The content of code files, by path, as it was when a version took effect."""
MAX_KEPT_BYTES = 96 * 1024
"""Maximum size of the compressed sources of one node, so that they fit into one environment variable of a replica. If
the sources of a node are larger, none of them are kept."""


def pack_sources(sources: Sources) -> str:
    """Sources as text, for a store or for `POINTSMAN_SOURCES`; empty if there are none."""
    content = {str(path): content for path, content in sources.items()}
    return b85encode(zlib.compress(msgpack.encode(content), 9)).decode() if content else ""


def unpack_sources(packed: str) -> dict[Path, bytes]:
    """The sources that `pack_sources` has packed. Raises ValueError."""
    try:
        content = msgpack.decode(zlib.decompress(b85decode(packed)), type=dict[str, bytes]) if packed else {}
    except (zlib.error, MsgspecError) as error:
        raise ValueError(f"kept sources cannot be read: {error}") from None
    return {Path(path): one for path, one in content.items()}
