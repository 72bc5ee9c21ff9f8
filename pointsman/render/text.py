"""Tables and lines for a terminal."""

from collections.abc import Sequence
from unicodedata import combining, east_asian_width


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned, numbers to the right, a rule under the head."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    numeric = [
        bool(rows) and all(_is_number(row[place]) or not row[place] for row in rows) for place in range(len(heads))
    ]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(heads), line(["-" * width for width in widths]), *map(line, rows)])


def one_line(words: str, longest: int) -> str:
    """Somebody else's words on one line: no line breaks, no control characters, and not longer than that."""
    begun = words[: 4 * longest]  # there may be megabytes of them
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in begun).split())
    return words if len(words) <= longest else f"{words[: longest - 3]}..."


def cells(words: str) -> int:
    """The width of a text in columns of a terminal."""
    if words.isascii():
        return len(words)
    return sum(0 if combining(one) else 2 if east_asian_width(one) in "WF" else 1 for one in words)


def cut(words: str, room: int) -> str:
    """As much of the text as fits into `room` columns; empty if that is too little to read."""
    if cells(words) <= room:
        return words
    if room < 4:
        return ""
    taken, kept = 0, 0
    for one in words:
        taken += cells(one)
        if taken > room - 1:
            break
        kept += 1
    return f"{words[:kept]}…"


def quantity(count: int, noun: str) -> str:
    """1 worker, 2,000 workers, 3 processes"""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def _is_number(cell: str) -> bool:
    try:
        float(cell.rstrip("%x").replace(",", ""))
    except ValueError:
        return False
    return True


# Sizes as people read them.


GIB = 1 << 30


def gib(size: float) -> str:
    """41.2 GiB; small ones in MiB."""
    return f"{size / GIB:.1f} GiB" if abs(size) >= GIB / 2 else f"{size / (1 << 20):.0f} MiB"
