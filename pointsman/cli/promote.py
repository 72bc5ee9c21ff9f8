"""`pointsman promote CANDIDATE`: try a candidate on a share of live requests, then keep it or go back."""

import argparse
import json
import sys
import time
from typing import Any

from pointsman.cli.options import add_command, add_connection, time_span
from pointsman.errors import PointsmanError, command

EXAMPLE = """\
examples:
  pointsman promote candidate --if 'ttft_p90 < -5%' --canary 10% --for 10m
  pointsman promote slo-aware --deployment chat --if 'e2e_p90 < 0% and errors <= 0%' --no-wait
  pointsman promote candidate --stop
"""
POLL_S = 1.0


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "promote",
        summary="try a candidate on a share of live requests, and keep it if it is better",
        description="Let a candidate of scheduling.shadow decide about a share of the requests, by hash of the session "
        "(x-session-id) or the request, and compare both shares. If the condition holds when the time is over, "
        "the candidate takes effect with a new generation of the manifest. Otherwise the policy in force "
        "stays, and so it does if the candidate fails, errs or is much worse before. Metrics: ttft, tpot and e2e "
        "with _mean, _p50, _p90, _p95 or _p99, as a change in percent; errors and attainment, as a difference of "
        "shares. The exit code is 0 if it was promoted.",
        example=EXAMPLE,
    )
    parser.add_argument("candidate", metavar="CANDIDATE")
    parser.add_argument(
        "--deployment", metavar="DEPLOYMENT", default="", help="needed if several deployments have this candidate"
    )
    parser.add_argument(
        "--if", dest="condition", metavar="CONDITION", help="default: 'ttft_p90 < 0%% and errors <= 0%%'"
    )
    parser.add_argument(
        "--canary", type=_percentage, default=0.1, metavar="SHARE", help="share of the requests (default: 10%%)"
    )
    parser.add_argument("--for", dest="for_s", type=time_span, default=600.0, metavar="TIME", help="default: 10m")
    parser.add_argument("--no-wait", action="store_true", help="return once it has begun")
    parser.add_argument("--stop", action="store_true", help="end the promotion; the policy in force stays")
    add_connection(parser)
    parser.set_defaults(run=run)


def _percentage(text: str) -> float:
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = 0.0
    if not 0 < found <= 0.9:
        raise argparse.ArgumentTypeError(f'"{text}" is not a share such as 10% or 0.1, above 0 and at most 90%')
    return found


def run(args: argparse.Namespace) -> int:
    """Returns 0 if the candidate was promoted. With --no-wait, returns 0 as soon as the promotion has begun."""
    from pointsman.cli.client import NoPlane, PlaneRefused, client_of
    from pointsman.cli.display import promotion_text

    client = client_of(args)
    if args.stop:
        running = [one for one in client.get("promotions")["promotions"] if one["state"] == "running"]
        mine = [
            one["run"]
            for one in running
            if one["candidate"] == args.candidate and args.deployment in ("", one["deployment"])
        ]
        if not mine:
            raise PointsmanError(f'no promotion of "{args.candidate}" is running; see: {command("shadow")}')
        told = client.delete("promotions", mine[0])
        print(json.dumps(told, indent=2, ensure_ascii=False) if args.json else promotion_text(told))
        return 0
    asked = {"candidate": args.candidate, "deployment": args.deployment, "canary": args.canary, "for_s": args.for_s}
    if args.condition is not None:
        asked["condition"] = args.condition
    told = client.post("promotions", body=asked)
    shows = sys.stderr.isatty() and not args.json
    while told["state"] == "running" and not args.no_wait:
        if shows:
            print(f"\r\x1b[K{promotion_text(told)}", end="", file=sys.stderr, flush=True)
        time.sleep(POLL_S)
        try:
            told = client.get("promotions", told["run"])
        except (NoPlane, PlaneRefused) as error:
            if isinstance(error, PlaneRefused) and error.status != 404:
                raise
            print(f"\nthe plane was stopped or started again, which ends the promotion: {error}", file=sys.stderr)
            return 1
    if shows:
        print(file=sys.stderr)
    print(json.dumps(told, indent=2, ensure_ascii=False) if args.json else promotion_text(told))
    return 0 if told["state"] == "promoted" or args.no_wait else 1
