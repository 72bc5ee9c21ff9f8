"""The tables of a run, and whether it met our targets."""

from collections.abc import Sequence
from operator import attrgetter
from statistics import median

from bench.pipeline.results import Figure, Results, middle, of_diamond, of_handing, of_server
from bench.pipeline.servers import Pointsman, RayServe, RayServeTuned
from pointsman.render.text import text_table

OURS, RAY, TUNED = Pointsman.name, RayServe.name, RayServeTuned.name
CLIENTS = (1, 8, 32)
RATE, P50, P99 = (attrgetter(f"loaded.{name}") for name in ("requests_per_s", "p50_ms", "p99_ms"))
CPU = attrgetter("cpu_ms")
"""Of a `Diamond`."""
HANDED, READ = attrgetter("handed_ms"), attrgetter("read_ms")
"""Of a `Handing`."""
FRESH, AGAIN = attrgetter("copying.fresh_ms"), attrgetter("copying.again_ms")
"""Of a `Round`."""


def tables(results: Results) -> str:
    parts = [_diamond(results, clients) for clients in CLIENTS]
    parts += [_at_rest(results), _array(results), _in_process(results), _targets(results), _notes(results)]
    return "\n\n".join(part for part in parts if part)


def _diamond(results: Results, clients: int) -> str:
    rows = []
    for server in results.versions:
        rate, p50, p99, cpu = (of_diamond(server, clients, figure) for figure in (RATE, P50, P99, CPU))
        if not results.values(rate):
            continue
        rows.append(
            [
                server,
                _text(results.median(rate), 0),
                *(_ratio(results, rate, of_diamond(ray, clients, RATE), 1) for ray in (RAY, TUNED)),
                _text(results.median(p50), 2),
                *(_ratio(results, p50, of_diamond(ray, clients, P50), 3) for ray in (RAY, TUNED)),
                _text(results.median(p99), 2),
                _text(results.median(cpu), 2),
            ]
        )
    heads = ["server", "requests/s", "/ ray", "/ tuned", "p50 ms", "/ ray", "/ tuned", "p99 ms", "CPU ms/request"]
    return _table(f"The diamond over HTTP: {clients} {'client' if clients == 1 else 'clients'}", heads, rows)


def _at_rest(results: Results) -> str:
    rows = []
    for server in results.versions:
        idle = results.median(of_server(server, attrgetter("idle_share")))
        held = results.median(of_server(server, attrgetter("resident_mb")))
        if held is not None:
            rows.append([server, _text(held, 0), "" if idle is None else f"{idle:.0%}"])
    return _table("What it holds and does by the way", ["server", "MB resident", "of a core at rest"], rows)


def _array(results: Results) -> str:
    ways: list[tuple[str, Figure]] = [("array.copy()", AGAIN), ("array.copy() into new memory", FRESH)]
    for server in results.versions:
        ways.append((f"{server}: to the next replica's first line", of_handing(server, HANDED)))
        ways.append((f"{server}: until it has read all of it", of_handing(server, READ)))
    rows = [
        [
            name,
            _text(results.median(way), 2),
            _text(min(results.values(way)), 2),
            *(_ratio(results, way, copied, 2) for copied in (AGAIN, FRESH)),
        ]
        for name, way in ways
        if results.values(way)
    ]
    return _table("An array of 10 MB", ["way", "ms", "least", "/ copy", "/ new memory"], rows)


def _in_process(results: Results) -> str:
    found = results.in_process
    if found is None:
        return ""
    ratio = f"{found.execute_us / found.plain_us:.1f}"
    return _table(
        "The diamond in one process, CPU us",
        ["way", "us", "/ plain"],
        [["dag.execute(1, 2, 3)", f"{found.execute_us:.2f}", ratio], ["plain calls", f"{found.plain_us:.2f}", ""]],
    )


def _targets(results: Results) -> str:
    """With the lowest and highest of all rounds: a target between them was neither clearly met nor clearly missed."""
    rows: list[list[str]] = []

    def target(what: str, found: Sequence[float], bound: float, *, least: bool = False) -> None:
        if found:
            value = median(found)
            met = "yes" if (value >= bound if least else value <= bound) else "NO"
            aim = f"{'at least' if least else 'at most'} {bound:g}"
            rows.append([what, aim, f"{value:.3g}", f"{min(found):.3g} to {max(found):.3g}", met])

    for clients in CLIENTS:
        rates = results.ratios(of_diamond(OURS, clients, RATE), of_diamond(RAY, clients, RATE))
        target(f"requests/s / ray serve, {clients} clients", rates, 20, least=True)
        waits = results.ratios(of_diamond(OURS, clients, P50), of_diamond(RAY, clients, P50))
        target(f"p50 / ray serve, {clients} clients", waits, 0.1)
    if results.in_process:
        target("execute in one process, us", [results.in_process.execute_us], 30)
    target("10 MB to the next replica / array.copy()", results.ratios(of_handing(OURS, HANDED), AGAIN), 2)
    return _table("Targets", ["what", "target", "median", "rounds", "met"], rows)


def _notes(results: Results) -> str:
    versions = ", ".join(f"{name} {version}".strip() for name, version in results.versions.items())
    lines = [f"{len(results.rounds)} rounds. Measured: {versions}."]
    lines += [f"Not measured: {name}: {why}" for name, why in results.missing.items()]
    lines += [f"Wrong answers of {name}: {complaint}" for name, complaint in results.complaints().items()]
    return "\n".join(lines)


def _ratio(results: Results, figure: Figure, beside: Figure, digits: int) -> str:
    return _text(middle(results.ratios(figure, beside)), digits)


def _text(figure: float | None, digits: int) -> str:
    return "" if figure is None else f"{figure:,.{digits}f}"


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"{title}\n{text_table(heads, rows)}" if rows else ""
