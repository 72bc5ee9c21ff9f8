"""`pointsman scale DEPLOYMENT`: overrides the number of replicas that the scaling policy decides."""

import argparse
import json
from typing import Any

from pointsman.cli.options import WrongUsage, add_command, add_connection, at_least_zero, time_span

EXAMPLE = """\
A node of an application is APP/NODE.

examples:
  pointsman scale chat --replicas 4
  pointsman scale chat --replicas 0 --for 2h
  pointsman scale diamond/encode --auto
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "scale",
        summary="set how many instances a deployment has",
        description="Override the scaling policy of a deployment, for a time or until further notice; --auto lets the "
        "policy decide again. Surplus instances are drained: no request is cut off. The deployment needs a scaling "
        "section, and its min and max apply.",
        example=EXAMPLE,
    )
    parser.add_argument("deployment", metavar="DEPLOYMENT")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--replicas", type=at_least_zero, metavar="N", help="number of instances")
    how.add_argument("--auto", action="store_true", help="let the policy decide")
    parser.add_argument(
        "--for", dest="for_s", type=time_span, metavar="TIME", help="how long: 30s, 5m, 2h (default: until --auto)"
    )
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return once the plane has accepted the order."""
    from pointsman.cli.client import client_of
    from pointsman.cli.display import duration
    from pointsman.errors import command

    if args.auto and args.for_s is not None:
        raise WrongUsage("--for goes with --replicas, not with --auto")
    wanted = {"replicas": args.replicas, "for_s": args.for_s, "by": "pointsman scale"}
    answer = client_of(args).post("deployments", args.deployment, "scale", body=wanted)
    if args.json:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    elif args.auto:
        print(f"{answer['deployment']}: {answer['policy']} decides; the target is now {answer['desired']}")
    else:
        name = answer["deployment"]
        until = f"for {duration(args.for_s)}" if args.for_s is not None else "until further notice"
        print(f"{name}: target {answer['desired']}, {until}; see: {command('status')}")
        print(f"to let {answer['policy']} decide again: {command('scale', name, '--auto')}")
    return 0
