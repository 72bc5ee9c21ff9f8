"""The small files through which Linux tells what it knows."""

from pathlib import Path


def text(path: Path) -> str:
    """What a file says, without blanks around it; empty: it is not there, or not for us."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """A whole number, also as 0x1002; None: there is none."""
    try:
        return int(text(path), 0)
    except ValueError:
        return None


def kib(path: Path, name: str) -> int | None:
    """The bytes of a line such as "MemAvailable: 1024 kB"; None: there is no such line."""
    for line in text(path).splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if key == name and words and words[0].isdecimal():
            return int(words[0]) * 1024
    return None
