"""The tables of a run, and whether the targets were met."""

from collections.abc import Sequence
from statistics import median

from bench.gateway.measuring import DIRECT, Figures
from bench.gateway.results import Figure, Results
from bench.gateway.scenarios import ALL, BIG, FIRST_TOKEN, OPEN_STREAMS, PACE_MS, PLAIN, STREAMS, TOKENS, Scenario
from pointsman.render.text import text_table

OURS, BEFORE, ENVOY, VLLM, SGLANG = "pointsman", "before", "envoy", "vllm-router", "sglang-router"
RATIOS = ["min", "/ envoy", "/ vllm-router"]
"""Columns beside a figure: its minimum over the rounds, and the median ratios to other proxies."""


def tables(results: Results) -> str:
    parts = [_plain(results, scenario) for scenario in PLAIN.values()]
    parts += [_streams(results), _first_token(results)]
    parts += [_big(results, scenario) for scenario in BIG.values()]
    parts += [_memory(results), _warm_start(results), _before_and_after(results), _targets(results), _notes(results)]
    return "\n\n".join(part for part in parts if part)


def _plain(results: Results, scenario: Scenario) -> str:
    heads = [
        "proxy",
        "endpoint selection",
        "us/request",
        *RATIOS,
        "requests/s",
        "core busy",
        "p50 ms",
        "p99 ms",
        "errors",
    ]
    rows = []
    for name, selection in _measured(results, scenario):
        alone = name == DIRECT
        rows.append(
            [
                name,
                selection,
                *([""] * 4 if alone else _with_ratios(results, scenario, name, _us_per_request, 1)),
                _text(results.median(scenario.name, name, lambda figures: figures.requests_per_s), 0),
                "" if alone else _percent(results.median(scenario.name, name, lambda figures: figures.core_share)),
                _text(results.median(scenario.name, name, lambda figures: figures.p50_ms), 2),
                _text(results.median(scenario.name, name, lambda figures: figures.p99_ms), 2),
                str(results.errors(scenario.name, name)),
            ]
        )
    size = sum(map(len, scenario.requests)) / len(scenario.requests)
    title = f"Plain: {scenario.connections} connections, requests of {size:.0f} bytes (head and body), 8 endpoints"
    return _table(title, heads, rows)


def _streams(results: Results) -> str:
    rows = [
        [name, *_with_ratios(results, STREAMS, name, _us_per_chunk, 2), str(results.errors(STREAMS.name, name))]
        for name, _ in _measured(results, STREAMS)
    ]
    title = f"Streaming: {STREAMS.connections} streams of {TOKENS} chunks, one every {PACE_MS} ms"
    return _table(title, ["proxy", "us/chunk", *RATIOS, "errors"], rows)


def _first_token(results: Results) -> str:
    rows = []
    for name, _ in _measured(results, FIRST_TOKEN):
        first = results.median(FIRST_TOKEN.name, name, lambda figures: figures.first_us)
        added, ratios = results.added_us(FIRST_TOKEN.name, name), _added_ratios(results, name)
        beside = ["", ""] if name == DIRECT else [_text(_median(added), 0), _text(_median(ratios), 2)]
        rows.append([name, _text(first, 0), *beside, str(results.errors(FIRST_TOKEN.name, name))])
    return _table("Time to first token, one client", ["proxy", "us", "added us", "/ envoy", "errors"], rows)


def _added_ratios(results: Results, name: str) -> list[float]:
    pairs = zip(results.added_us(FIRST_TOKEN.name, name), results.added_us(FIRST_TOKEN.name, ENVOY), strict=False)
    return [ours / envoys for ours, envoys in pairs if envoys > 0]


def _big(results: Results, scenario: Scenario) -> str:
    rows = [
        [
            name,
            *_with_ratios(results, scenario, name, _us_per_request, 0),
            _text(results.median(scenario.name, name, lambda figures: figures.ns_per_byte), 2),
            str(results.errors(scenario.name, name)),
        ]
        for name, _ in _measured(results, scenario)
    ]
    title = f"Prompts of {scenario.name}: {scenario.connections} connections"
    return _table(title, ["proxy", "us/request", *RATIOS, "ns/byte", "errors"], rows)


def _memory(results: Results) -> str:
    rows = []
    for name, memory in results.memory.items():
        per_stream = (memory.streams - memory.idle) * 1024 / memory.open if memory.open else 0.0
        figures = [f"{memory.idle:.0f}", f"{memory.streams:.0f}", str(memory.open), f"{per_stream:.0f}"]
        rows.append(
            [name, *figures, _text(results.after_mb.get(name), 0), _text(results.idle_ms.get(name), 1)],
        )
    streams = OPEN_STREAMS.connections
    heads = ["proxy", "MB idle", f"MB, {streams} streams", "open", "KB/stream", "MB at the end", "CPU ms/s idle"]
    return _table("Memory (resident)", heads, rows)


def _warm_start(results: Results) -> str:
    if not results.warm_starts:
        return ""
    rows = [[f"{start.listening_s:.2f}", f"{start.first_token_s:.2f}"] for start in results.warm_starts]
    return _table("Warm start of two tiny llama.cpp instances, by start", ["listening s", "first token s"], rows)


def _before_and_after(results: Results) -> str:
    """This checkout beside another one: the median ratio of CPU time within a round, and that of the minima."""
    rows = []
    for scenario in ALL:
        figure = _us_per_chunk if scenario is STREAMS else _us_per_request
        ratios = results.ratios(scenario.name, OURS, BEFORE, figure)
        if ratios:
            least = [results.minimum(scenario.name, name, figure) or 0.0 for name in (BEFORE, OURS)]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            minima = [f"{us:.1f}" for us in least]
            rows.append([scenario.name, f"{median(ratios):.2f}", spread, *minima, f"{least[1] / least[0]:.2f}"])
    heads = ["scenario", "after / before", "rounds", "min us before", "min us after", "ratio of minima"]
    return _table("CPU time per request (per chunk of streams), after and before", heads, rows)


def _targets(results: Results) -> str:
    """Includes the range over the rounds: a target within it is undecided."""
    rows: list[list[str]] = []

    def target(name: str, found: Sequence[float], bound: float, *, least: bool = False) -> None:
        if found:
            middle = median(found)
            met = "yes" if (middle >= bound if least else middle <= bound) else "NO"
            aim = f"{'at least' if least else 'at most'} {bound:g}"
            rows.append([name, aim, f"{middle:.2f}", f"{min(found):.2f} to {max(found):.2f}", met])

    for scenario in PLAIN.values():
        at = f"at {scenario.connections} connections"
        target(f"CPU per request / envoy {at}", results.ratios(scenario.name, OURS, ENVOY, _us_per_request), 1.0)
        target(f"CPU per request / vllm-router {at}", results.ratios(scenario.name, OURS, VLLM, _us_per_request), 0.75)
        for router in (VLLM, SGLANG):
            ratios = results.ratios(scenario.name, OURS, router, lambda figures: figures.requests_per_s)
            target(f"requests/s / {router} {at}", ratios, 1.0, least=True)
    target("CPU per chunk / envoy", results.ratios(STREAMS.name, OURS, ENVOY, _us_per_chunk), 1.2)
    target("added time to first token / envoy", _added_ratios(results, OURS), 1.0)
    for scenario in BIG.values():
        ratios = results.ratios(scenario.name, OURS, ENVOY, lambda figures: figures.ns_per_byte)
        target(f"cost per byte / envoy, {scenario.name}", ratios, 1.5)
    if OURS in results.memory:
        target(f"MB with {OPEN_STREAMS.connections} open streams", [results.memory[OURS].streams], 60)
    target("warm start, s", [start.first_token_s for start in results.warm_starts], 3)
    return _table("Targets", ["figure", "target", "median", "rounds", "met"], rows)


def _notes(results: Results) -> str:
    versions = ", ".join(f"{known.name} {known.version}" for known in results.proxies if known.version)
    lines = [
        f"Load generator and backend: {results.kind}. Measured: {versions}.",
        f"Other processes used {results.other_share:.0%} of the proxies' core; a high share distorts the figures.",
    ]
    lines += [f"Not measured: {name}: {why}" for name, why in results.unavailable.items()]
    lines += [f"Wrong responses of {name}: {first_error}" for name, first_error in results.first_errors().items()]
    return "\n".join(lines)


def _us_per_request(figures: Figures) -> float:
    return figures.us_per_request


def _us_per_chunk(figures: Figures) -> float:
    return figures.us_per_chunk


def _measured(results: Results, scenario: Scenario) -> Sequence[tuple[str, str]]:
    known = {known.name: known.selection for known in results.proxies}
    return [(name, known.get(name, "")) for name in results.runs.get(scenario.name, {})]


def _with_ratios(results: Results, scenario: Scenario, name: str, figure: Figure, digits: int) -> list[str]:
    figures = [results.median(scenario.name, name, figure), results.minimum(scenario.name, name, figure)]
    ratios = [results.ratio(scenario.name, name, other, figure) for other in (ENVOY, VLLM)]
    return [*(_text(each, digits) for each in figures), *(_text(ratio, 2) for ratio in ratios)]


def _median(figures: Sequence[float]) -> float | None:
    return median(figures) if figures else None


def _text(figure: float | None, digits: int) -> str:
    return "" if figure is None else f"{figure:,.{digits}f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"{title}\n{text_table(heads, rows)}" if rows else ""
