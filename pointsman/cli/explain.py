"""`pointsman explain REQUEST_ID`: why a request went where it went; or why there are so many of a deployment."""

import argparse
import json
from typing import Any

from pointsman.cli.options import add_command, add_connection

DEPLOYMENT = "deployment"

EXAMPLE = """\
The id of a request is in the header x-request-id of its answer; pointsman requests lists them.

examples:
  pointsman explain req-1f2e3d4c-1
  pointsman explain req-1f2e3d4c-1 --json
  pointsman explain deployment chat
"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "explain",
        summary="why a request went where it went, or how many instances there are",
        description="Show what was decided about a request and why: the candidates, who was turned away for what "
        "reason, every score and weight, what was expected and what happened. Of a deployment that is scaled (or of a "
        "node, as APP/NODE): how many instances there were to be when, who decided it, from which numbers.",
        example=EXAMPLE,
    )
    parser.add_argument("request", metavar="REQUEST_ID | deployment")
    parser.add_argument("deployment", nargs="?", metavar="NAME", help="after the word deployment: which")
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the record."""
    from pointsman.cli.client import client_of
    from pointsman.cli.display import scaling_text
    from pointsman.errors import PointsmanError

    if args.deployment is not None:
        if args.request != DEPLOYMENT:
            raise PointsmanError(f'explain one request, or: pointsman explain {DEPLOYMENT} "{args.deployment}"')
        told = client_of(args).get("deployments", args.deployment, "scaling")
        print(json.dumps(told, indent=2, ensure_ascii=False) if args.json else scaling_text(told))
        return 0
    if args.request == DEPLOYMENT:
        raise PointsmanError(f"explain {DEPLOYMENT} NAME: which one is missing; pointsman status lists them")
    record = client_of(args).get("requests", args.request)
    print(json.dumps(record, indent=2, ensure_ascii=False) if args.json else record["text"])
    return 0
