"""`pointsman deploy FILE`: put an application in force on a running plane."""

import argparse
from typing import Any

from pointsman.cli.manifest import add_file, read_manifest
from pointsman.cli.options import add_command, add_connection
from pointsman.cli.rollout import add_waiting, follow

EXAMPLE = """\
examples:
  pointsman build examples/diamond.py:dag -o deployment.yaml
  pointsman deploy deployment.yaml
  pointsman deploy deployment.yaml --wait 10m --json
"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "deploy",
        summary="put an application in force on a running plane",
        description="Touch only the nodes that differ, without dropping a request, and wait until all their replicas "
        "are ready, or until a new version has failed to start and the one before serves on. Deploying the same file "
        "twice does nothing.",
        example=EXAMPLE,
    )
    add_file(parser, "an application, as pointsman build writes it")
    add_waiting(parser)
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """1 if a node is not ready in time, or its rollout was stopped."""
    from pointsman.cli.client import NoPlane, client_of
    from pointsman.errors import PointsmanError

    document, plan = read_manifest(args.file)
    if not plan.application_alone:
        raise PointsmanError(f"{args.file} is a manifest; pointsman apply puts it in force")
    try:
        client = client_of(args)
        answer = client.post("applications", body=document)
    except NoPlane as nobody:
        if args.url:
            raise
        raise NoPlane(nobody.found, f"start one with it: pointsman up {args.file}") from None
    return follow(client, plan.applications[0].name, answer, args, plan.notes)
