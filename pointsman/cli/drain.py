"""`pointsman drain INSTANCE`: take an instance out of service and have it replaced."""

import argparse
import json
from typing import Any

from pointsman.cli.options import add_command, add_connection

EXAMPLE = """\
example:
  pointsman drain chat-1
"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "drain",
        summary="take an instance out of service and replace it",
        description="Send an instance no more requests, let those under way end, then stop it. Another takes its "
        "place, as the manifest wants as many as before.",
        example=EXAMPLE,
    )
    parser.add_argument("instance", metavar="INSTANCE")
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask for it; pointsman status shows how it goes."""
    from pointsman.cli.client import client_of

    answer = client_of(args).post("instances", args.instance, "drain")
    if args.json:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        print(f"{args.instance} is drained and replaced; pointsman status shows how it goes")
    return 0
