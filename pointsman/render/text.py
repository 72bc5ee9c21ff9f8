"""Tables and lines for a terminal."""

from collections.abc import Sequence
from unicodedata import combining, east_asian_width


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns, numbers to the right, and a rule under the head."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    numeric = [
        bool(rows) and all(_is_number(row[index]) or not row[index] for row in rows) for index in range(len(heads))
    ]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(heads), line(["-" * width for width in widths]), *map(line, rows)])


def one_line(text: str, limit: int) -> str:
    """Foreign text on one line of at most `limit` characters, without line breaks and control characters."""
    start = text[: 4 * limit]  # it may have megabytes
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in start).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def cells(text: str) -> int:
    """The width of a text, in columns of a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(one) else 2 if east_asian_width(one) in "WF" else 1 for one in text)


def cut(text: str, room: int) -> str:
    """The text cut to `room` columns; empty if less than 4 are left."""
    if cells(text) <= room:
        return text
    if room < 4:
        return ""
    taken, kept = 0, 0
    for one in text:
        taken += cells(one)
        if taken > room - 1:
            break
        kept += 1
    return f"{text[:kept]}…"


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


def gib(size: float) -> str:
    """41.2 GiB; small ones in MiB."""
    return f"{size / 2**30:.1f} GiB" if abs(size) >= 2**29 else f"{size / 2**20:.0f} MiB"
