"""`pointsman shadow [DEPLOYMENT]`: what the candidates of deployments would have done."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from pointsman.cli.options import add_command, add_connection
from pointsman.errors import command

EXAMPLE = """\
examples:
  pointsman shadow
  pointsman shadow chat --json
"""
HEADS = ("candidate", "decided", "agrees", "ttft mean", "ttft p90", "in force p90", "cost", "errors", "state")
DIFFERENCES = ("request", "sent to", "candidate", "expected gain", "took")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "shadow",
        summary="what candidate policies would have done with live requests",
        description="Show, for each candidate of scheduling.shadow, how often it agrees with the policy in force, the "
        "expected time to the first token and cost of its choices, and the requests where it differs most. "
        "Expectations are scaled by the measured results of the policy in force on the same requests.",
        example=EXAMPLE,
    )
    parser.add_argument("deployment", metavar="DEPLOYMENT", nargs="?", help="default: all that have candidates")
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pointsman.cli.client import client_of
    from pointsman.cli.display import promotion_text

    told = client_of(args).get("shadow", deployment=args.deployment)
    if args.json:
        print(json.dumps(told, indent=2, ensure_ascii=False))
        return 0
    parts = [_deployment_text(one) for one in told["deployments"]]
    parts += [promotion_text(one) for one in told["promotions"][:5] if args.deployment in (None, one["deployment"])]
    which = "this deployment has" if args.deployment else "no deployment has"
    none = f"{which} {'no ' if args.deployment else ''}candidates; list some under scheduling.shadow of a deployment"
    print("\n\n".join(parts) or none)
    return 0


def _deployment_text(one: Mapping[str, Any]) -> str:
    from pointsman.render.text import text_table

    sampled = _percent(one["sampled_share"])
    head = (
        f"{one['deployment']}: {one['in_force']} is in force; {one['sampled']} of {one['decisions']} decisions sampled "
        f"({sampled}), for {_percent(one['cpu_share'])} of their time (budget {_percent(one['budget'])})"
    )
    lines = [head, "", text_table(HEADS, [_row(each) for each in one["candidates"]])]
    for each in one["candidates"]:
        if each["own_state"]:
            lines.append(f"{each['name']} keeps state, which only sampled requests update")
        if each["differences"]:
            rows = [
                [
                    item["request_id"],
                    item["instance"],
                    item["candidate_instance"],
                    _ms(item["gain_ms"]),
                    _ms(item["actual_ms"]),
                ]
                for item in each["differences"]
            ]
            lines += ["", f"where {each['name']} differs most (see: {command('explain', 'REQUEST')}):"]
            lines.append(text_table(DIFFERENCES, rows))
    return "\n".join(lines)


def _row(each: Mapping[str, Any]) -> list[str]:
    theirs, actual = each["ttft_ms"] or {}, each["in_force_ttft_ms"] or {}
    suspended = each["suspended_s"]
    state = f"suspended for {suspended:g} s: {each['problem']}" if suspended else each["problem"] or "ok"
    cost = "-" if each["cost"] is None else f"{each['cost'] / (each['in_force_cost'] or 1) - 1:+.1%}"
    return [
        each["name"],
        str(each["decided"]),
        _percent(each["agreement"]),
        _ms(theirs.get("mean")),
        _ms(theirs.get("p90")),
        _ms(actual.get("p90")),
        cost,
        str(each["errors"]),
        state,
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"
