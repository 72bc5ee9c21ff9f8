"""`pointsman rehearse`: try a policy on recorded load before it goes live."""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.cli.options import (
    WrongUsage,
    above_zero,
    add_command,
    add_connection,
    at_least_one,
    at_least_zero,
    json_object,
    share,
    time_from_zero,
    time_span,
    write_file,
)
from pointsman.errors import PointsmanError

if TYPE_CHECKING:
    from pointsman.lab.scaling import Comparison, NamedPolicy, RecordedLoad, Setting
    from pointsman.scaling import ScalingLimits
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

LIMITS = (
    ("--min", "min_replicas", at_least_zero, "N", "minimum number of replicas (default 1)"),
    ("--max", "max_replicas", at_least_one, "N", "maximum number of replicas"),
    ("--up-delay", "up_delay_s", time_from_zero, "TIME", "wait this long before scaling up (default 0s)"),
    ("--down-delay", "down_delay_s", time_from_zero, "TIME", "wait this long before scaling down (default 0s)"),
    ("--up-factor", "up_factor", share, "SHARE", "share of the missing replicas to add at once (default 1)"),
    ("--down-factor", "down_factor", share, "SHARE", "share of the surplus replicas to remove at once (default 1)"),
    ("--max-step", "max_step", at_least_one, "N", "maximum change at once"),
    ("--cooldown", "cooldown_s", time_from_zero, "TIME", "minimum time between two changes (default 0s)"),
    ("--idle-timeout", "idle_timeout_s", time_from_zero, "TIME", "with --min 0: idle time before zero (default 5m)"),
)
"""Option, field, type, metavar and help of each limit. Manifests use the same names for the limits."""


def add(commands: Any) -> None:
    group = commands.add_parser("rehearse", help="try a policy on recorded load")
    subjects = group.add_subparsers(title="what to rehearse", metavar="WHAT", required=True)
    parser = add_command(
        subjects,
        "scaling",
        summary="scaling policies on recorded load",
        description="Replay the load of a file, or the load that a running plane has seen of a deployment (--of), on "
        "virtual time. Compare the cost and the unserved requests of each policy with references that know the future. "
        "With --of, the limits and times of the plane are the defaults, and without POLICY the one in force is "
        "rehearsed. The exit code is 1 if a policy gave invalid answers.",
        example=EXAMPLE,
    )
    parser.add_argument("policies", nargs="*", type=named, metavar="POLICY", help="NAME or NAME={JSON}")
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--load", type=Path, metavar="FILE", help="recorded load: .csv, or .jsonl with requests")
    load.add_argument("--of", metavar="DEPLOYMENT", help="the load that a running plane has seen; a node is APP/NODE")
    parser.add_argument("--series", metavar="NAME", help="the series of the file, if it has several")
    parser.add_argument("--bin", type=time_span, metavar="TIME", help="bin length for a .jsonl (default 60s)")
    parser.add_argument("--capacity", type=above_zero, metavar="RATE", help="requests per second that a replica serves")
    parser.add_argument(
        "--start-up", type=time_from_zero, metavar="TIME", help="start-up time of a replica (default 600s)"
    )
    parser.add_argument(
        "--interval", type=time_span, metavar="TIME", help="time between calls of a policy (default 60s)"
    )
    parser.add_argument("--request-time", type=time_span, metavar="TIME", help="duration of a request (default 1s)")
    parser.add_argument(
        "--queue", type=time_from_zero, default=0.0, metavar="TIME", help="queue length, as serving time (default 0s)"
    )
    parser.add_argument("--cost", type=above_zero, metavar="PRICE", help="price of a replica per hour")
    parser.add_argument(
        "--parameters", type=json_object, default={}, metavar="JSON", help="parameters for every POLICY without its own"
    )
    limits = parser.add_argument_group("limits, as in the scaling section of a manifest")
    for option, field, kind, metavar, words in LIMITS:
        limits.add_argument(option, dest=field, type=kind, metavar=metavar, help=words)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="plot load and replicas, one plot per policy")
    parser.add_argument("--why", type=at_least_one, metavar="N", help="show the last N changes of each policy, and why")
    add_connection(parser)
    parser.set_defaults(run=run)


def named(text: str) -> "NamedPolicy":
    """Parse NAME or NAME={JSON} for argparse."""
    from pointsman.lab.scaling import NamedPolicy

    name, opened, rest = text.partition("={")
    if not name:
        raise argparse.ArgumentTypeError(f'"{text}" names no policy; write for example \'panic={{"target": 4}}\'')
    return NamedPolicy(name, json_object("{" + rest) if opened else None)


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a policy gave invalid answers."""
    from pointsman.lab.scaling import compare, plots

    load = _load(args)
    policies = _policies(args.policies or _in_force(load, args), args.parameters)
    setting = _setting(args, load)
    limits = _limits(args, load, setting)
    progress = ProgressLine()
    compared = compare(load.series, setting, policies, limits, progress.show if progress.visible else None)
    progress.clear()
    if args.svg is not None:
        write_file(args.svg, plots(compared.series, compared.setting, compared.policies))
    if args.json:
        print(json.dumps(_as_dict(compared, args.why or 0), indent=2, ensure_ascii=False))
    else:
        print(compared.as_text())
        for note in (note for option, note in load.notes.items() if getattr(args, option) is None):
            print(f"note: {note}")
        for name, outcome in compared.policies.items() if args.why else ():
            print(f"\n{_why(name, outcome.records, args.why, compared)}")
    return 1 if compared.problems() else 0


def _load(args: argparse.Namespace) -> "RecordedLoad":
    from pointsman.cli.client import client_of
    from pointsman.lab.scaling import load_of_file, load_of_plane

    if args.of is None:
        return load_of_file(args.load, args.series, args.bin)
    if args.series is not None or args.bin is not None:
        raise WrongUsage("--series and --bin are about a file, and go with --load")
    return load_of_plane(client_of(args).get("deployments", args.of, "load"))


def _in_force(load: "RecordedLoad", args: argparse.Namespace) -> "list[NamedPolicy]":
    """The policy in force. It is rehearsed if the command line names no policy."""
    from pointsman.scaling import SCALING_POLICIES

    if load.policy is not None:
        return [load.policy]
    if args.of is None:
        raise WrongUsage(f"name a policy to rehearse: {', '.join(sorted(SCALING_POLICIES))}, or your own file.py:name")
    raise PointsmanError(f'the policy of its application decides about "{args.of}" and others; name one for it alone')


def _policies(chosen: "Iterable[NamedPolicy]", parameters: Mapping[str, Any]) -> dict[str, object]:
    """Policies by their labels. A policy without parameters of its own gets `parameters`."""
    return {_label(one): _built(one.name, parameters if one.parameters is None else one.parameters) for one in chosen}


def _label(one: "NamedPolicy") -> str:
    if not one.parameters:
        return one.name
    return f"{one.name} {', '.join(f'{name} {_plain(value)}' for name, value in one.parameters.items())}"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _built(name: str, parameters: Mapping[str, Any]) -> object:
    from pointsman.cli.build import imported
    from pointsman.config.problems import Problems
    from pointsman.config.scaling import policy

    file, _, inside = name.rpartition(":")
    importable = name
    if file.endswith(".py"):
        imported(name)
        importable = f"{Path(file).stem}:{inside}"
    problems = Problems("")
    made: object = policy(importable, parameters, problems, ())
    if len(problems):
        raise PointsmanError("; ".join(_problem_text(name, one.field, one.message) for one in problems))
    return made


def _problem_text(name: str, field: str, message: str) -> str:
    """The problem as text. The policy's name comes first, unless the message already contains it."""
    return message if field == "policy" else ": ".join(filter(None, [name, field, message]))


def _setting(args: argparse.Namespace, load: "RecordedLoad") -> "Setting":
    from pointsman.lab.scaling import Setting

    capacity = load.capacity if args.capacity is None else args.capacity
    if capacity is None:
        why = f": {load.why_no_capacity}" if load.why_no_capacity else ""
        raise PointsmanError(f"the capacity of a replica is not known{why}; give --capacity, in requests per second")
    interval_s, length_s = args.interval or load.interval_s, load.series.seconds
    if interval_s > length_s:
        raise PointsmanError(
            f"no policy would be called: the load lasts {length_s:g} s, and --interval is {interval_s:g} s"
        )
    return Setting(
        capacity=capacity,
        start_up_s=load.start_up_s if args.start_up is None else args.start_up,
        interval_s=interval_s,
        queue_s=args.queue,
        request_s=args.request_time or load.request_s,
        began=load.series.began,
        cost_per_replica_hour=args.cost or load.cost_per_replica_hour,
    )


def _limits(args: argparse.Namespace, load: "RecordedLoad", setting: "Setting") -> "ScalingLimits":
    """The plane's limits, or almost none without a plane. Options override single limits.

    Unless an option says otherwise, the replay begins with as many replicas as the load needs.
    """
    import msgspec

    from pointsman.lab.scaling import Replay

    free = Replay(load.series, setting).limits
    given = {field: getattr(args, field) for _, field, *_ in LIMITS if getattr(args, field) is not None}
    start = {"initial_replicas": free.initial_replicas, "interval_s": setting.interval_s}
    limits = msgspec.structs.replace(load.limits or free, **start, **given)
    if limits.min_replicas > limits.max_replicas:
        raise WrongUsage(f"--min is {limits.min_replicas}, and above --max, which is {limits.max_replicas}")
    return limits


class ProgressLine:
    def __init__(self) -> None:
        self.visible = sys.stderr.isatty()

    def show(self, name: str, done: float) -> None:
        print(f"\r\x1b[K{name[:60]}: {done:.0%}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.visible:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _as_dict(compared: "Comparison", newest: int) -> dict[str, Any]:
    document = compared.as_dict()
    for one in document["policies"] if newest else ():
        one["records"] = [record.as_dict() for record in compared.policies[one["policy"]].records[-newest:]]
    return document


def _why(name: str, records: "list[ScalingRecord]", newest: int, compared: "Comparison") -> str:
    """The last changes, as `pointsman explain deployment` shows them."""
    from pointsman.cli.display import record_lines

    shown = records[-newest:]
    lines = [f"{name}: the last {len(shown)} of {len(records):,} records" if shown else f"{name}: no changes"]
    for record in shown:
        # If a recording has no dates, its times begin at 0.
        when = "" if compared.setting.began else _since_the_beginning(record.at)
        lines += record_lines(record.as_dict() | {"policy": name.partition(" ")[0]}, when)
    return "\n".join(lines)


def _since_the_beginning(seconds: float) -> str:
    day, rest = divmod(int(seconds), 86400)
    return f"day {day + 1} {rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
