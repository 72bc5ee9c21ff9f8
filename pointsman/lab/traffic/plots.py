"""Plots of comparisons as SVG. The page sets their colours, for light and for dark."""

import math
from collections.abc import Mapping, Sequence

from pointsman.render.svg import Canvas, number, xml

WIDTH, HEIGHT = 560.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 14.0, 40.0
SERIES = 10
"""Number of colours in the style sheet. Their classes are s0, s1, and so on."""


class Line:
    """One line of a plot: its name and its points."""

    def __init__(self, name: str, points: Sequence[tuple[float, float]], index: int, *, dashed: bool = False) -> None:
        self.name, self.index, self.dashed = name, index, dashed
        self.points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


class Axis:
    """Maps values to positions, linearly or logarithmically."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        self.log = log
        self._low, self._high = (math.log10(low), math.log10(high)) if log else (low, high)
        if self._high <= self._low:
            self._high = self._low + 1.0
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        at = math.log10(max(value, 1e-12)) if self.log else value
        share = min(max((at - self._low) / (self._high - self._low), 0.0), 1.0)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        if self.log:
            whole = range(math.floor(self._low), math.ceil(self._high) + 1)
            steps = (1, 2, 5) if self._high - self._low < 2.5 else (1,)
            found = [step * 10.0**power for power in whole for step in steps]
            return [one for one in found if self._low - 1e-9 <= math.log10(one) <= self._high + 1e-9]
        step = _round_step((self._high - self._low) / 5)
        first = math.ceil(self._low / step - 1e-9)
        return [one * step for one in range(first, math.floor(self._high / step + 1e-9) + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough - 1e-12)


def line_plot(
    title: str,
    x_name: str,
    y_name: str,
    lines: Sequence[Line],
    *,
    log: bool = False,
    y_range: tuple[float, float] | None = None,
    marks: Mapping[str, float] | None = None,
    dots: bool = False,
) -> str:
    """A plot. `log` makes the x axis logarithmic, `marks` are named vertical lines, `dots` draws each point."""
    points = [point for line in lines for point in line.points]
    if not points:
        return f"<p>{xml(title)}: nothing to show</p>"
    xs = [x for x, _ in points if x > 0 or not log] + list((marks or {}).values())
    ys = [y for _, y in points]
    x_axis = Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, log=log)
    low, high = y_range or (0.0, max(ys) * 1.05 or 1.0)
    y_axis = Axis(low, high, HEIGHT - BOTTOM, TOP)
    canvas = Canvas()
    _axes(canvas, x_axis, y_axis, x_name, y_name)
    for name, at in (marks or {}).items():
        canvas.line([(x_axis(at), TOP), (x_axis(at), HEIGHT - BOTTOM)], **{"class": "mark"})
        canvas.text(x_axis(at) + 4, HEIGHT - BOTTOM - 6, name, "tick")
    for line in lines:
        style = f"line s{line.index % SERIES}" + (" dashed" if line.dashed else "")
        placed = [(x_axis(x), y_axis(y)) for x, y in line.points]
        canvas.open(line.name, **{"class": style})
        canvas.line(placed)
        for x, y in placed if dots or len(placed) == 1 else ():
            canvas.rect(x - 2.5, y - 2.5, 5, 5, "currentColor", radius=2.5)
        canvas.close()
    return canvas.document(WIDTH, HEIGHT, title, "")


def _axes(canvas: Canvas, x_axis: Axis, y_axis: Axis, x_name: str, y_name: str) -> None:
    for tick in y_axis.ticks():
        canvas.line([(LEFT, y_axis(tick)), (WIDTH - RIGHT, y_axis(tick))], **{"class": "grid"})
        canvas.text(LEFT - 6, y_axis(tick) + 4, f"{tick:g}", "tick", text_anchor="end")
    for tick in x_axis.ticks():
        canvas.line([(x_axis(tick), TOP), (x_axis(tick), HEIGHT - BOTTOM)], **{"class": "grid"})
        canvas.text(x_axis(tick), HEIGHT - BOTTOM + 15, f"{tick:g}", "tick", text_anchor="middle")
    canvas.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_name, "name", text_anchor="middle")
    turned = f"rotate(-90 12 {number((TOP + HEIGHT - BOTTOM) / 2)})"
    canvas.text(12, (TOP + HEIGHT - BOTTOM) / 2, y_name, "name", text_anchor="middle", transform=turned)


def heat_map(title: str, rows: Mapping[str, Sequence[float]], bin_s: float) -> str:
    """A heat map with one row per instance. Time goes to the right, and darker means more."""
    names = sorted(rows, key=_natural)
    columns = max((len(row) for row in rows.values()), default=0)
    if not columns:
        return f"<p>{xml(title)}: nothing to show</p>"
    merged = max(1, -(-columns // 120))
    most = max((max(row, default=0) for row in rows.values()), default=0) or 1
    cell_h = max(min((HEIGHT - TOP - BOTTOM) / len(names), 22.0), 4.0)
    height = TOP + cell_h * len(names) + BOTTOM
    cells = -(-columns // merged)
    cell_w = (WIDTH - LEFT - 40 - RIGHT) / cells
    canvas = Canvas()
    for line, name in enumerate(names):
        y = TOP + line * cell_h
        if cell_h >= 10 or line % 4 == 0:
            canvas.text(LEFT + 34, y + cell_h / 2 + 4, name, "tick", text_anchor="end")
        for index in range(cells):
            part = rows[name][index * merged : (index + 1) * merged]
            value = sum(part) / len(part) if part else 0.0
            if value:
                x = LEFT + 40 + index * cell_w
                canvas.rect(x, y, cell_w + 0.3, cell_h - 0.6, "currentColor", fill_opacity=f"{value / most:.2f}")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = LEFT + 40 + share * (WIDTH - LEFT - 40 - RIGHT)
        canvas.text(x, height - BOTTOM + 15, f"{share * columns * bin_s:.0f}", "tick", text_anchor="middle")
    words = f"seconds; darkest is {most:g} requests in flight"
    canvas.text((LEFT + 40 + WIDTH - RIGHT) / 2, height - 6, words, "name", text_anchor="middle")
    return canvas.document(WIDTH, height, title, "")


def _natural(name: str) -> tuple[str, int, str]:
    stem, _, last = name.rpartition("-")
    return (stem, int(last), "") if last.isdecimal() else (name, 0, "")
