"""`pointsman rehearse`: decisions on recorded load, before they are made for real."""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pointsman.cli.options import (
    add_command,
    add_connection,
    at_least_none,
    at_least_one,
    json_object,
    time_or_none,
    time_span,
)
from pointsman.errors import PointsmanError

if TYPE_CHECKING:
    from pointsman.cli.rehearse_load import KnownLoad
    from pointsman.lab.scaling import Comparison, Setting
    from pointsman.scaling import ScalingLimits
    from pointsman.scaling.records import ScalingRecord


# The limits of a rehearsal: as free as can be, or those of a running plane; and what the command line says instead.


def _share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, and at most 1")
    return found


OPTIONS = (
    ("--min", "min_replicas", at_least_none, "N", "never fewer (1)"),
    ("--max", "max_replicas", at_least_one, "N", "never more"),
    ("--up-delay", "up_delay_s", time_or_none, "TIME", "more are wanted for so long first (0s)"),
    ("--down-delay", "down_delay_s", time_or_none, "TIME", "fewer are wanted for so long first (0s)"),
    ("--up-factor", "up_factor", _share, "SHARE", "of the way to what is wanted at once (1)"),
    ("--down-factor", "down_factor", _share, "SHARE", "the same for fewer (1)"),
    ("--max-step", "max_step", at_least_one, "N", "at most so many more or fewer at a time"),
    ("--cooldown", "cooldown_s", time_or_none, "TIME", "between two changes (0s)"),
    ("--idle-timeout", "idle_timeout_s", time_or_none, "TIME", "with --min 0: the last one goes so much later (5m)"),
)
"""(option, field, type, what it takes, help); the names are those of a manifest."""


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("limits, as in the scaling section of a manifest")
    for option, field, kind, metavar, words in OPTIONS:
        group.add_argument(option, dest=field, type=kind, metavar=metavar, help=words)


def limits_of(args: argparse.Namespace, known: "KnownLoad", setting: "Setting") -> "ScalingLimits":
    """What holds for every policy. It begins with as many as the load needs then."""
    import msgspec

    from pointsman.errors import PointsmanError
    from pointsman.lab.scaling import Replay

    free = Replay(known.series, setting).limits
    given = {field: getattr(args, field) for _, field, *_ in OPTIONS if getattr(args, field) is not None}
    begins = {"initial_replicas": free.initial_replicas, "interval_s": setting.interval_s}
    limits = msgspec.structs.replace(known.limits or free, **begins, **given)
    if limits.min_replicas > limits.max_replicas:
        raise PointsmanError(
            f"at least {limits.min_replicas} (--min) and at most {limits.max_replicas} (--max) is nothing"
        )
    return limits


# Scaling policies as they are named on a command line: built in, of a module, or of a file; with parameters or not.


class Named(NamedTuple):
    """A policy, before it is made."""

    name: str
    parameters: dict[str, Any] | None = None
    """None: it was given none of its own."""


def named(text: str) -> Named:
    """NAME or NAME={JSON}, for argparse."""
    name, opened, rest = text.partition("={")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} names no policy; write for example 'panic={{\"target\": 4}}'")
    return Named(name, json_object("{" + rest) if opened else None)


def policies_of(asked: Iterable[Named], parameters: Mapping[str, Any]) -> dict[str, object]:
    """Each by what it is called in tables. `parameters`: of those that have none of their own."""
    made = {}
    for one in asked:
        given = parameters if one.parameters is None else one.parameters
        made[_label(one)] = _built(one.name, given)
    return made


def _label(one: Named) -> str:
    if not one.parameters:
        return one.name
    return f"{one.name} {', '.join(f'{name} {_plain(value)}' for name, value in one.parameters.items())}"


def _plain(value: object) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _built(name: str, parameters: Mapping[str, Any]) -> object:
    """Raises with what is wrong with it."""
    from pointsman.cli.build import imported
    from pointsman.config.problems import Problems
    from pointsman.config.scaling import policy

    file, _, inside = name.rpartition(":")
    found = name
    if file.endswith(".py"):
        imported(name)
        found = f"{Path(file).stem}:{inside}"
    problems = Problems("")
    made: object = policy(found, parameters, problems, ())
    if len(problems):
        raise PointsmanError("; ".join(_said(name, one.field, one.message) for one in problems))
    return made


def _said(name: str, field: str, message: str) -> str:
    """A problem, with the policy that has it; one about its name has it already."""
    return message if field == "policy" else ": ".join(filter(None, [name, field, message]))


# What is rehearsed on: load from a file, or what a running plane has seen of a deployment and knows about it.


# `pointsman rehearse scaling POLICY...`: what policies would have cost on recorded load, and who goes unserved.


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
    from pointsman.scaling import SCALING_POLICIES

    if known.policy is not None:
        return [known.policy]
    if args.of is None:
        raise PointsmanError(
            f"name a policy to rehearse: {', '.join(sorted(SCALING_POLICIES))}, or your own file.py:name"
        )
    raise PointsmanError(f'the policy of its application decides about "{args.of}" and others; name one for it alone')


def _setting(args: argparse.Namespace, known: "KnownLoad") -> "Setting":
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
    from pointsman.lab.scaling import plots

    try:
        file.write_text(plots(compared.series, compared.setting, compared.policies), encoding="utf-8")
    except OSError as error:
        raise PointsmanError(f"cannot write {file}: {error.strerror}") from error


def _told(compared: "Comparison", newest: int) -> dict[str, Any]:

    told = compared.as_dict()
    for one in told["policies"] if newest else ():
        one["records"] = [record.as_dict() for record in compared.policies[one["policy"]].records[-newest:]]
    return told


def _why(name: str, records: "list[ScalingRecord]", newest: int, compared: "Comparison") -> str:
    """The last changes, as `pointsman explain deployment` has them."""

    from pointsman.cli.display import record_lines

    shown = records[-newest:]
    lines = [f"{name}: the last {len(shown)} of {len(records):,} records" if shown else f"{name}: nothing was changed"]
    for record in shown:
        # A recording that does not say when it was made has no dates.
        when = "" if compared.setting.began else _since_the_beginning(record.at)
        lines += record_lines(record.as_dict() | {"policy": name.partition(" ")[0]}, when)
    return "\n".join(lines)


def _since_the_beginning(seconds: float) -> str:
    day, rest = divmod(int(seconds), 86400)
    return f"day {day + 1} {rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def add(commands: Any) -> None:
    """Add the group and its commands."""
    group = commands.add_parser("rehearse", help="try a policy on recorded load")
    subjects = group.add_subparsers(title="what to rehearse", metavar="WHAT", required=True)
    _add_scaling(subjects)
