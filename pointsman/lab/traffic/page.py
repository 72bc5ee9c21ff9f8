"""A comparison as one HTML page, light or dark. The page needs no script, no other file, and no network."""

import math
from collections.abc import Sequence

from pointsman.lab.traffic.comparison import Cell, SeedMean, TrafficComparison, signed, with_interval
from pointsman.lab.traffic.measures import NO_TENANT, QUANTILES, Latencies, Objectives
from pointsman.lab.traffic.plots import SERIES, Line, heat_map, line_plot
from pointsman.lab.traffic.recording import Survey
from pointsman.render.svg import PALETTE, xml

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2430; --dim: #57606a; --rule: #d8dee4; --card: #f6f8fa;
        --good: #1a7f37; --bad: #b42318; --heat: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171c; --ink: #e6e9ee; --dim: #9aa4b2; --rule: #333a44; --card: #1c2027; --good: #4ac26b;
          --bad: #ff8178; --heat: #ff8a65; }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 ui-sans-serif, system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 8px; }
h3 { font-size: 15px; margin: 0 0 6px; } p { margin: 4px 0 10px; } .dim, caption { color: var(--dim); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--dim); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
td.best { font-weight: 700; } td.up { color: var(--good); } td.down { color: var(--bad); }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(440px, 1fr)); gap: 18px; }
.plot { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px; margin: 0; }
.plot svg { width: 100%; height: auto; display: block; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 0 14px; padding: 0; list-style: none; }
.legend span { display: inline-block; width: 14px; height: 4px; border-radius: 2px; background: currentColor;
  margin: 0 6px 3px 0; } .legend b { color: var(--ink); font-weight: 500; }
svg text { fill: var(--dim); font: 11px ui-sans-serif, system-ui, sans-serif; } svg .name { fill: var(--ink); }
svg .grid { stroke: var(--rule); stroke-width: 1; } svg .mark { stroke: var(--dim); stroke-dasharray: 4 3; }
svg .line polyline { stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; }
svg .dashed polyline { stroke-dasharray: 6 4; } .heat svg { color: var(--heat); }
"""
COLUMNS: tuple[tuple[str, str, float, int, int], ...] = (
    ("TTFT mean s", "ttft_mean_s", 1, 2, -1), ("p50", "ttft_p50_s", 1, 2, -1), ("p90", "ttft_p90_s", 1, 2, -1),
    ("p99", "ttft_p99_s", 1, 1, -1), ("TPOT mean ms", "tpot_mean_s", 1000, 1, -1), ("p90", "tpot_p90_s", 1000, 0, -1),
    ("p99", "tpot_p99_s", 1000, 0, -1), ("e2e mean s", "latency_mean_s", 1, 1, -1), ("p90", "latency_p90_s", 1, 1, -1),
    ("p99", "latency_p99_s", 1, 1, -1), ("goodput/s", "goodput_per_s", 1, 2, 1), ("tokens/s", "tokens_per_s", 1, 0, 1),
    ("hit rate %", "hit_rate", 100, 1, 1), ("rejected %", "rejected", 100, 1, -1), ("late %", "late", 100, 1, -1),
    ("slow %", "slow", 100, 1, -1), ("GPU-hours", "gpu_hours", 1, 1, -1),
    ("cost/M tokens", "cost_per_million_tokens", 1, 2, -1), ("fairness", "fairness", 1, 3, 1),
)  # fmt: skip
"""For each column: head, measure, factor, decimal places, and 1 if more is better or -1 if less is better."""


def page(compared: TrafficComparison, survey: Survey, fleet: str, objectives: Objectives) -> str:
    title = f"Routing policies on {survey.name}"
    seeds = len(next(iter(compared.cells.values())).runs)
    reads, writes = survey.input_tokens / survey.requests, survey.output_tokens / survey.requests
    lead = (
        f"{survey.requests:,} requests in {survey.seconds:,.0f} s, with {reads:,.0f} input and {writes:,.0f} output "
        f"tokens on average, on {fleet}. A request is in time if its first token comes within {objectives.ttft_s:g} s "
        f"and its mean time per output token is at most {objectives.tpot_s * 1000:g} ms; a rejected one is a miss. "
        f"Means over {seeds} seed{'s' if seeds > 1 else ''}, with 95 % confidence intervals where there are several."
    )
    body = [
        f"<h1>{xml(title)}</h1><p class=dim>{xml(lead)}</p>",
        _legend(compared),
        "<h2>In time</h2>",
        _attainment(compared),
        _bounds(compared),
        *(_speed(compared, speed, objectives) for speed in compared.speeds),
        *(f"<p class=dim>warning: {xml(error)}</p>" for error in compared.errors()),
    ]
    colours = "".join(f".s{index} {{ color: {PALETTE[index]}; }}" for index in range(SERIES))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{xml(title)}</title>'
    icon = '<link rel="icon" href="data:,">'  # without it, a browser requests an icon
    style = f"<style>{STYLE}{colours}</style>"
    text = "\n".join(body)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}{icon}{style}</head><body><main>{text}</main></body></html>\n'


def _legend(compared: TrafficComparison) -> str:
    items = [
        f'<li class="s{index % SERIES}"><span></span><b>{xml(name)}</b></li>'
        for index, name in enumerate(compared.policies)
    ]
    return f"<ul class=legend>{''.join(items)}</ul>"


def _figure(title: str, svg: str, kind: str = "") -> str:
    return f'<figure class="plot {kind}"><h3>{xml(title)}</h3>{svg}</figure>'


def _attainment(compared: TrafficComparison) -> str:
    lines = [
        Line(
            name,
            [(speed, compared.cells[name, speed].of("attainment").mean) for speed in sorted(compared.speeds)],
            index,
        )
        for index, name in enumerate(compared.policies)
    ]
    if compared.bounds:
        points = [(speed, best.attainment) for speed, best in sorted(compared.bounds.items())]
        lines.append(Line("bound", points, 7, dashed=True))
    plot = line_plot("Share in time against load", "speed-up", "share in time", lines, y_range=(0.0, 1.0), dots=True)
    heads = ["policy", *(head for speed in compared.speeds for head in (f"{speed:g}x", "vs first", "of bound"))]
    rows = [
        [name, *(cell for speed in compared.speeds for cell in _in_time(compared, name, speed))]
        for name in compared.policies
    ]
    return f"<div class=plots>{_figure('Share in time against load (dashed: bound)', plot)}</div>" + _table(heads, rows)


def _in_time(compared: TrafficComparison, name: str, speed: float) -> list[str | tuple[str, str]]:
    cell = compared.cells[name, speed]
    best = max(compared.cells[other, speed].of("attainment").mean for other in compared.policies)
    own, share = cell.of("attainment"), compared.of_bound(cell)
    shown: str | tuple[str, str] = ("best", with_interval(own)) if own.mean == best else with_interval(own)
    if name == compared.policies[0]:
        return [shown, "", "" if share is None else f"{share:.1%}"]
    difference = compared.difference(name, speed, "attainment")
    return [shown, (_direction(difference, 1), signed(difference)), "" if share is None else f"{share:.1%}"]


def _direction(difference: SeedMean, better: int) -> str:
    """The class of a difference: up or down if its interval excludes 0, else empty."""
    clear = not math.isnan(difference.half) and abs(difference.mean) > difference.half
    return "" if not clear else "up" if difference.mean * better > 0 else "down"


def _bounds(compared: TrafficComparison) -> str:
    if not compared.bounds:
        return ""
    heads = [
        "bound",
        "in time at most",
        "cannot be in time",
        "hit rate at most",
        "serves all until",
        "least longest wait",
    ]
    rows: list[list[str | tuple[str, str]]] = [
        [
            f"{speed:g}x", f"{best.attainment:.3f}", f"{best.intrinsic_misses:.1%}", f"{best.hit_rate:.1%}",
            f"{best.serve_all:.2f}x", f"{best.least_wait_s:.1f} s",
        ]
        for speed, best in compared.bounds.items()
    ]  # fmt: skip
    note = (
        "No policy exceeds it. Assumed: an unlimited prefix cache that all engines share, marginal work, and all "
        "engines as one machine that may pause any work. The share in time lets late requests wait without limit."
    )
    return f"<h2>What is possible</h2>{_table(heads, rows)}<p class=dim>{note}</p>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str | tuple[str, str]]]) -> str:
    """An HTML table; a cell may have a class."""
    top = "".join(f"<th>{xml(head)}</th>" for head in heads)
    each = [
        "".join(
            f'<td class="{cell[0]}">{xml(cell[1])}</td>' if isinstance(cell, tuple) else f"<td>{xml(cell)}</td>"
            for cell in row
        )
        for row in rows
    ]
    inside = "".join(f"<tr>{row}</tr>" for row in each)
    return f"<div class=scroll><table><thead><tr>{top}</tr></thead><tbody>{inside}</tbody></table></div>"


def _speed(compared: TrafficComparison, speed: float, objectives: Objectives) -> str:
    cells = [compared.cells[name, speed] for name in compared.policies]
    rows = [[cell.policy, *(_measure(compared, cell, *column[1:]) for column in COLUMNS)] for cell in cells]
    heads = ["policy", *(column[0] for column in COLUMNS)]
    cdfs = [
        ("Time to first token", "seconds", [cell.runs[0].ttft for cell in cells], 1.0, objectives.ttft_s),
        (
            "Time per output token",
            "milliseconds",
            [cell.runs[0].tpot for cell in cells],
            1000.0,
            objectives.tpot_s * 1000,
        ),
        ("From arrival to end", "seconds", [cell.runs[0].latency for cell in cells], 1.0, None),
    ]
    plots = [
        _figure(title, _cdf(title, unit, compared.policies, each, factor, mark))
        for title, unit, each, factor, mark in cdfs
    ]
    plots += [
        _figure("Requests that wait or run", _over_time(cells, "running")),
        _figure("Instances", _over_time(cells, "replicas")),
    ]
    plots += [
        _figure(
            f"Load per instance: {cell.policy}",
            heat_map(cell.policy, cell.runs[0].line.load, cell.runs[0].line.bin_s),
            "heat",
        )
        for cell in cells
    ]
    tenants = _tenants(cells)
    note = "<p class=dim>Coloured: differs from the first policy with 95 % confidence. Plots are of the first seed.</p>"
    return f"<h2>At {speed:g}x</h2>{_table(heads, rows)}{note}{tenants}<div class=plots>{''.join(plots)}</div>"


def _measure(
    compared: TrafficComparison, cell: Cell, measure: str, factor: float, places: int, better: int
) -> str | tuple[str, str]:
    mean = cell.of(measure).mean * factor
    text = f"{mean:.{places}f}" if math.isfinite(mean) else ""
    if cell.policy == compared.policies[0]:
        return text
    return _direction(compared.difference(cell.policy, cell.speed, measure), better), text


def _cdf(
    title: str, unit: str, names: Sequence[str], each: Sequence[Latencies], factor: float, mark: float | None
) -> str:
    lines = [
        Line(
            name,
            [(max(value * factor, 1e-3), share) for value, share in zip(one.quantiles, QUANTILES, strict=False)],
            index,
        )
        for index, (name, one) in enumerate(zip(names, each, strict=True))
    ]
    marks = {} if mark is None else {"objective": mark}
    return line_plot(title, unit, "share of requests", lines, log=True, y_range=(0.0, 1.0), marks=marks)


def _over_time(cells: Sequence[Cell], what: str) -> str:
    lines = []
    for index, cell in enumerate(cells):
        line = cell.runs[0].line
        counts = (
            line.replicas if what == "replicas" else [a + b for a, b in zip(line.running, line.waiting, strict=True)]
        )
        lines.append(Line(cell.policy, [(at * line.bin_s, count) for at, count in enumerate(counts)], index))
    return line_plot(what, "seconds", "requests" if what == "running" else "instances", lines)


def _tenants(cells: Sequence[Cell]) -> str:
    names = sorted({name for cell in cells for name in cell.runs[0].tenants})
    if names == [NO_TENANT]:
        return ""
    rows = [[cell.policy, *(f"{cell.runs[0].tenants[name].attainment:.3f}" for name in names)] for cell in cells]
    return "<h3>In time, by tenant</h3>" + _table(["policy", *names], rows)
