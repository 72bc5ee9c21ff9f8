"""`pointsman explain REQUEST_ID`: why a request went where it went."""

import argparse
import json
from typing import Any

from pointsman.cli.options import add_command, add_connection

EXAMPLE = """\
The id of a request is in the header x-request-id of its answer; pointsman requests lists them.

examples:
  pointsman explain req-1f2e3d4c-1
  pointsman explain req-1f2e3d4c-1 --json
"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "explain",
        summary="why a request went where it went",
        description="Show what was decided about a request and why: the candidates, who was turned away for what "
        "reason, every score and weight, what was expected and what happened.",
        example=EXAMPLE,
    )
    parser.add_argument("request", metavar="REQUEST_ID")
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the record."""
    from pointsman.cli.client import client_of

    record = client_of(args).get("requests", args.request)
    print(json.dumps(record, indent=2, ensure_ascii=False) if args.json else record["text"])
    return 0
