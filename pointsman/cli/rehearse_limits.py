"""The limits of a rehearsal: as free as can be, or those of a running plane; and what the command line says instead."""

import argparse
from typing import TYPE_CHECKING

from pointsman.cli.options import at_least_none, at_least_one, time_or_none

if TYPE_CHECKING:
    from pointsman.cli.rehearse_load import KnownLoad
    from pointsman.lab.scaling import Setting
    from pointsman.scaling import ScalingLimits


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
