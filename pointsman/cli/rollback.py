"""`pointsman rollback APP`: return to the previous version of an application."""

import argparse
from typing import Any

from pointsman.cli.deploy import add_waiting, follow
from pointsman.cli.manifest import add_yes, confirmed
from pointsman.cli.options import add_command, add_connection

EXAMPLE = """\
example:
  pointsman rollback diamond
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "rollback",
        summary="return to the previous version of an application",
        description="Deploy the version before the current one. A second rollback returns to the one before that. Only "
        "the nodes that differ are replaced.",
        example=EXAMPLE,
    )
    parser.add_argument("application", metavar="APP")
    add_yes(parser)
    add_waiting(parser)
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """1 if a node is not ready in time."""
    from pointsman.cli.client import client_of

    client = client_of(args)
    path = ("applications", args.application, "rollback")
    answer = confirmed(lambda said: client.post(*path, body={"confirmation": said}), args)
    return follow(client, args.application, answer, args)
