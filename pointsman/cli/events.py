"""`pointsman events`: what has changed, when and why."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from pointsman.cli.options import add_command, add_connection, at_least_one

EXAMPLE = """\
examples:
  pointsman events
  pointsman events -f
  pointsman events --deployment chat -n 50 --json
"""
KINDS = {
    "instances": "phase-changed",
    "documents": "documents-changed",
    "targets": "target-changed",
    "operations": "operation",
}
"""The kinds that `--only` takes, and the codes of their events."""
ALL = 2_000
"""Number of events that a plane keeps."""
WAIT_S = 20
"""Maximum time that a request waits for the next event. It must be shorter than the client's time limit."""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "events",
        summary="what has changed, when and why",
        description="List changes of instances, documents and replica targets, and what operators asked for; oldest "
        "first, also those of an earlier run of the plane.",
        example=EXAMPLE,
    )
    parser.add_argument("--deployment", metavar="NAME", help="only events of this deployment")
    parser.add_argument("--only", choices=KINDS, help="only events of this kind")
    parser.add_argument("-f", "--follow", action="store_true", help="print further events as they happen, until Ctrl-C")
    parser.add_argument(
        "-n", "--limit", type=at_least_one, default=20, metavar="N", help="maximum number of past events (default 20)"
    )
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pointsman.cli.client import client_of

    client = client_of(args)
    found = client.get("events", deployment=args.deployment, limit=ALL if args.only else args.limit)["events"]
    _show(_wanted(found, args)[-args.limit :], args)
    while args.follow:
        last = found[-1]["number"] if found else 0
        found = client.get("events", deployment=args.deployment, after=last, wait=WAIT_S)["events"] or found
        _show(_wanted([one for one in found if one["number"] > last], args), args)
    return 0


def _wanted(events: list[Mapping[str, Any]], args: argparse.Namespace) -> list[Mapping[str, Any]]:
    return [one for one in events if args.only is None or one["code"] == KINDS[args.only]]


def _show(events: list[Mapping[str, Any]], args: argparse.Namespace) -> None:
    from datetime import datetime

    for one in events:
        by = f" (by {one['by']}{', key ' + one['key'] if one['key'] else ''})" if one["by"] else ""
        about = f"{one['deployment']}: " if one["deployment"] else ""
        at = f"{datetime.fromisoformat(one['at']).astimezone():%Y-%m-%d %H:%M:%S}"
        print(json.dumps(one, ensure_ascii=False) if args.json else f"{at}  {about}{one['text']}{by}", flush=True)
