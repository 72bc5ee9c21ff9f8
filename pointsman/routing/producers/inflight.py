"""How many tokens of a request each endpoint would have to compute."""

from pointsman.routing.plugins import PREFIX_MATCH, UNCACHED_REQUEST_TOKENS, Endpoints, RequestCycle
from pointsman.selection import Column
from pointsman.selection.arrays import np
from pointsman.selection.columns import array, column_of


class InflightLoadProducer:
    """Publishes the uncached tokens of the request per endpoint. The ledger counts the same number as in flight.

    Without prefix information all tokens of the prompt count as uncached.
    """

    def produce(self, cycle: RequestCycle, candidates: Endpoints) -> None:
        cycle[UNCACHED_REQUEST_TOKENS] = uncached_tokens(cycle, candidates)


def uncached_tokens(cycle: RequestCycle, candidates: Endpoints) -> Column:
    """One number per row of the whole roster."""
    prompt = float(cycle.request.input_tokens)
    found = cycle.get(PREFIX_MATCH)
    if found is None:
        return column_of([prompt] * len(candidates.whole), candidates.arrays)
    if not candidates.arrays:
        return [
            uncached(prompt, match, total, size)
            for match, total, size in zip(found.match, found.total, found.block_size, strict=True)
        ]
    size = array(found.block_size)
    hashed, cached = array(found.total) * size, array(found.match) * size
    return np.maximum(hashed - cached, 0.0) + np.maximum(prompt - hashed, 0.0)


def uncached(prompt: float, match: float, total: float, block_size: float) -> float:
    """Tokens in blocks that did not match, plus those that were not hashed."""
    return max(0.0, (total - match) * block_size) + max(0.0, prompt - total * block_size)
