"""`pointsman rollback APP`: back to the version of an application before the one in force."""

import argparse
from typing import Any

from pointsman.cli.deploy import add_waiting, follow
from pointsman.cli.options import add_command, add_connection

EXAMPLE = """\
example:
  pointsman rollback diamond
"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "rollback",
        summary="back to the version of an application before this one",
        description="Put the version in force that was deployed before the one that is; once more: the one before "
        "that. Only the nodes that differ are touched.",
        example=EXAMPLE,
    )
    parser.add_argument("application", metavar="APP")
    add_waiting(parser)
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """1 if a node is not ready in time."""
    from pointsman.cli.client import client_of

    client = client_of(args)
    answer = client.post("applications", args.application, "rollback")
    return follow(client, args.application, answer, args)
