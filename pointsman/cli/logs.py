"""`pointsman logs INSTANCE`: what an engine's process has said."""

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

EVERY_S = 0.5
FOLLOWED_LINES = 1000
"""So many of the last lines are compared with those before; more than that at once are not all seen."""


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "logs",
        summary="what an instance's process has said",
        description="Show the end of the log of an instance that the plane has started.",
        example=EXAMPLE,
    )
    parser.add_argument("instance", metavar="INSTANCE")
    parser.add_argument("-n", "--lines", type=at_least_one, default=100, metavar="N", help="the last N lines (100)")
    parser.add_argument("-f", "--follow", action="store_true", help="and what it says from now on, until Ctrl-C")
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the lines."""
    from pointsman.cli.client import client_of

    client = client_of(args)
    most = max(args.lines, FOLLOWED_LINES) if args.follow else args.lines
    answer = client.get("instances", args.instance, "logs", lines=most)
    if args.json and not args.follow:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
        return 0
    seen = _lines(answer)
    _print(seen[-args.lines :], args)
    while args.follow:
        time.sleep(EVERY_S)
        lines = _lines(client.get("instances", args.instance, "logs", lines=most))
        _print(new_lines(seen, lines), args)
        seen = lines
    return 0


def _lines(answer: dict[str, str]) -> list[str]:
    """Not splitlines: progress bars write \\r within a line."""
    text = answer["text"].removesuffix("\n")
    return text.split("\n") if text else []


def new_lines(before: Sequence[str], after: Sequence[str]) -> Sequence[str]:
    """What was said between two looks at the end of a log. If they have nothing in common, all of it."""
    for gone in range(len(before)):
        kept = len(before) - gone
        if before[gone:] == after[:kept]:
            return after[kept:]
    return after


def _print(lines: Sequence[str], args: argparse.Namespace) -> None:
    for line in lines:
        print(json.dumps({"instance": args.instance, "line": line}, ensure_ascii=False) if args.json else line)
    print(end="", flush=True)
