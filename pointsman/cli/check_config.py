"""`pointsman check config FILE...`: all problems of configuration files, or what they would build."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pointsman.cli.options import add_command

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
    parser.set_defaults(_run_config=_run_config)


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
