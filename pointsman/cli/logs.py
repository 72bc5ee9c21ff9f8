"""`pointsman logs INSTANCE`: the output of an engine's process."""

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from pointsman.cli.options import add_command, add_connection, at_least_one

EXAMPLE = """\
examples:
  pointsman logs chat-1
  pointsman logs chat-1 -n 20 -f
"""

POLL_S = 0.5
FOLLOWED_LINES = 1000
"""Number of lines that each poll reads. If more lines were written since the last poll, some are missed."""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "logs",
        summary="show the output of an instance's process",
        description="Show the end of the log of an instance that the plane has started.",
        example=EXAMPLE,
    )
    parser.add_argument("instance", metavar="INSTANCE")
    parser.add_argument(
        "-n", "--lines", type=at_least_one, default=100, metavar="N", help="the last N lines (default 100)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing new lines, until Ctrl-C")
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pointsman.cli.client import client_of

    client = client_of(args)
    lines = max(args.lines, FOLLOWED_LINES) if args.follow else args.lines
    answer = client.get("instances", args.instance, "logs", lines=lines)
    if args.json and not args.follow:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
        return 0
    seen = lines_of(answer)
    _print(seen[-args.lines :], args)
    while args.follow:
        time.sleep(POLL_S)
        now = lines_of(client.get("instances", args.instance, "logs", lines=lines))
        _print(new_lines(seen, now), args)
        seen = now
    return 0


def lines_of(answer: dict[str, str]) -> list[str]:
    """The lines of a log. This does not use splitlines, because progress bars write \\r within a line."""
    text = answer["text"].removesuffix("\n")
    return text.split("\n") if text else []


def new_lines(before: Sequence[str], after: Sequence[str]) -> Sequence[str]:
    """The lines written between two readings of the end of a log.

    If the readings do not overlap, these are all lines of the second reading.
    """
    for gone in range(len(before)):
        kept = len(before) - gone
        if before[gone:] == after[:kept]:
            return after[kept:]
    return after


def _print(lines: Sequence[str], args: argparse.Namespace) -> None:
    for line in lines:
        print(json.dumps({"instance": args.instance, "line": line}, ensure_ascii=False) if args.json else line)
    print(end="", flush=True)
