"""`pointsman check`: everything that can be found out before it goes live."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pointsman.cli.options import add_command, at_least_one, json_object

# `pointsman check config FILE...`: all problems of configuration files, or what they would build.


CONFIG_EXAMPLE = """\
examples:
  pointsman check config examples/smollm2.yaml
  pointsman check config *.yaml --json
"""


def _add_config(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "config",
        summary="check configuration files",
        description="Load each file without starting anything. Prints every problem with its line, or a summary.",
        example=CONFIG_EXAMPLE,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="EndpointPickerConfig or Pointsman YAML")
    parser.add_argument("--json", action="store_true", help="print JSON: one object per file")
    parser.set_defaults(run=_run_config)


def _run_config(args: argparse.Namespace) -> int:
    """1 if any file has a problem."""
    reports = [_report(file) for file in args.files]
    if args.json:
        print(json.dumps(reports, indent=2, ensure_ascii=False))
    else:
        for report in reports:
            _print(report)
    return 0 if all(report["ok"] for report in reports) else 1


def _report(file: Path) -> dict[str, Any]:
    import msgspec

    from pointsman.config import load
    from pointsman.errors import ConfigError

    try:
        plan = load(file)
    except ConfigError as error:
        return {"file": str(file), "ok": False, "problems": msgspec.to_builtins(error.problems)}
    return {"file": str(file), "ok": True, "builds": plan.summary(), "notes": list(plan.notes)}


def _print(report: dict[str, Any]) -> None:
    from pointsman.config import Problem

    if report["ok"]:
        print(f"{report['file']}: ok: {report['builds']}")
        for note in report["notes"]:
            print(f"{report['file']}: note: {note}")
        return
    problems = [Problem(**problem) for problem in report["problems"]]
    for problem in problems:
        print(problem, file=sys.stderr)
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    print(f"{report['file']}: {count}; nothing of it was applied", file=sys.stderr)


# `pointsman check policy NAME`: generated situations look for promises that it breaks.


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
    parser.set_defaults(run=_run_policy)


def _run_policy(args: argparse.Namespace) -> int:
    """1 if a promise is broken."""
    import msgspec

    from pointsman.lab.check.subprocess_runner import check_in_subprocess

    report = check_in_subprocess(args.name, args.parameters, args.examples)
    print(json.dumps(msgspec.to_builtins(report), indent=2) if args.json else report)
    return 0 if report.ok else 1


def add(commands: Any) -> None:
    """Add the group and its commands."""
    group = commands.add_parser("check", help="find mistakes before they go live")
    subjects = group.add_subparsers(title="what to check", metavar="WHAT", required=True)
    _add_config(subjects)
    _add_policy(subjects)
