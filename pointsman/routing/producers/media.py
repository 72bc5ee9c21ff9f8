"""Tracks which media each endpoint has in its embeddings cache, from what was sent to it."""

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Annotated

from xxhash import xxh3_64_intdigest

from pointsman.parameters import Spelled
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import MEDIA_MATCH, Endpoints, RequestCycle
from pointsman.selection import Key, SchedulingResult
from pointsman.selection.columns import column_of
from pointsman.types import RequestMetadata

DEFAULT_CACHE_MB = 4096
MB_PER_ITEM = 2
"""Assumed size of the embeddings of one image or clip."""
MAX_ITEMS = 256
"""Maximum number of items that are tracked for one request."""

_PART = re.compile(
    rb'"(?:image_url|video_url|audio_url)"\s*:\s*(?:\{[^{}"]*(?:"[^"]*"\s*:\s*"[^"]*"\s*,\s*)*"url"\s*:\s*)?"([^"]*)"'
    rb'|"input_audio"\s*:\s*\{[^{}"]*(?:"[^"]*"\s*:\s*"[^"]*"\s*,\s*)*"data"\s*:\s*"([^"]*)"'
)
"""A part of a prompt that is not text: the address of an item, or its data."""

_ITEMS: Key[frozenset[int]] = Key("media-items")


def media_items(request: RequestMetadata) -> frozenset[int]:
    """One hash for each image, video or sound in a request; equal items count once. A hash never leaves the process."""
    prompt = request.prompt
    if not request.is_multimodal or not isinstance(prompt, bytes | memoryview):
        return frozenset()
    found: set[int] = set()
    for part in _PART.finditer(prompt):
        found.add(xxh3_64_intdigest(part[1] if part[1] is not None else part[2]))
        if len(found) == MAX_ITEMS:
            break
    return frozenset(found)


class MmEmbeddingsCacheProducer:
    """Remembers per endpoint the media that it was sent, most recently used last, and reports how many it probably has.

    An endpoint is assumed to hold one item per 2 MB of `cache_size_in_mb_per_server`. Items are recorded where they are
    encoded: on the targets of `encode_profile` if that profile ran, else on the targets of the primary profile.
    """

    def __init__(
        self,
        cache_size_in_mb_per_server: Annotated[int, Spelled("cacheSizeInMBPerServer")] = DEFAULT_CACHE_MB,
        encode_profile: str = "encode",
    ) -> None:
        size_mb = cache_size_in_mb_per_server if cache_size_in_mb_per_server > 0 else DEFAULT_CACHE_MB
        self._capacity = max(size_mb // MB_PER_ITEM, 1)
        self._profile = encode_profile or "encode"
        self._held: dict[str, OrderedDict[int, None]] = {}
        """Items of each endpoint, the most recently used last."""

    def produce(self, cycle: RequestCycle, candidates: Endpoints) -> None:
        items = media_items(cycle.request)
        if not items:
            return
        cycle[_ITEMS] = items
        held: Mapping[str, OrderedDict[int, None]] = self._held
        shares = [len(items & held[one.id].keys()) / len(items) if one.id in held else 0.0 for one in candidates.whole]
        cycle[MEDIA_MATCH] = column_of(shares, candidates.uncut().arrays)

    def dispatched(self, cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> None:
        items = cycle.get(_ITEMS)
        if items is None:
            return
        encoders = result.results.get(self._profile) or result.results[result.primary]
        for endpoint in encoders.targets:
            held = self._held.setdefault(endpoint.id, OrderedDict())
            for item in items:
                held[item] = None
                held.move_to_end(item)
            while len(held) > self._capacity:
                held.popitem(last=False)

    def departed(self, endpoint: Endpoint) -> None:
        self._held.pop(endpoint.id, None)
