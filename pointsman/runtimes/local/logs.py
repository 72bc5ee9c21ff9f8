"""What engines write, as the supervisor keeps it: a file per instance, and the older half beside it as `.1`."""

import os
from collections.abc import Container
from pathlib import Path

from pointsman.errors import PointsmanError

FOLDER = "logs"
OURS = "[pointsman] "
"""Begins the supervisor's own lines."""
PIECE = 64 * 1024
LONGEST_WORDS = 300
KEPT = 100
"""Logs of instances that are gone."""


def log_file(state: Path, instance_id: str) -> Path:
    """Where the output of an instance goes."""
    if "/" in instance_id or "\0" in instance_id or instance_id.startswith("."):
        raise PointsmanError(f"{instance_id!r} is not the name of an instance")
    return state / FOLDER / f"{instance_id}.log"


def tail(file: Path, lines: int) -> str:
    """The last lines of a log, across its two files; empty: there is none."""
    text = _end_of(file, lines)
    missing = lines - len(text)
    if missing > 0:
        text = _end_of(file.with_name(f"{file.name}.1"), missing) + text
    return "".join(f"{line}\n" for line in text)


def last_words(file: Path) -> str:
    """The last line that a process wrote in its last life; empty: it wrote nothing."""
    for line in reversed(_end_of(file, 50)):
        if line.startswith(OURS):
            if " started as process " in line:
                return ""
        elif line.strip():
            words = line.strip()
            return words if len(words) <= LONGEST_WORDS else f"{words[:LONGEST_WORDS]}..."
    return ""


def prune(state: Path, known: Container[str]) -> None:
    """Of instances that are not there any more, keep the newest logs only."""
    logs = [file for file in (state / FOLDER).glob("*.log") if file.stem not in known]
    logs.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    for file in logs[KEPT:]:
        file.unlink(missing_ok=True)
        file.with_name(f"{file.name}.1").unlink(missing_ok=True)


def _end_of(file: Path, lines: int) -> list[str]:
    """Its last lines, reading no more than that takes."""
    if lines <= 0:
        return []
    try:
        with file.open("rb") as log:
            place = log.seek(0, os.SEEK_END)
            found = b""
            while place and found.count(b"\n") <= lines:
                size = min(PIECE, place)
                place -= size
                log.seek(place)
                found = log.read(size) + found
    except OSError:
        return []
    # Not splitlines: progress bars write \r and other separators within a line.
    return found.decode("utf-8", "replace").removesuffix("\n").split("\n")[-lines:] if found else []
