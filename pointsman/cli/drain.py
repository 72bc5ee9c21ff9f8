"""`pointsman drain INSTANCE`: takes an instance out of service and replaces it."""

import argparse
import json
from typing import Any

from pointsman.cli.options import add_command, add_connection

EXAMPLE = """\
example:
  pointsman drain chat-1
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "drain",
        summary="take an instance out of service and replace it",
        description="Send an instance no more requests, let those in flight end, then stop it. Another instance takes "
        "its place, because the manifest wants the same number as before.",
        example=EXAMPLE,
    )
    parser.add_argument("instance", metavar="INSTANCE")
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return once the plane has accepted the order to drain the instance."""
    from pointsman.cli.client import client_of
    from pointsman.errors import command

    answer = client_of(args).post("instances", args.instance, "drain")
    if args.json:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        print(f"{args.instance} is being drained and replaced; see: {command('status')}")
    return 0
