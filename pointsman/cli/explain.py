"""`pointsman explain`: why a request went to its instance, or why a deployment has its number of instances."""

import argparse
import json
from typing import Any

from pointsman.cli.options import WrongUsage, add_command, add_connection

DEPLOYMENT = "deployment"

EXAMPLE = """\
The id of a request is in the header x-request-id of its answer; pointsman requests lists ids.

examples:
  pointsman explain
  pointsman explain req-1f2e3d4c-1 --json
  pointsman explain deployment chat
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "explain",
        summary="why a request went to its instance, or a deployment has its number of instances",
        description="Show the decision about a request: the candidates, the reason for each rejected one, every score "
        "and weight, what was expected and what happened. For a scaled deployment (or a node, as APP/NODE), show the "
        "changes of its target, what decided them, and from which numbers.",
        example=EXAMPLE,
    )
    parser.add_argument("request", nargs="?", metavar="REQUEST_ID | deployment", help="default: the newest request")
    parser.add_argument("deployment", nargs="?", metavar="NAME", help="the deployment, after the word deployment")
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pointsman.cli.client import client_of
    from pointsman.cli.display import scaling_text
    from pointsman.errors import PointsmanError, command

    if args.deployment is not None:
        if args.request != DEPLOYMENT:
            raise WrongUsage(f"name one request, or use: {command('explain', DEPLOYMENT, args.deployment)}")
        scaling = client_of(args).get("deployments", args.deployment, "scaling")
        print(json.dumps(scaling, indent=2, ensure_ascii=False) if args.json else scaling_text(scaling))
        return 0
    if args.request == DEPLOYMENT:
        raise WrongUsage(f"explain {DEPLOYMENT} NAME: NAME is missing; to list deployments: {command('status')}")
    client, request_id = client_of(args), args.request
    if request_id is None:
        newest = client.get("requests", limit=1)["requests"]
        if not newest:
            raise PointsmanError("there is no request to explain: none has arrived yet")
        request_id = newest[0]["request_id"]
    record = client.get("requests", request_id)
    print(json.dumps(record, indent=2, ensure_ascii=False) if args.json else record["text"])
    return 0
