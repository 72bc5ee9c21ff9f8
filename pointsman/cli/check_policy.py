"""`pointsman check policy NAME`: generated situations look for promises that it breaks."""

import argparse
import json
from typing import Any

from pointsman.cli.options import add_command, at_least_one, json_object

POLICY_EXAMPLE = """\
examples:
  pointsman check policy slo-aware
  pointsman check policy mymodule:MyPolicy --parameters '{"limit": 3}'
  pointsman check policy mymodule:MyScorer --json
  pointsman check policy mymodule:business_hours
  pointsman check policy budget --parameters '{"perHour": 9, "costPerReplicaHour": 2.5, "policy": {"policy": "panic"}}'
"""


def _add_policy(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "policy",
        summary="check a policy or plugin of your own",
        description="""\
Try a policy or plugin, and say which promise it breaks, with the smallest example.

A scheduling policy, filter, scorer, picker or profile handler is tried in generated situations: no instances, all full,
other models, duplicates, huge batches, missing metrics.

A scaling policy, also a plain function, is tried on generated views and on loads that stay the same: whether it flaps,
wants ever more or more than max, is slow, or writes too much into view.state. It is asked for a whole application if it
is annotated with ApplicationView; without annotations, if it looks for view.deployments or returns a mapping.

It runs in a process of its own. If it has not answered after 5 s, it is ended, and the report says where it was. What
it prints goes to standard error.""",
        example=POLICY_EXAMPLE,
    )
    parser.add_argument("name", help="package.module:Name, or the name of a built-in one")
    parser.add_argument("--parameters", type=json_object, default={}, metavar="JSON", help="what to build it with")
    parser.add_argument("--examples", type=at_least_one, default=200, metavar="N", help="situations per promise (200)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(_run_policy=_run_policy)


def _run_policy(args: argparse.Namespace) -> int:
    """1 if a promise is broken."""
    import msgspec

    from pointsman.lab.check.apart import check_apart

    report = check_apart(args.name, args.parameters, args.examples)
    print(json.dumps(msgspec.to_builtins(report), indent=2) if args.json else report)
    return 0 if report.ok else 1
