"""`pointsman scale DEPLOYMENT`: so many instances, whatever the policy says; or as it says again."""

import argparse
import json
from typing import Any

from pointsman.cli.options import add_command, add_connection, at_least_zero, time_span

EXAMPLE = """\
A node of an application is APP/NODE.

examples:
  pointsman scale chat --replicas 4
  pointsman scale chat --replicas 0 --for 2h
  pointsman scale diamond/encode --auto
"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "scale",
        summary="set how many instances a deployment has",
        description="Have so many instances of a deployment, for a while or until further notice, whatever its scaling "
        "policy says; --auto lets the policy decide again. What is too much is drained: no request is cut off. The "
        "deployment needs a scaling section, and min and max of it hold.",
        example=EXAMPLE,
    )
    parser.add_argument("deployment", metavar="DEPLOYMENT")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--replicas", type=at_least_zero, metavar="N", help="so many")
    how.add_argument("--auto", action="store_true", help="as the policy says")
    parser.add_argument("--for", dest="for_s", type=time_span, metavar="TIME", help="for so long: 30s, 5m, 2h")
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask for it; pointsman status shows how it goes."""
    from pointsman.cli.client import client_of
    from pointsman.cli.display import duration
    from pointsman.errors import PointsmanError

    if args.auto and args.for_s is not None:
        raise PointsmanError("--for goes with --replicas")
    asked = {"replicas": args.replicas, "for_s": args.for_s, "by": "pointsman scale"}
    answer = client_of(args).post("deployments", args.deployment, "scale", body=asked)
    if args.json:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    elif args.auto:
        print(f"{answer['deployment']}: {answer['policy']} decides; the target is {answer['desired']} now")
    else:
        until = "until pointsman scale --auto" if args.for_s is None else f"for {duration(args.for_s)}"
        print(f"{answer['deployment']}: target {answer['desired']}, {until}; pointsman status shows how it goes")
    return 0
