"""`pointsman status`: what runs, its load, and what is wrong, for a plane or for one application."""

import argparse
import json
import sys
import time
from typing import Any

from pointsman.cli.options import add_command, add_connection

EXAMPLE = """\
examples:
  pointsman status
  pointsman status --watch
  pointsman status diamond
  pointsman status --json | jq '.deployments[].instances[] | select(.phase != "ready")'
"""

INTERVAL_S = 1.0


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "status",
        summary="what runs and how it is doing",
        description="Show the deployments and instances of a running plane, with the reason for everything that is not "
        "as configured. For an application, show its nodes with their replicas and calls.",
        example=EXAMPLE,
    )
    parser.add_argument("application", nargs="?", metavar="APP", help="only this application")
    parser.add_argument("--watch", action="store_true", help="show it again every second, until Ctrl-C")
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pointsman.cli.client import client_of

    client = client_of(args)
    path = ("applications", args.application) if args.application else ("status",)
    _show(client.get(*path), args)
    while args.watch:
        time.sleep(INTERVAL_S)
        _show(client.get(*path), args)
    return 0


def _show(status: dict[str, Any], args: argparse.Namespace) -> None:
    from pointsman.cli.display import Paint, application_text, status_text

    if args.json:
        print(json.dumps(status, indent=None if args.watch else 2, ensure_ascii=False), flush=True)
        return
    show = application_text if args.application else status_text
    text = show(status, Paint(sys.stdout))
    if args.watch and sys.stdout.isatty():
        text = f"\x1b[H\x1b[J{text}"  # clear the screen
    elif args.watch:
        text += "\n"
    print(text, flush=True)
