"""The logs of engines, as the supervisor writes them: a file per instance, and the older half of it as `.1`."""

import os
from collections.abc import Container
from pathlib import Path

from pointsman.errors import PointsmanError

FOLDER = "logs"
OURS = "[pointsman] "
"""Prefix of the supervisor's own lines."""
PIECE = 64 * 1024
MAX_REASON = 300
"""Characters of a last line that is quoted."""
MAX_LOGS = 100
"""Of instances that are gone; older ones are removed."""


def log_file(state: Path, instance_id: str) -> Path:
    """The log file of an instance."""
    if "/" in instance_id or "\0" in instance_id or instance_id.startswith("."):
        raise PointsmanError(f"{instance_id!r} is not the name of an instance")
    return state / FOLDER / f"{instance_id}.log"


def tail(file: Path, lines: int) -> str:
    """The last lines of a log, across its two files; empty if there is none."""
    text = _end_of(file, lines)
    missing = lines - len(text)
    if missing > 0:
        text = _end_of(file.with_name(f"{file.name}.1"), missing) + text
    return "".join(f"{line}\n" for line in text)


def last_line(file: Path) -> str:
    """The last line that a process wrote since it was last started; empty if it wrote none."""
    for line in reversed(_end_of(file, 50)):
        if line.startswith(OURS):
            if " started as process " in line:
                return ""
        elif line.strip():
            text = line.strip()
            return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
    return ""


def prune(state: Path, known: Container[str]) -> None:
    """Remove the oldest logs of instances that are not `known`."""
    logs = [file for file in (state / FOLDER).glob("*.log") if file.stem not in known]
    logs.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    for file in logs[MAX_LOGS:]:
        file.unlink(missing_ok=True)
        file.with_name(f"{file.name}.1").unlink(missing_ok=True)


def _end_of(file: Path, lines: int) -> list[str]:
    """The last lines of a file, read from its end."""
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
