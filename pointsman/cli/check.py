"""`pointsman check`: find mistakes in files and policies before they go live."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pointsman.cli.manifest import as_json
from pointsman.cli.options import add_command, at_least_one, json_object

CONFIG_EXAMPLE = """\
examples:
  pointsman check config examples/smollm2.yaml
  pointsman check config *.yaml --json
"""

POLICY_EXAMPLE = """\
examples:
  pointsman check policy slo-aware
  pointsman check policy mymodule:MyPolicy --parameters '{"limit": 3}'
  pointsman check policy mymodule:MyScorer --json
  pointsman check policy mymodule:business_hours
  pointsman check policy budget --parameters '{"perHour": 9, "costPerReplicaHour": 2.5, "policy": {"policy": "panic"}}'
"""


def add(commands: Any) -> None:
    group = commands.add_parser("check", help="find mistakes before they go live")
    subjects = group.add_subparsers(title="what to check", metavar="WHAT", required=True)
    _add_config(subjects)
    _add_policy(subjects)


def _add_config(commands: Any) -> None:
    parser = add_command(
        commands,
        "config",
        summary="check configuration files",
        description="Load each file without starting anything. Print every problem with its line, or a summary and "
        "what is accepted without effect.",
        example=CONFIG_EXAMPLE,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="EndpointPickerConfig or Pointsman YAML")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON: one object per file")
    form.add_argument("--markdown", action="store_true", help="print a table: one row per problem or warning")
    parser.set_defaults(run=_run_config)


def _run_config(args: argparse.Namespace) -> int:
    """Returns 1 if any file has a problem."""
    reports = [_report(file) for file in args.files]
    if args.json:
        print(json.dumps(reports, indent=2, ensure_ascii=False))
    elif args.markdown:
        print(_table(reports))
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
    return {"file": str(file), "ok": True, "builds": plan.summary(), "warnings": as_json(plan.warnings)}


def _table(reports: list[dict[str, Any]]) -> str:
    lines = ["| document | loads | line | field | what |", "|---|---|---|---|---|"]
    for report in reports:
        found, loads = report.get("warnings", report.get("problems", [])), "yes" if report["ok"] else "no"
        cells = [(str(one["line"]), f"`{one['field']}`", one["message"]) for one in found]
        lines += [
            f"| `{Path(report['file']).name}` | {loads} | {' | '.join(each)} |" for each in cells or [("", "", "")]
        ]
    return "\n".join(lines)


def _print(report: dict[str, Any]) -> None:
    from pointsman.config import ConfigWarning, Problem

    if report["ok"]:
        print(f"{report['file']}: ok: {report['builds']}")
        for warning in report["warnings"]:
            print(ConfigWarning(**warning))
        return
    problems = [Problem(**problem) for problem in report["problems"]]
    for problem in problems:
        print(problem, file=sys.stderr)
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    print(f"{report['file']}: {count}", file=sys.stderr)


def _add_policy(commands: Any) -> None:
    parser = add_command(
        commands,
        "policy",
        summary="check a policy or plugin of your own",
        description="""\
Try a policy or plugin, and show the promises that it breaks, each with a small example.

A scheduling policy, filter, scorer, picker or profile handler is tried in generated situations: no instances, all full,
other models, duplicates, large batches, missing metrics.

A scaling policy, which may be a plain function, is tried on generated views and on constant loads: whether it flaps,
always wants more or more than max, is slow, or writes too much into view.state. It is called for a whole application if
it is annotated with ApplicationView; without annotations, if it reads view.deployments or returns a mapping.

It runs in its own process. If a call has not returned after 5 s, the process is ended, the report shows where it
was, and another process continues without that case. Its output goes to standard error.""",
        example=POLICY_EXAMPLE,
    )
    parser.add_argument("name", help="built in, or package.module:Name")
    parser.add_argument("--parameters", type=json_object, default={}, metavar="JSON", help="its parameters")
    parser.add_argument(
        "--examples", type=at_least_one, default=200, metavar="N", help="cases per promise (default 200)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run_policy)


def _run_policy(args: argparse.Namespace) -> int:
    """Returns 1 if a promise is broken."""
    import msgspec

    from pointsman.lab.check.subprocess_runner import check_in_subprocess

    report = check_in_subprocess(args.name, args.parameters, args.examples)
    print(json.dumps(msgspec.to_builtins(report), indent=2) if args.json else report)
    return 0 if report.ok else 1
