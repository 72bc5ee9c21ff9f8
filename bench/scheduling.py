"""`make bench-scheduling`: the cost of decisions, beside a naive implementation in the same run.

Figures are CPU microseconds, the best of several tries. bench/README.md records earlier results.
"""

import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from bench import naive
from bench.beside import Case
from bench.measure import cpu_us
from pointsman.render.text import text_table
from pointsman.routing.dispatcher import Dispatcher
from pointsman.routing.endpoints import Endpoint, EndpointTable, Metrics
from pointsman.routing.events import Arrived, Ended, FirstToken, Joined, Send
from pointsman.routing.filters import HasRoom, ServesModel
from pointsman.routing.producers import ApproxPrefixCacheProducer, InflightLoadProducer, PredictedLatencyProducer
from pointsman.routing.producers.prefix_index import PrefixIndex, block_hashes, first_link, token_bytes
from pointsman.routing.queue import BandSettings, FlowControl, Queued, VirtualTokenCounterFairnessPolicy
from pointsman.routing.routes import DispatcherSettings
from pointsman.routing.scorers import (
    KvCacheUtilizationScorer,
    LoraAffinityScorer,
    PendingWorkScorer,
    PrefixCacheScorer,
    QueueScorer,
    SloMissScorer,
)
from pointsman.routing.user_code import Containment
from pointsman.runtimes.policy_runner import Watchdog
from pointsman.selection import (
    Cycle,
    MaxScorePicker,
    Profile,
    ProfileResult,
    Ranked,
    Scheduler,
    SchedulingResult,
    Trace,
)
from pointsman.strategies import (
    AdaptivePolicy,
    CostOptimizedPolicy,
    FIFOPolicy,
    PriorityPolicy,
    SLOAwarePolicy,
    Strategy,
)
from pointsman.strategies.dispatching import plan_for
from pointsman.types import ExecutionInstance, RequestMetadata

MODEL, ADAPTER = "llama", "adapter-1"
PROMPTS = ["".join(chr(97 + (index * 7 + number) % 26) for index in range(2048)) for number in range(64)]
"""2 KB each, no two with a common prefix."""
DECISIONS = 1000


def main() -> None:
    progress("scheduling cycle")
    cycles = [cycle_row(endpoints, target) for endpoints, target in ((5, 0), (8, 30), (25, 0), (100, 60), (1000, 250))]
    show("A cycle: 2 filters, queue 2 + kv 2 + prefix 3 + lora 1, incl. hashing a 2 KB prompt", CYCLE, cycles)
    progress("default policy")
    show("The default policy, 8 answers and 1 prompt on each endpoint, 2 KB prompts", POLICY, policy_rows())
    progress("strategies")
    show("Strategies: 100 requests x 50 instances, per decision", STRATEGY, strategy_rows())
    progress("queue")
    show("Queue: per operation, with 10 and with 10,000 waiting", QUEUE, queue_rows())
    progress("prefix index")
    show("Prefix index: 64-block prompts, every server was sent its share of 1,000 prompts", PREFIX, prefix_rows())
    progress("dispatcher")
    show(
        "Dispatcher: a request from arrival to end (arrive, first token, end), records kept", DISPATCH, dispatch_rows()
    )
    progress("user code")
    show("Code of users: one call of a method that does nothing", GUARD, [guard_row()])


# The cycle

CYCLE = ["endpoints", "us", "target us", "naive us", "ours / naive", "us with trace"]


def cycle_row(endpoints: int, target: int) -> list[str]:
    ours, traced = our_cycle(endpoints, traced=False), our_cycle(endpoints, traced=True)
    theirs = naive_cycle(endpoints)
    aim = str(target) if target else ""
    return [str(endpoints), f"{ours:.1f}", aim, f"{theirs:.1f}", f"{ours / theirs:.2f}", f"{traced:.1f}"]


def cases() -> dict[str, Case]:
    """The cases for `bench.beside`."""
    policies = {f"default policy, {n}": Case(busy_policy(SloMissScorer(), n, 50), 50) for n in (16, 256)}
    return {f"cycle, {n:,} endpoints": Case(cycles(n, 100), 100) for n in (8, 100, 1000)} | policies


def our_cycle(endpoints: int, *, traced: bool) -> float:
    return cpu_us(cycles(endpoints, DECISIONS, traced=traced), DECISIONS)


def cycles(endpoints: int, count: int, *, traced: bool = False) -> Callable[[], None]:
    fleet = EndpointTable(
        [ExecutionInstance(instance_id=f"i{n}", model_name=MODEL, max_concurrency=64) for n in range(endpoints)]
    )
    for n in range(endpoints):
        fleet.measure(f"i{n}", metrics_of(n), 0.0)
    producer = ApproxPrefixCacheProducer()
    scorers = (QueueScorer(), 2), (KvCacheUtilizationScorer(), 2), (PrefixCacheScorer(), 3), (LoraAffinityScorer(), 1)
    profile: Profile[Endpoint] = Profile("default", ServesModel(), HasRoom(), *scorers, MaxScorePicker())
    scheduler = Scheduler([profile], producers=[producer])
    requests = [RequestMetadata(f"r{n}", PROMPTS[n % 64], model_name=MODEL) for n in range(count)]
    for seed, request in enumerate(requests[:256]):
        cycle = Cycle(request, seed=seed)
        result = scheduler.run(cycle, fleet.roster)
        assert isinstance(result, SchedulingResult)
        producer.dispatched(cycle, result)

    def decide() -> None:
        for seed, request in enumerate(requests):
            scheduler.run(Cycle(request, seed=seed, trace=Trace() if traced else None), fleet.roster)

    return decide


def naive_cycle(endpoints: int) -> float:
    index = naive.SetIndex()
    engines = []
    for n in range(endpoints):
        reported = metrics_of(n)
        adapters = set(reported.active_models)
        engines.append(naive.Engine(f"i{n}", MODEL, reported.waiting_queue_size, reported.kv_cache_usage, adapters, 64))
    for n in range(256):
        chosen = naive.choose(PROMPTS[n % 64], MODEL, ADAPTER, engines, index)
        index.record(chosen.name, naive.chain_of(PROMPTS[n % 64], MODEL))

    def decide() -> None:
        for n in range(DECISIONS):
            naive.choose(PROMPTS[n % 64], MODEL, ADAPTER, engines, index)

    return cpu_us(decide, DECISIONS)


def metrics_of(number: int) -> Metrics:
    return Metrics(
        waiting_queue_size=number % 7,
        running_requests_size=number % 11,
        kv_cache_usage=(number % 10) / 10,
        active_models=frozenset({f"adapter-{number % 4}"}),
        max_active_models=4,
    )


# The default policy

POLICY = ["endpoints", "us", "target us", "pending-work us", "slo-miss / pending-work", "us with trace"]


def policy_rows() -> list[list[str]]:
    rows = []
    for endpoints, target in ((16, 40), (256, 120)):
        ours, traced = (policy_cycle(SloMissScorer(), endpoints, traced=traced) for traced in (False, True))
        other = policy_cycle(PendingWorkScorer(), endpoints, traced=False)
        rows.append(
            [str(endpoints), f"{ours:.1f}", str(target), f"{other:.1f}", f"{ours / other:.2f}", f"{traced:.1f}"]
        )
    return rows


def policy_cycle(scorer: SloMissScorer | PendingWorkScorer, endpoints: int, *, traced: bool) -> float:
    """The time of one decision on a busy fleet."""
    return cpu_us(busy_policy(scorer, endpoints, DECISIONS, traced=traced), DECISIONS)


def busy_policy(
    scorer: SloMissScorer | PendingWorkScorer, endpoints: int, count: int, *, traced: bool = False
) -> Callable[[], None]:
    fleet = EndpointTable([ExecutionInstance(instance_id=f"i{n}", model_name=MODEL) for n in range(endpoints)])
    prefixes, latency = ApproxPrefixCacheProducer(), PredictedLatencyProducer()
    predicts = isinstance(scorer, SloMissScorer)
    producers = (prefixes, InflightLoadProducer(), *((latency,) if predicts else ()))
    scheduler = Scheduler([Profile("default", scorer, MaxScorePicker())], producers=producers)
    for n in range(9 * endpoints):
        request = RequestMetadata(f"b{n}", PROMPTS[n % 64], model_name=MODEL, arrival_time=0.0, prompt_tokens=4000)
        cycle: Cycle[RequestMetadata] = Cycle(request, now=0.001 * n, seed=n)
        scheduler.run(cycle, fleet.roster)
        target = fleet.roster[n % endpoints]
        result = SchedulingResult({"default": ProfileResult("default", [target], Ranked(fleet.roster, []))}, "default")
        prefixes.dispatched(cycle, result)
        if predicts:
            latency.dispatched(cycle, result)
            if n < 8 * endpoints:
                latency.first_token(target, request, 0.001 * n + 0.1)
        fleet.load.reserve(target, 4000.0 if n >= 8 * endpoints else 0.0)
    now = 0.009 * endpoints + 0.2
    requests = [RequestMetadata(f"r{n}", PROMPTS[n % 64], model_name=MODEL) for n in range(count)]

    def decide() -> None:
        for seed, request in enumerate(requests):
            scheduler.run(Cycle(request, now, seed, Trace() if traced else None), fleet.roster)

    return decide


# Strategies

STRATEGY = ["strategy", "us", "target us", "naive fifo us", "ours / naive"]


def strategy_rows() -> list[list[str]]:
    instances = [
        ExecutionInstance(
            instance_id=f"i{n}",
            model_name=MODEL,
            max_concurrency=8,
            current_load=n % 3,
            avg_latency_ms=100 + n,
            throughput_tokens_per_sec=1000 + n,
        )
        for n in range(50)
    ]
    requests = [
        RequestMetadata(
            f"r{n}", "hello " * 50, 100, MODEL, n % 5 - 2, slo_deadline_ms=500.0 + 30 * n, arrival_time=n * 0.01
        )
        for n in range(100)
    ]
    calm = [RequestMetadata(f"r{n}", "hello " * 50, 100, MODEL, arrival_time=n * 0.01) for n in range(100)]
    baseline = cpu_us(lambda: naive.fifo(requests, instances), 100, tries=40)
    strategies: list[tuple[str, Strategy, list[RequestMetadata]]] = [
        ("fifo", FIFOPolicy(), requests),
        ("priority", PriorityPolicy(), requests),
        ("slo-aware", SLOAwarePolicy(), requests),
        ("cost-optimized", CostOptimizedPolicy(), calm),
        ("cost-optimized, deadlines", CostOptimizedPolicy(), requests),
        ("adaptive", AdaptivePolicy(), requests),
    ]
    rows = []
    for name, strategy, batch in strategies:
        assert len(strategy.schedule(batch, instances)) == 100
        ours = cpu_us(scheduling(strategy, batch, instances), 100, tries=40)
        rows.append([name, f"{ours:.1f}", "20", f"{baseline:.1f}", f"{ours / baseline:.2f}"])
    return rows


def scheduling(
    strategy: Strategy, requests: list[RequestMetadata], instances: list[ExecutionInstance]
) -> Callable[[], object]:
    return lambda: strategy.schedule(requests, instances)


# The queue

QUEUE = ["fairness, flows", "operation", "us at 10", "us at 10,000", "target us", "10,000 / 10"]


def queue_rows() -> list[list[str]]:
    rows = []
    for name, band, flows in (
        ("global strict, 1 flow", BandSettings(max_requests=None, max_bytes=None), 1),
        (
            "token counter, 100 flows",
            BandSettings(max_requests=None, max_bytes=None, fairness=VirtualTokenCounterFairnessPolicy()),
            100,
        ),
    ):
        few, many = (queue_operations(band, flows, waiting) for waiting in (10, 10_000))
        for operation in few:
            ratio = f"{many[operation] / few[operation]:.2f}"
            rows.append([name, operation, f"{few[operation]:.1f}", f"{many[operation]:.1f}", "10", ratio])
    return rows


def queue_operations(band: BandSettings, flows: int, waiting: int) -> dict[str, float]:
    """Arrivals and departures in balance, so that the number of waiting requests is constant."""
    rounds, each = 200, 10
    best = {"offer": float("inf"), "pop and serve": float("inf"), "cancel": float("inf")}
    for _ in range(5):
        spent = dict.fromkeys(best, 0.0)
        queue = FlowControl([band])
        for n in range(waiting):
            queue.offer(queued(f"w{n}", n, flows), 0.0, False)
        for turn in range(rounds):
            new = [queued(f"x{turn}-{n}", turn * each + n, flows) for n in range(2 * each)]
            leaving = [item.request.request_id for item in new[each:]]
            with counted(spent, "offer"):
                for item in new:
                    queue.offer(item, 1.0, False)
            with counted(spent, "cancel"):
                for name in leaving:
                    queue.cancel(name)
            with counted(spent, "pop and serve"):
                for _ in range(each):
                    served = queue.pop(1.0, 0.0)
                    assert served is not None
                    queue.served(served)
        done = {"offer": 2 * rounds * each, "pop and serve": rounds * each, "cancel": rounds * each}
        best = {name: min(best[name], spent[name] / done[name] * 1e6) for name in best}
    return best


@contextmanager
def counted(spent: dict[str, float], name: str) -> Iterator[None]:
    """Adds the CPU time of a block."""
    start = time.process_time()
    yield
    spent[name] += time.process_time() - start


def queued(name: str, number: int, flows: int) -> Queued:
    return Queued(RequestMetadata(name, "hello", user_id=f"user-{number % flows}"))


# The prefix index

PREFIX = [
    "servers",
    "lookup us",
    "lookups/s",
    "stretch goal/s",
    "naive us",
    "ours / naive",
    "record us",
    "bytes per entry",
]


def prefix_rows() -> list[list[str]]:
    return [prefix_row(servers) for servers in (8, 64, 1000)]


def prefix_row(servers: int) -> list[str]:
    """Prompts share their first 16 blocks, as with a common system prompt: every server holds those."""
    common = ("You are a helpful assistant. " * 142)[: 16 * 256]
    prompts = [token_bytes(common + f"{n:08d}" * 1536) for n in range(1000)]
    chains = [block_hashes(prompt, first_link(MODEL), 64, 64).links for prompt in prompts]
    tracemalloc.start()
    index = PrefixIndex()
    for n, chain in enumerate(chains):
        index.record(f"s{n % servers}", list(chain), 31250)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    entries = len(index)
    all_servers = (1 << servers) - 1
    baseline = naive.SetIndex()
    for n, chain in enumerate(chains):
        baseline.record(f"s{n % servers}", chain)
    ours = cpu_us(lambda: [index.runs(chain, all_servers) for chain in chains], len(chains))
    theirs = cpu_us(lambda: [baseline.matches(chain) for chain in chains], len(chains), tries=3)

    def remember() -> None:
        for chain in chains[:200]:
            index.record("s0", chain, 31250)

    record = cpu_us(remember, 200)
    return [
        str(servers),
        f"{ours:.2f}",
        f"{1e6 / ours:,.0f}",
        "100,000",
        f"{theirs:.1f}",
        f"{ours / theirs:.3f}",
        f"{record:.1f}",
        f"{size / entries:.0f}",
    ]


# The dispatcher

DISPATCH = ["endpoints", "us per request", "us with traces kept"]


def dispatch_rows() -> list[list[str]]:
    return [[str(n), f"{dispatching(n, False):.1f}", f"{dispatching(n, True):.1f}"] for n in (8, 100)]


def dispatching(endpoints: int, traced: bool) -> float:
    dispatcher = Dispatcher(plan_for(FIFOPolicy()), DispatcherSettings(traced=traced))
    for n in range(endpoints):
        dispatcher.handle(Joined(ExecutionInstance(instance_id=f"i{n}", model_name=MODEL, max_concurrency=64)), 0.0)
    turn = 0

    def serve() -> None:
        nonlocal turn
        for n in range(DECISIONS):
            turn += 1
            request = RequestMetadata(f"r{turn}", "hello", model_name=MODEL, arrival_time=float(turn))
            commands = dispatcher.handle(Arrived((request,)), float(turn))
            assert isinstance(commands[0], Send)
            dispatcher.handle(FirstToken(request.request_id), turn + 0.1)
            dispatcher.handle(Ended(request.request_id, 10 + n % 5), turn + 0.2)

    return cpu_us(serve, DECISIONS, tries=5)


# Users' code

GUARD = ["us plain", "us timed and interruptible"]


class Nothing:
    """A user's scorer."""

    def scores(self, cycle: object, candidates: list[float]) -> list[float]:
        return candidates


def guard_row() -> list[str]:
    plain, guarded, watchdog = Nothing(), Nothing(), Watchdog(time.monotonic)
    Containment(watchdog).contain([guarded])
    figures = [cpu_us(partial(_call, one), DECISIONS, tries=20) for one in (plain, guarded)]
    watchdog.close()
    return [f"{figure:.2f}" for figure in figures]


def _call(scorer: Nothing) -> None:
    for _ in range(DECISIONS):
        scorer.scores(None, [])


def progress(what: str) -> None:
    print(f"measuring: {what} ...", file=sys.stderr, flush=True)


def show(title: str, heads: list[str], rows: list[list[str]]) -> None:
    print(f"\n{title}\n{text_table(heads, rows)}")


if __name__ == "__main__":
    main()
