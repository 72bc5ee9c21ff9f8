"""Scorers that keep prompts where their prefix is cached, and media where their embeddings are."""

from typing import Annotated

from pointsman.parameters import NoEffect
from pointsman.routing.plugins import MEDIA_MATCH, PREFIX_MATCH, Endpoints, PrefixMatch, RequestCycle
from pointsman.selection import Column
from pointsman.selection.columns import clipped, column_of, linear, placed, plus, ratio, times, where_zero


class PrefixCacheScorer:
    """Prefers endpoints that have much of the prompt in their cache: the matching share of its blocks.

    `match_length_weight` is the part of the score that depends on the length of the match instead: on the square of its
    tokens over `match_length_scale_tokens`, at most 1. Without a producer of matches, or for an empty prompt, all
    endpoints score 0.
    """

    bounded = True

    def __init__(self, match_length_weight: float = 0.0, match_length_scale_tokens: float = 8192) -> None:
        if not 0.0 <= match_length_weight <= 1.0:
            raise ValueError(f"matchLengthWeight is {match_length_weight:g}; it must be from 0 to 1")
        if match_length_weight > 0.0 and match_length_scale_tokens <= 0.0:
            raise ValueError(
                f"matchLengthScaleTokens is {match_length_scale_tokens:g}; it must be above 0 with a matchLengthWeight"
            )
        self.weight = match_length_weight
        self.scale = match_length_scale_tokens

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        found: PrefixMatch | None = cycle.state.get(PREFIX_MATCH)
        if found is None:
            return column_of([0.0] * len(candidates), candidates.arrays)
        match, total = found.match, found.total
        if candidates.rows is not None:
            match, total = candidates.cut(match), candidates.cut(total)
        share = ratio(match, total)
        if not self.weight:
            return share
        tokens = times(match, candidates.cut(found.block_size))
        length = clipped(linear(tokens, 1 / self.scale, 0.0), 0.0, 1.0)
        mixed = plus(linear(times(length, length), self.weight, 0.0), linear(share, 1.0 - self.weight, 0.0))
        return placed(mixed, where_zero(total), 0.0)


class MmEmbeddingsCacheScorer:
    """Prefers endpoints that have probably encoded the request's images, videos and sounds before: the score is their
    share.

    All score 0 if the request has none.
    """

    bounded = True

    def __init__(self, producer_name: Annotated[str, NoEffect("each fact has one producer")] = "") -> None:
        pass

    def scores(self, cycle: RequestCycle, candidates: Endpoints) -> Column:
        match = cycle.get(MEDIA_MATCH)
        if match is None:
            return column_of([0.0] * len(candidates), candidates.arrays)
        return candidates.cut(match)
