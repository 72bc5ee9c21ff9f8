"""Deciders: whether a stage of its own is worth while for one request."""

from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import Endpoints, RequestCycle
from pointsman.routing.signals import PREFIX_MATCH


class PrefixBasedPdDecider:
    """Prefill elsewhere if the endpoint that decodes has at least `non_cached_tokens` of the prompt still to compute.

    Never for prompts below `prompt_tokens`, with `non_cached_tokens` 0, or when nothing is known of its cache.
    """

    def __init__(self, non_cached_tokens: int = 0, prompt_tokens: int = 0) -> None:
        for parameter, value in {"nonCachedTokens": non_cached_tokens, "promptTokens": prompt_tokens}.items():
            if value < 0:
                raise ValueError(f"{parameter} is {value}; it must be 0 or more")
        self.non_cached = non_cached_tokens
        self.prompt = prompt_tokens

    def decides(self, cycle: RequestCycle, endpoints: Endpoints, decode: Endpoint | None) -> bool:
        found, prompt = cycle.get(PREFIX_MATCH), cycle.request.input_tokens
        if not self.non_cached or decode is None or found is None or prompt < max(self.prompt, self.non_cached):
            return False
        cached = found.cached[decode.row] * found.block_size[decode.row]
        return bool(prompt - cached >= self.non_cached)


class AlwaysDisaggPdDecider:
    """Prefill elsewhere, always."""

    def decides(self, cycle: RequestCycle, endpoints: Endpoints, decode: Endpoint | None) -> bool:
        return True


class AlwaysDisaggMultimodalDecider:
    """Encode elsewhere if the prompt has parts that are not text."""

    def decides(self, cycle: RequestCycle, endpoints: Endpoints, decode: Endpoint | None) -> bool:
        return cycle.request.is_multimodal
