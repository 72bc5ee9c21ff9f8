"""`pointsman rehearse scaling POLICY...`: what policies would have cost on recorded load, and who goes unserved."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.cli.options import add_command, add_connection, at_least_one, json_object, time_or_none, time_span
from pointsman.cli.rehearse_limits import _add_limits, limits_of
from pointsman.cli.rehearse_policies import Named, named, policies_of

if TYPE_CHECKING:
    from pointsman.cli.rehearse_load import KnownLoad
    from pointsman.lab.scaling import Comparison, Setting
    from pointsman.scaling.records import ScalingRecord

EXAMPLE = """\
POLICY is built in, or your own: module:name or file.py:name, a class or a function. Its parameters follow it,
as in 'panic={"target": 4}'.

FILE is a CSV with a header: a column of times (t_s, time or timestamp; seconds or ISO 8601), one of requests
per second (rps, rate or per_second), and one of names (model or name) if there are several series. Or JSON
lines, one for each request, with a timestamp in milliseconds (.jsonl).

examples:
  pointsman rehearse scaling 'predictive={"replicaPerSecond": 5}' --load rates.csv --capacity 5
  pointsman rehearse scaling 'target-ongoing={"target": 4}' policy.py:mine --load rates.csv --series chat \\
      --capacity 5 --start-up 200s --min 2 --max 40 --down-delay 5m --cost 2.5 --svg policies.svg
  pointsman rehearse scaling mymodule:business_hours --of chat --why 5
"""


def _add_scaling(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "scaling",
        summary="scaling policies on recorded load",
        description="Replay the load of a file, or what a running plane has seen of a deployment (--of), on virtual "
        "time, ask each policy as a plane does, and compare what it costs and leaves unserved with someone who knew "
        "the future. With --of, the plane's own limits and times hold, and without POLICY the one that is in force is "
        "rehearsed. Exit code 1 if answers of a policy did not count.",
        example=EXAMPLE,
    )
    parser.add_argument("policies", nargs="*", type=named, metavar="POLICY", help="NAME or NAME={JSON}")
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--load", type=Path, metavar="FILE", help="recorded load: .csv, or .jsonl with requests")
    load.add_argument("--of", metavar="DEPLOYMENT", help="the load that a running plane has seen; a node is APP/NODE")
    parser.add_argument("--series", metavar="NAME", help="which one of the file, if there are several")
    parser.add_argument("--bin", type=time_span, metavar="TIME", help="requests of a .jsonl are counted in these (60s)")
    parser.add_argument("--capacity", type=_positive, metavar="RATE", help="requests per second that a replica serves")
    parser.add_argument("--start-up", type=time_or_none, metavar="TIME", help="of a replica (600s)")
    parser.add_argument("--interval", type=time_span, metavar="TIME", help="how often policies are asked (60s)")
    parser.add_argument("--request-time", type=time_span, metavar="TIME", help="of a request on a replica (1s)")
    parser.add_argument(
        "--queue", type=time_or_none, default=0.0, metavar="TIME", help="so much of what replicas serve may wait (0s)"
    )
    parser.add_argument("--cost", type=_positive, metavar="PRICE", help="of a replica for an hour")
    parser.add_argument(
        "--parameters", type=json_object, default={}, metavar="JSON", help="of every POLICY that has none of its own"
    )
    _add_limits(parser)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw load and replicas, one picture per policy")
    parser.add_argument("--why", type=at_least_one, metavar="N", help="the last N changes of each policy, and why")
    add_connection(parser)
    parser.set_defaults(run=run)


def _positive(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return found


def run(args: argparse.Namespace) -> int:
    """1 if answers of a policy did not count."""
    from pointsman.cli.rehearse_load import known_load
    from pointsman.lab.scaling import compare

    known = known_load(args)
    policies = policies_of(args.policies or _in_force(known, args), args.parameters)
    setting = _setting(args, known)
    teller = Teller()
    limits = limits_of(args, known, setting)
    compared = compare(known.series, setting, policies, limits, teller.tell if teller.is_heard else None)
    teller.close()
    if args.svg is not None:
        _draw(args.svg, compared)
    if args.json:
        print(json.dumps(_told(compared, args.why or 0), indent=2, ensure_ascii=False))
    else:
        print(compared.as_text())
        for note in (note for option, note in known.notes.items() if getattr(args, option) is None):
            print(f"note: {note}")
        for name, outcome in compared.policies.items() if args.why else ():
            print(f"\n{_why(name, outcome.records, args.why, compared)}")
    return 1 if compared.problems() else 0


def _in_force(known: "KnownLoad", args: argparse.Namespace) -> list[Named]:
    """What is rehearsed if nobody says."""
    from pointsman.errors import PointsmanError
    from pointsman.scaling import SCALING_POLICIES

    if known.policy is not None:
        return [known.policy]
    if args.of is None:
        raise PointsmanError(
            f"name a policy to rehearse: {', '.join(sorted(SCALING_POLICIES))}, or your own file.py:name"
        )
    raise PointsmanError(f'the policy of its application decides about "{args.of}" and others; name one for it alone')


def _setting(args: argparse.Namespace, known: "KnownLoad") -> "Setting":
    from pointsman.errors import PointsmanError
    from pointsman.lab.scaling import Setting

    capacity = known.capacity if args.capacity is None else args.capacity
    if capacity is None:
        why = f": {known.why_no_capacity}" if known.why_no_capacity else ""
        raise PointsmanError(f"what a replica serves is not known{why}; give --capacity, in requests per second")
    interval_s, lasts_s = args.interval or known.interval_s, known.series.seconds
    if interval_s > lasts_s:
        raise PointsmanError(f"nobody would be asked: the load lasts {lasts_s:g} s, and --interval is {interval_s:g} s")
    return Setting(
        capacity=capacity,
        start_up_s=known.start_up_s if args.start_up is None else args.start_up,
        interval_s=interval_s,
        queue_s=args.queue,
        request_s=args.request_time or known.request_s,
        began=known.series.began,
        cost_per_replica_hour=args.cost or known.cost_per_replica_hour,
    )


class Teller:
    """Says on a terminal how far it is."""

    def __init__(self) -> None:
        self.is_heard = sys.stderr.isatty()

    def tell(self, name: str, share: float) -> None:
        print(f"\r\x1b[K{name[:60]}: {share:.0%}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.is_heard:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _draw(file: Path, compared: "Comparison") -> None:
    from pointsman.errors import PointsmanError
    from pointsman.lab.scaling import plots

    try:
        file.write_text(plots(compared.series, compared.setting, compared.policies), encoding="utf-8")
    except OSError as error:
        raise PointsmanError(f"cannot write {file}: {error.strerror}") from error


def _told(compared: "Comparison", newest: int) -> dict[str, Any]:
    import msgspec

    told = compared.as_dict()
    for one in told["policies"] if newest else ():
        one["records"] = msgspec.to_builtins(compared.policies[one["policy"]].records[-newest:])
    return told


def _why(name: str, records: "list[ScalingRecord]", newest: int, compared: "Comparison") -> str:
    """The last changes, as `pointsman explain deployment` has them."""
    import msgspec

    from pointsman.cli.scaling_text import record_lines

    shown = records[-newest:]
    lines = [f"{name}: the last {len(shown)} of {len(records):,} records" if shown else f"{name}: nothing was changed"]
    for record in shown:
        # A recording that does not say when it was made has no dates.
        when = "" if compared.setting.began else _since_the_beginning(record.at)
        lines += record_lines(msgspec.to_builtins(record) | {"policy": name.partition(" ")[0]}, when)
    return "\n".join(lines)


def _since_the_beginning(seconds: float) -> str:
    day, rest = divmod(int(seconds), 86400)
    return f"day {day + 1} {rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
