"""The baseline: the same decisions in a straightforward way, with objects, loops and sets."""

from collections import OrderedDict

from xxhash import xxh64_intdigest

from pointsman.types import ExecutionInstance, RequestMetadata


class Engine:
    """An endpoint with its metrics as attributes."""

    def __init__(self, name: str, model: str, queue: float, kv: float, adapters: set[str], limit: int) -> None:
        self.name, self.model, self.queue, self.kv = name, model, queue, kv
        self.adapters, self.limit, self.load = adapters, limit, 0


class SetIndex:
    """hash -> set of servers, LRU per server."""

    def __init__(self, capacity: int = 31250) -> None:
        self.capacity = capacity
        self.holders: dict[int, set[str]] = {}
        self.used: dict[str, OrderedDict[int, None]] = {}

    def record(self, server: str, chain: list[int]) -> None:
        used = self.used.setdefault(server, OrderedDict())
        for link in chain:
            used[link] = None
            used.move_to_end(link)
            self.holders.setdefault(link, set()).add(server)
        while len(used) > self.capacity:
            link, _ = used.popitem(last=False)
            self.holders[link].discard(server)

    def matches(self, chain: list[int]) -> dict[str, int]:
        """Length of the prefix that each server holds, in blocks."""
        found: dict[str, int] = {}
        for depth, link in enumerate(chain):
            holders = self.holders.get(link)
            if not holders:
                break
            for server in holders:
                if found.get(server, 0) == depth:
                    found[server] = depth + 1
        return found


def chain_of(prompt: str, model: str, block: int = 256) -> list[int]:
    """Chained hashes of the prompt's blocks."""
    tokens, link, chain = prompt.encode(), xxh64_intdigest(model.encode()), []
    for start in range(0, len(tokens), block):
        inner = xxh64_intdigest(tokens[start : start + block])
        link = xxh64_intdigest(inner.to_bytes(8, "little") + link.to_bytes(8, "little"))
        chain.append(link)
    return chain


def choose(prompt: str, model: str, adapter: str, engines: list[Engine], index: SetIndex) -> Engine:
    """Two filters and four scorers (queue 2, kv 2, prefix 3, lora 1)."""
    left = [engine for engine in engines if engine.model == model]
    left = [engine for engine in left if engine.load < engine.limit]
    chain = chain_of(prompt, model)
    matches = index.matches(chain)
    high, low = max(engine.queue for engine in left), min(engine.queue for engine in left)
    totals: dict[str, float] = {}
    for engine in left:
        queue = 1.0 if high == low else (high - engine.queue) / (high - low)
        prefix = matches.get(engine.name, 0) / len(chain) if chain else 0.0
        lora = 1.0 if adapter in engine.adapters else 0.8 if len(engine.adapters) < 4 else 0.0
        totals[engine.name] = 2 * queue + 2 * (1 - engine.kv) + 3 * prefix + lora
    return max(left, key=lambda engine: totals[engine.name])


def fifo(requests: list[RequestMetadata], instances: list[ExecutionInstance]) -> list[tuple[str, str]]:
    """Least loaded instance in order of arrival, with the load of earlier decisions."""
    load = {instance.instance_id: instance.current_load for instance in instances}
    placed = []
    for request in sorted(requests, key=lambda request: request.arrival_time or 0.0):
        able = [
            instance
            for instance in instances
            if instance.can_accept_request
            and instance.model_name == request.model_name
            and (instance.max_concurrency is None or load[instance.instance_id] < instance.max_concurrency)
        ]
        if able:
            best = min(able, key=lambda i: load[i.instance_id] / (i.max_concurrency or 256))
            load[best.instance_id] += 1
            placed.append((request.request_id, best.instance_id))
    return placed
