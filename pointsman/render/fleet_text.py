"""A fleet in a terminal: one line per worker, one bar per GPU."""

import re
from collections.abc import Iterable, Sequence

from pointsman.placement.asks import Place
from pointsman.placement.fleet import Fleet, Host
from pointsman.render.fleet import (
    CHOSEN,
    SUMMARY_HEADS,
    Bar,
    BarPart,
    FleetView,
    Owner,
    PartKind,
    gpus_text,
    headline,
    in_gib,
    summary_rows,
)
from pointsman.render.text import quantity, text_table
from pointsman.types import WorkerStatus

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvw"
MANY = "+"
"""The deployments beyond the letters."""
MARKS = {PartKind.RESERVED: "-", PartKind.OTHERS: "x", PartKind.HELD: "~", PartKind.FREE: " "}
CHOSEN_MARK = "#"
OVERCOMMITTED = "!"

MIN_CELLS, MAX_CELLS = 4, 30
"""Width of a bar."""
BACKGROUNDS = (75, 215, 114, 176, 203, 80, 221, 137, 211, 73)
"""Colours of deployments, of the 256 colours of terminals."""


def fleet_text(
    fleet: Fleet, *, width: int = 100, color: bool = False, highlight: Place | None = None, rows: int = 40
) -> str:
    """A picture of the fleet. With more than `rows` workers, only the first are drawn, those of the highlighted place
    before the others, and a table sums up all workers by GPU model."""
    view = FleetView(fleet, highlight)
    hosts = view.first(rows)
    drawing = _FleetText(view, width, color)
    lines = [headline(fleet), "", *drawing.table(hosts)]
    if len(hosts) < len(fleet):
        lines += [f"... and {quantity(len(fleet) - len(hosts), 'worker')} more", ""]
        lines += [text_table(SUMMARY_HEADS, summary_rows(fleet))]
    return "\n".join([*lines, "", *drawing.legend()])


class _FleetText:
    """The lines of one picture, and the marks that it uses."""

    def __init__(self, view: FleetView, width: int, color: bool) -> None:
        self._view = view
        self._width = width
        self._color = color
        named = list(view.owners)  # the chosen place comes last and takes no letter
        self._letters = {name: LETTERS[index] if index < len(LETTERS) else MANY for index, name in enumerate(named)}
        self._backgrounds = {name: BACKGROUNDS[index % len(BACKGROUNDS)] for index, name in enumerate(named)}
        self._used: set[str] = set()

    def table(self, hosts: Sequence[Host]) -> list[str]:
        """A head, and a line for each worker; GPUs that do not fit continue on the next line."""
        names = [_name(host, max(self._width // 4, 8)) for host in hosts]
        kinds = [gpus_text(host, 20) or "CPU only" for host in hosts]
        first, second = (max([*map(len, cells), 6]) for cells in (names, kinds))
        numbers = 18
        room = max(self._width - first - second - numbers - 4, MIN_CELLS + 2)
        lines = [f"{'worker':{first}}  {'GPUs':{second}}  {'':{room}}{'free GiB':>9}{'largest':>9}"]
        for host, name, kind in zip(hosts, names, kinds, strict=True):
            bars = self._view.gpus(host) or [self._view.memory(host)]
            open_bars = [bar.free_bytes for bar in bars if not bar.held] or [0]
            free = f"{in_gib(sum(max(size, 0) for size in open_bars)):>9}{in_gib(max(open_bars)):>9}"
            for index, line in enumerate(self._bars(bars, room)):
                before = f"{name:{first}}  {kind:{second}}  " if not index else " " * (first + second + 4)
                lines.append((before + line + (free if not index else "")).rstrip())
        return lines

    def _bars(self, bars: Sequence[Bar], room: int) -> Iterable[str]:
        """Lines of bars side by side, each line as wide as the room."""
        side_by_side = min(len(bars), max((room - 1) // (MIN_CELLS + 1), 1))
        cells = min((room - 1) // side_by_side - 1, MAX_CELLS)
        for start in range(0, len(bars), side_by_side):
            drawn = [self._bar(bar, cells) for bar in bars[start : start + side_by_side]]
            blank = " " * (room - 1 - len(drawn) * (cells + 1))
            yield "│" + "".join(f"{one}│" for one in drawn) + blank

    def _bar(self, bar: Bar, cells: int) -> str:
        too_much = bar.free_bytes < 0
        if too_much:
            self._used.add(OVERCOMMITTED)
            cells -= 1
        drawn = ""
        for part, length in zip(bar.parts, shared_out(bar.parts, cells), strict=True):
            mark = self._mark(part)
            self._used.update(mark * length)
            text = mark * length
            if part.kind in (PartKind.FREE, PartKind.HELD):
                number = _short(bar.free_bytes)
                text = text[len(number) :] + number if len(number) <= length else text
            drawn += self._painted(text, part)
        return drawn + (OVERCOMMITTED if too_much else "")

    def _mark(self, part: BarPart) -> str:
        if part.kind is not PartKind.CLAIMED:
            return MARKS[part.kind]
        return CHOSEN_MARK if part.chosen else self._letters[part.owner]

    def _painted(self, text: str, part: BarPart) -> str:
        if not self._color or not text or part.kind is PartKind.FREE:
            return text
        if part.chosen:
            return f"\x1b[1;30;48;5;226m{text}\x1b[0m"
        if part.kind is PartKind.CLAIMED:
            return f"\x1b[30;48;5;{self._backgrounds[part.owner]}m{text}\x1b[0m"
        return f"\x1b[90m{text}\x1b[0m"

    def legend(self) -> list[str]:
        """What the letters and the other marks mean; only those in the picture."""
        owners = [
            f"{self._painted(letter, BarPart(PartKind.CLAIMED, 1, name))} {name} ({_taken(self._view.owners[name])})"
            for name, letter in self._letters.items()
            if letter in self._used and letter != MANY
        ]
        marks = {
            CHOSEN_MARK: CHOSEN,
            MANY: "further deployments",
            **{mark: kind.value for kind, mark in MARKS.items() if kind is not PartKind.FREE},
            OVERCOMMITTED: "more is claimed than there is",
        }
        meanings = [f"{mark} {words}" for mark, words in marks.items() if mark in self._used]
        return [*_wrapped(owners, self._width), *_wrapped([*meanings, "numbers: GiB free"], self._width)]


def shared_out(parts: Sequence[BarPart], cells: int) -> list[int]:
    """The cells of each part, in proportion; claims and other processes get at least one, if there are enough."""
    total = sum(part.size_bytes for part in parts)
    if not total:
        return [0] * len(parts)
    exact = [part.size_bytes * cells / total for part in parts]
    least = [int(part.kind in (PartKind.CLAIMED, PartKind.OTHERS)) for part in parts]
    shares = [max(int(share), one) for share, one in zip(exact, least, strict=True)]
    indexes = range(len(parts))
    while sum(shares) > cells:
        shares[max(indexes, key=lambda index: (shares[index] > least[index], shares[index] - exact[index]))] -= 1
    while sum(shares) < cells:
        shares[max(indexes, key=lambda index: exact[index] - shares[index])] += 1
    return shares


def _name(host: Host, most: int) -> str:
    worker = host.worker
    name = worker.name if len(worker.name) <= most else f"{worker.name[: most - 1]}…"
    return name if worker.status is WorkerStatus.READY else f"{name} ({worker.status.value})"


def _short(size_bytes: int) -> str:
    """GiB inside a bar: 38, but 3.8."""
    value = size_bytes / 2**30
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def _taken(owner: Owner) -> str:
    size = owner.gpu_bytes or owner.memory_bytes
    return f"{quantity(owner.instances, 'instance')}, {in_gib(size)} GiB{'' if owner.gpu_bytes else ' of memory'}"


def _wrapped(words: Sequence[str], width: int) -> list[str]:
    lines: list[str] = []
    for word in words:
        if lines and _length(lines[-1]) + 3 + _length(word) <= width:
            lines[-1] += f"   {word}"
        else:
            lines.append(word)
    return lines


def _length(text: str) -> int:
    """Visible length: escape codes take no room."""
    return len(re.sub(r"\x1b\[[0-9;]*m", "", text))
