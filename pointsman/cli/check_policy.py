"""`pointsman check policy NAME`: generated situations look for promises that it breaks."""

import argparse
import json
from typing import Any

from pointsman.cli.options import add_command, at_least_one

EXAMPLE = """\
examples:
  pointsman check policy slo-aware
  pointsman check policy mymodule:MyPolicy --parameters '{"limit": 3}'
  pointsman check policy mymodule:MyScorer --json
  pointsman check policy mymodule:business_hours
"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "policy",
        summary="check a policy or plugin of your own",
        description="Try a scheduling policy, filter, scorer, picker or profile handler in generated situations: no "
        "instances, all full, other models, duplicates, huge batches, missing metrics; or a scaling policy, also a "
        "plain function, on generated views and on a steady load. Says which promise it breaks, with the smallest "
        "example.",
        example=EXAMPLE,
    )
    parser.add_argument("name", help="package.module:Name, or the name of a built-in one")
    parser.add_argument("--parameters", type=_parameters, default={}, metavar="JSON", help="what to build it with")
    parser.add_argument("--examples", type=at_least_one, default=200, metavar="N", help="situations per promise (200)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _parameters(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object; write for example '{{\"limit\": 3}}'")
    return given


def run(args: argparse.Namespace) -> int:
    """1 if a promise is broken."""
    import msgspec

    from pointsman.config import build_named
    from pointsman.lab.check import check

    def build() -> Any:
        return build_named(args.name, args.parameters)

    report = check(build, args.examples)
    print(json.dumps(msgspec.to_builtins(report), indent=2) if args.json else report)
    return 0 if report.ok else 1
