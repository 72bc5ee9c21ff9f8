"""A fleet as a standalone SVG: one card per worker, grouped by rack, with one bar per GPU."""

from collections.abc import Iterable, Sequence

from pointsman.placement.asks import Place
from pointsman.placement.fleet import Fleet, Host
from pointsman.placement.scorers import RACK
from pointsman.render.fleet_text import (
    CHOSEN,
    SUMMARY_HEADS,
    Bar,
    BarPart,
    FleetView,
    PartKind,
    gpus_text,
    headline,
    in_gib,
    summary_rows,
)
from pointsman.render.svg import Canvas, colour, fitted, ink
from pointsman.render.text import quantity
from pointsman.types import WorkerStatus

WIDTH, MARGIN, PAD = 1120.0, 28.0, 16.0
NAMES = 196.0
"""Width of the left column of a card."""
AREA_X = MARGIN + PAD + NAMES
AREA = WIDTH - MARGIN - PAD - AREA_X
GAP = 8.0
LINK = 11.0
"""Height of the bracket that is drawn below linked GPUs."""
MOST_COLUMNS = 8
BAR, CAPTION, STRIP = 30.0, 18.0, 8.0
CARD_GAP = 10.0

ACCENT = "#d6006c"
FREE, EMPTY_EDGE, HATCH, RESERVED = "#edf1f5", "#d3dae3", "url(#used-by-others)", "#b9c2cf"
FILLS = {PartKind.FREE: FREE, PartKind.OTHERS: HATCH, PartKind.RESERVED: RESERVED, PartKind.HELD: "url(#held)"}
BADGES = {WorkerStatus.DRAINING: "#b7791f", WorkerStatus.LOST: "#c53030"}

HEAD = """\
<style>
text { font-family: Inter, "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; fill: #1f2430; }
.title { font-size: 20px; font-weight: 600; }
.lead { font-size: 13px; fill: #566073; }
.rack { font-size: 12px; font-weight: 600; fill: #566073; letter-spacing: 0.4px; }
.name { font-size: 14px; font-weight: 600; }
.fact { font-size: 11px; fill: #566073; }
.tiny { font-size: 10px; fill: #566073; }
.free { font-size: 10px; fill: #1f2430; text-anchor: end; }
.over { font-size: 10px; fill: #c53030; font-weight: 600; text-anchor: end; }
.badge { font-size: 10px; font-weight: 600; fill: #ffffff; }
.owner { font-size: 11px; }
.cell { font-size: 12px; text-anchor: end; }
.celled { font-size: 12px; }
</style>
<defs>
<pattern id="used-by-others" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">\
<rect width="6" height="6" fill="#e3e7ed"/><rect width="2.4" height="6" fill="#8e99a9"/></pattern>
<pattern id="held" width="6" height="6" patternUnits="userSpaceOnUse">\
<rect width="6" height="6" fill="#edf1f5"/><circle cx="3" cy="3" r="1" fill="#a9b4c2"/></pattern>
</defs>"""


def fleet_svg(fleet: Fleet, *, highlight: Place | None = None, rows: int = 60) -> str:
    """A picture of the fleet. It shows at most `rows` workers, those of the highlighted place first.

    If there are more workers, a table sums up all of them by GPU model.
    """
    view = FleetView(fleet, highlight)
    return _FleetSvg(view, view.first(rows)).document(fleet)


class _FleetSvg:
    """Draws cards from top to bottom. `_y` is the position of the next card."""

    def __init__(self, view: FleetView, hosts: Sequence[Host]) -> None:
        self._view = view
        self._hosts = hosts
        self._canvas = Canvas()
        self._colours = {name: colour(index) for index, name in enumerate(view.owners)} | {CHOSEN: "#fbd5e7"}
        self._columns = min(max((len(view.gpus(host)) for host in hosts), default=1) or 1, MOST_COLUMNS)
        self._y = MARGIN

    def document(self, fleet: Fleet) -> str:
        lead = headline(fleet)
        self._canvas.text(MARGIN, self._y + 18, "Fleet", "title")
        self._canvas.text(MARGIN, self._y + 40, lead, "lead")
        self._y += 62
        self._legend()
        for rack, hosts in _by_rack(self._hosts).items():
            if rack:
                self._canvas.text(MARGIN, self._y + 12, rack, "rack")
                self._y += 22
            for host in hosts:
                self._card(host)
            self._y += 8
        if len(self._hosts) < len(fleet):
            self._summary(fleet)
        paper = f'{HEAD}\n<rect width="100%" height="100%" fill="#f6f7f9"/>'
        return self._canvas.document(WIDTH, self._y - 8 - CARD_GAP + MARGIN, f"Fleet: {lead}", paper)

    # The legend

    def _legend(self) -> None:
        """Draw the legend as chips: one for each mark in the picture, and as many per line as fit."""
        bars = [bar for host in self._hosts for bar in (*self._view.gpus(host), self._view.memory(host))]
        seen = {part.owner or part.kind for bar in bars for part in bar.parts}
        chips = [
            (self._colours[name], f"{name} ({quantity(owner.instances, 'instance')})" if name != CHOSEN else name)
            for name, owner in self._view.owners.items()
            if name in seen
        ]
        kinds = (PartKind.OTHERS, PartKind.RESERVED, PartKind.HELD, PartKind.FREE)
        chips += [(FILLS[kind], kind.value) for kind in kinds if kind in seen]
        x = MARGIN
        for fill, words in chips:
            words = fitted(words, 400, 11)
            width = 18 + len(words) * 6.2 + 16
            if x > MARGIN and x + width > WIDTH - MARGIN:
                x, self._y = MARGIN, self._y + 20
            edge = ACCENT if words == CHOSEN else EMPTY_EDGE if fill == FREE else "none"
            self._canvas.rect(x, self._y, 12, 12, fill, radius=3, stroke=edge)
            self._canvas.text(x + 18, self._y + 10, words, "fact")
            x += width
        self._y += 34

    # A worker

    def _card(self, host: Host) -> None:
        gpus, memory = self._view.gpus(host), self._view.memory(host)
        linked = any(bar.link for bar in gpus)
        lines = -(-len(gpus) // self._columns)
        inside = lines * (BAR + CAPTION + LINK * linked) + STRIP + 14 if gpus else BAR + CAPTION
        height = max(inside, 50) + 2 * PAD - 4
        tip = " ".join([host.worker.name, ", ".join(f"{name}={value}" for name, value in host.labels.items())]).strip()
        self._canvas.open(tip, opacity="0.55" if host.worker.status is WorkerStatus.LOST else "1")
        chosen = host.worker.name in self._view.chosen_workers
        edge = {"stroke": ACCENT, "stroke_width": "1.5"} if chosen else {"stroke": "#dfe4ea"}
        self._canvas.rect(MARGIN, self._y, WIDTH - 2 * MARGIN, height, "#ffffff", radius=10, **edge)
        y = self._y + PAD
        self._facts(host, y)
        if gpus:
            self._gpus(gpus, y)
            self._strip(host, memory, y + inside - STRIP - 4)
        else:
            self._bar(memory, AREA_X, y, AREA, BAR)
            self._caption(memory, AREA_X, y + BAR, AREA, _machine(self._view, host, memory))
        self._canvas.close()
        self._y += height + CARD_GAP

    def _facts(self, host: Host, y: float) -> None:
        worker, x = host.worker, MARGIN + PAD
        name = fitted(worker.name, NAMES - 20 - 70 * (worker.status in BADGES), 14)
        self._canvas.text(x, y + 12, name, "name")
        if worker.status in BADGES:
            width = len(worker.status.value) * 6.2 + 12
            left = x + len(name) * 8.4 + 10
            self._canvas.rect(left, y, width, 16, BADGES[worker.status], radius=8)
            self._canvas.text(left + 6, y + 11.5, worker.status.value, "badge")
        unified = " unified" if worker.unified_memory else ""
        self._canvas.text(x, y + 30, gpus_text(host, 26) or "no GPU", "fact")
        self._canvas.text(x, y + 46, f"{worker.cpus:g} CPUs, {in_gib(worker.memory_bytes)} GiB{unified}", "fact")

    def _gpus(self, gpus: Sequence[Bar], y: float) -> None:
        width = (AREA - GAP * (self._columns - 1)) / self._columns
        linked = any(bar.link for bar in gpus)
        for start in range(0, len(gpus), self._columns):
            line = gpus[start : start + self._columns]
            for index, bar in enumerate(line):
                x = AREA_X + index * (width + GAP)
                self._bar(bar, x, y, width, BAR)
                self._caption(bar, x, y + BAR, width, bar.name.removeprefix("gpu"))
            if linked:
                self._links(line, y + BAR + CAPTION + 3, width)
            y += BAR + CAPTION + LINK * linked

    def _links(self, line: Sequence[Bar], y: float, width: float) -> None:
        for link in dict.fromkeys(bar.link for bar in line if bar.link):
            middles = [AREA_X + index * (width + GAP) + width / 2 for index, bar in enumerate(line) if bar.link == link]
            self._canvas.open(link)
            for x in middles:
                self._canvas.line([(x, y - 3), (x, y)], stroke="#9aa6b6", stroke_width="1.5")
            self._canvas.line([(middles[0], y), (middles[-1], y)], stroke="#9aa6b6", stroke_width="1.5")
            self._canvas.close()

    def _strip(self, host: Host, memory: Bar, y: float) -> None:
        """Draw the memory of a machine that has GPUs."""
        width = AREA - 300
        self._bar(memory, AREA_X, y, width, STRIP)
        self._canvas.text(AREA_X + width + GAP + 4, y + STRIP, _machine(self._view, host, memory), "tiny")

    # A bar

    def _bar(self, bar: Bar, x: float, y: float, width: float, height: float) -> None:
        self._canvas.rect(x, y, width, height, FREE, radius=3, stroke=EMPTY_EDGE)
        whole = max(bar.total_bytes, sum(part.size_bytes for part in bar.parts), 1)
        outlines: list[tuple[float, float]] = []
        for part in bar.parts:
            length = part.size_bytes / whole * width
            if part.kind is not PartKind.FREE:
                self._part(part, x, y, length, height, named=height >= 20)
            if part.chosen:
                outlines.append((x, length))
            x += length
        for left, length in outlines:  # drawn last, so that neighbouring parts do not cover the outlines
            self._canvas.rect(left, y, length, height, "none", radius=2, stroke=ACCENT, stroke_width="2.5")

    def _part(self, part: BarPart, x: float, y: float, length: float, height: float, *, named: bool) -> None:
        whose = f"{part.instance} ({part.owner})" if part.instance and part.instance != part.owner else part.owner
        self._canvas.open(f"{whose or part.kind.value}: {in_gib(part.size_bytes)} GiB")
        fill = self._colours[part.owner] if part.kind is PartKind.CLAIMED else FILLS[part.kind]
        gap = 1 if part.kind is PartKind.CLAIMED and length > 4 else 0
        self._canvas.rect(x, y, max(length - gap, 0.5), height, fill, radius=2)
        words = fitted(part.instance or part.owner, length - 11, 11) if named and part.owner else ""
        if words:
            style = f"fill: {ink(self._colours[part.owner])}"
            self._canvas.text(x + 6, y + height / 2 + 4, words, "owner", style=style)
        self._canvas.close()

    def _caption(self, bar: Bar, x: float, y: float, width: float, name: str) -> None:
        self._canvas.text(x + 1, y + 12, name, "tiny")
        if bar.free_bytes < 0:
            self._canvas.text(x + width - 1, y + 12, f"{in_gib(-bar.free_bytes)} GiB too much", "over")
        elif bar.name != "memory":
            words = "held" if bar.held else f"{in_gib(bar.free_bytes)} GiB free"
            self._canvas.text(x + width - 1, y + 12, words, "free")

    # The workers that are not drawn

    def _summary(self, fleet: Fleet) -> None:
        left_out = len(fleet) - len(self._hosts)
        self._canvas.text(MARGIN, self._y + 14, f"... and {quantity(left_out, 'worker')} more. All of them:", "lead")
        self._y += 40
        for row in (SUMMARY_HEADS, *summary_rows(fleet)):
            self._canvas.text(MARGIN, self._y, row[0], "celled")
            for index, cell in enumerate(row[1:]):
                self._canvas.text(MARGIN + 260 + index * 110, self._y, cell, "cell")
            self._y += 20
        self._y += 8


def _by_rack(hosts: Iterable[Host]) -> dict[str, list[Host]]:
    """Workers by heading. Without racks, there is one group, and its heading is empty."""
    groups: dict[str, list[Host]] = {}
    for host in hosts:
        rack = host.labels.get(RACK)
        groups.setdefault(f"{RACK} {rack}" if rack is not None else "", []).append(host)
    if "" in groups and len(groups) > 1:
        groups[f"no {RACK}"] = groups.pop("")
    return groups


def _machine(view: FleetView, host: Host, memory: Bar) -> str:
    free = f"{in_gib(memory.free_bytes)} of {in_gib(memory.total_bytes)} GiB"
    return f"memory: {free} free; CPUs: {view.free_cpus(host):g} of {host.worker.cpus:g} free"
