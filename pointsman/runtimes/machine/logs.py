"""The logs of engines, which the supervisor writes: a file per instance, and another file (`.1`) with older output."""

import os
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from pointsman.errors import PointsmanError, shown

FOLDER = "logs"
OURS = "[pointsman] "
"""Prefix of the supervisor's own lines."""
PIECE = 64 * 1024
MAX_REASON = 300
"""Maximum number of characters of a last line to quote."""
MAX_LINES = 2000
"""Lines of a failed start that the adapter searches: the usage text of a server may be long."""
MAX_LOGS = 100
"""Maximum logs of removed instances; older ones are deleted."""


def log_file(state: Path, instance_id: str) -> Path:
    if "/" in instance_id or "\0" in instance_id or instance_id.startswith("."):
        raise PointsmanError(f'"{shown(instance_id)}" is not the name of an instance')
    return state / FOLDER / f"{instance_id}.log"


def find_log(state: Path, instance_id: str) -> Path | None:
    """The log of an instance; None if it has no log."""
    try:
        file = log_file(state, instance_id)
        return file if file.exists() else None
    except (PointsmanError, OSError):  # not the name of an instance, or too long for a file
        return None


def tail(file: Path, lines: int) -> str:
    """The last lines of a log, across its two files; empty if there is no log."""
    text = _end_of(file, lines)
    missing = lines - len(text)
    if missing > 0:
        text = _end_of(file.with_name(f"{file.name}.1"), missing) + text
    return "".join(f"{line}\n" for line in text)


def written(file: Path, lines: int = 1, among: int = 50) -> list[str]:
    """The last lines that a process wrote since it was last started, without empty ones."""
    found: list[str] = []
    for line in reversed(_end_of(file, among)):
        if line.startswith(OURS):
            if " started as process " in line:
                break
        elif line.strip():
            text = line.strip()
            found.append(text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}...")
            if len(found) == lines:
                break
    return found[::-1]


def last_line(file: Path) -> str:
    """The last line that a process wrote since it was last started; empty if it wrote no line."""
    return next(iter(written(file)), "")


def prune(state: Path, known: Container[str]) -> None:
    """Remove the oldest logs of instances that are not `known`, as far as the disk permits."""
    logs: list[tuple[float, Path]] = []
    with suppress(OSError):
        found = [file for file in (state / FOLDER).glob("*.log") if file.stem not in known]
        logs = [(file.stat().st_mtime, file) for file in found]
    for _, file in sorted(logs, reverse=True)[MAX_LOGS:]:
        with suppress(OSError):
            file.with_name(f"{file.name}.1").unlink(missing_ok=True)
            file.unlink(missing_ok=True)


def _end_of(file: Path, lines: int) -> list[str]:
    if lines <= 0:
        return []
    try:
        with file.open("rb") as log:
            offset = log.seek(0, os.SEEK_END)
            found = b""
            while offset and found.count(b"\n") <= lines:
                size = min(PIECE, offset)
                offset -= size
                log.seek(offset)
                found = log.read(size) + found
    except OSError:
        return []
    # Not splitlines: progress bars write \r and other separators within a line.
    return found.decode("utf-8", "replace").removesuffix("\n").split("\n")[-lines:] if found else []
