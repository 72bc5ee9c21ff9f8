"""A plot of a replay. It shows the needed replicas, the replicas of a policy, and shortages."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from pointsman.lab.scaling.comparison import clairvoyant
from pointsman.lab.scaling.recording import Series
from pointsman.lab.scaling.replay import ReplayOutcome, Setting
from pointsman.render.svg import Canvas, number

WIDTH, HEIGHT = 960.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 40.0, 26.0
COLUMNS = 640
"""Number of columns in the plot. Each column shows the maximum of its interval."""
DAY_S = 86400.0
STYLE = """<style>
text { font: 11px ui-sans-serif, system-ui, sans-serif; fill: #57606a; }
.title { font-size: 13px; font-weight: 600; }
</style>
<rect width="100%" height="100%" fill="#ffffff"/>"""
NEED, BOUND, POLICY, SHORT = "#c9d7e8", "#54a24b", "#f58518", "#d62728"


def plot(series: Series, setting: Setting, name: str, outcome: ReplayOutcome) -> str:
    """An SVG. Needed replicas are an area, the clairvoyant reference and the policy are lines, shortages are ticks."""
    return plots(series, setting, {name: outcome})


def plots(series: Series, setting: Setting, outcomes: Mapping[str, ReplayOutcome]) -> str:
    """An SVG with one such plot for each policy, one below the other."""
    canvas, titles = Canvas(), []
    for index, (name, outcome) in enumerate(outcomes.items()):
        if index:
            canvas.open(transform=f"translate(0 {number(index * HEIGHT)})")
        titles.append(_draw(canvas, series, setting, name, outcome))
        if index:
            canvas.close()
    return canvas.document(WIDTH, HEIGHT * len(outcomes), "; ".join(titles), STYLE)


def _draw(canvas: Canvas, series: Series, setting: Setting, name: str, outcome: ReplayOutcome) -> str:
    """Draw one plot. Returns its title."""
    need = series.needed(setting.capacity)
    bound = clairvoyant(series, setting)
    columns = min(COLUMNS, len(need))
    width = series.seconds / columns
    top = max(*need, outcome.most, 1)
    title = (
        f"{series.name}: {name}, start-up {setting.start_up_s:g} s: {outcome.ratio:.2f} of the least, "
        f"{outcome.unserved:.2%} unserved, {outcome.changes} changes"
    )
    _axes(canvas, series, top)
    steps = [(index * series.bin_s, count, count) for index, count in enumerate(need)]
    canvas.path(_step_path(_columns(steps, columns, width), top, closed=True), fill=NEED)
    canvas.path(_step_path(_columns(bound.line, columns, width), top), stroke=BOUND, stroke_width="0.7")
    canvas.path(_step_path(_columns(outcome.line, columns, width), top), stroke=POLICY, stroke_width="1")
    ticks = sorted({round(_x(at, series.seconds)) for at in _short(series, need, outcome)})
    canvas.path("".join(f"M{x} {number(HEIGHT - BOTTOM)}v-7" for x in ticks), stroke=SHORT, stroke_width="1.2")
    canvas.text(LEFT, 15, title, "title")
    _legend(canvas)
    return title


def _legend(canvas: Canvas) -> None:
    x = LEFT
    for colour, words in (
        (NEED, "needed"),
        (POLICY, "policy"),
        (BOUND, "clairvoyant with start-up"),
        (SHORT, "too few were ready"),
    ):
        canvas.rect(x, 23, 9, 9, colour)
        canvas.text(x + 13, 31.5, words, "legend")
        x += 32 + 6 * len(words)


def _axes(canvas: Canvas, series: Series, top: int) -> None:
    for part in range(5):
        y = _y(top * part / 4, top)
        canvas.line([(LEFT, y), (WIDTH - RIGHT, y)], stroke="#e6e8eb", stroke_width="1")
        canvas.text(LEFT - 6, y + 4, f"{top * part / 4:.0f}", "y", text_anchor="end")
    unit, word = (
        (DAY_S, "day") if series.seconds > 2 * DAY_S else (3600.0, "h") if series.seconds > 7200 else (60.0, "min")
    )
    every = max(1, round(series.seconds / unit / 14))
    for count in range(0, int(series.seconds / unit) + 1, every):
        x = _x(count * unit, series.seconds)
        canvas.text(x, HEIGHT - BOTTOM + 15, f"{word} {count}" if count == 0 else str(count), "x")


def _short(series: Series, need: Sequence[int], outcome: ReplayOutcome) -> list[float]:
    """The starts of bins with too few ready replicas. Replicas are counted when the policy is called."""
    ends = [*(start for start, _, _ in outcome.line[1:]), series.seconds]
    found = []
    for (start, _, ready), end in zip(outcome.line, ends, strict=True):
        first, last = series.bins_before(start), series.bins_before(end - 1e-6)
        found += [index * series.bin_s for index in range(first, last + 1) if index < len(need) and need[index] > ready]
    return found


def _columns(line: Sequence[tuple[float, int, int]], columns: int, width: float) -> list[int]:
    most = [0] * columns
    ends = [after[0] for _, after in pairwise(line)] + [columns * width]
    for (start, count, _), end in zip(line, ends, strict=True):
        for index in range(int(start / width + 1e-9), min(int((end - 1e-6) / width) + 1, columns)):
            most[index] = max(most[index], count)
    return most


def _step_path(columns: Sequence[int], top: int, *, closed: bool = False) -> str:
    wide = (WIDTH - LEFT - RIGHT) / len(columns)
    parts = [f"M{number(LEFT)} {number(_y(0 if closed else columns[0], top))}"]
    for index, count in enumerate(columns):
        if index == 0 or count != columns[index - 1]:
            parts.append(f"V{number(_y(count, top))}")
        if index + 1 == len(columns) or columns[index + 1] != count:
            parts.append(f"H{number(LEFT + (index + 1) * wide)}")
    return "".join(parts) + (f"V{number(_y(0, top))}Z" if closed else "")


def _x(at: float, seconds: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * at / seconds


def _y(count: float, top: int) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - count / top)
