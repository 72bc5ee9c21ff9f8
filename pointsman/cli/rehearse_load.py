"""What is rehearsed on: load from a file, or what a running plane has seen of a deployment and knows about it."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pointsman.cli.client import client_of
from pointsman.cli.display import duration
from pointsman.cli.rehearse import Named
from pointsman.errors import PointsmanError, UnknownName
from pointsman.lab.scaling import Series, UnreadableLoad, arrivals_of, chosen, rates_of
from pointsman.scaling.limits import ScalingLimits

if TYPE_CHECKING:
    from pointsman.scaling import ScalingLimits


ARRIVALS = (".jsonl", ".ndjson")
"""Endings of files with one request per line."""
BIN_S = 60.0
"""Of those files, unless --bin says otherwise."""
LEAST_BINS = 6
"""Of a plane's history: of less, a replay says nothing."""
LEAST_INTERVAL_S = 30.0
"""Within a bin of a plane's history nothing changes, so that asking every second would only take its time."""


class KnownLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A load, and what is known besides unless the command line says otherwise."""

    series: Series
    capacity: float | None = None
    why_no_capacity: str = ""
    start_up_s: float = 600.0
    interval_s: float = 60.0
    request_s: float = 1.0
    cost_per_replica_hour: float | None = None
    limits: ScalingLimits | None = None
    policy: Named | None = None
    """The one that is in force."""
    notes: Mapping[str, str] = {}
    """By option: where its number comes from, if nobody gives it."""


def known_load(args: argparse.Namespace) -> KnownLoad:
    """What the command line names. Raises with what is wrong with it."""
    if args.of is None:
        return KnownLoad(series=_of_file(args.load, args.series, args.bin))
    if args.series is not None or args.bin is not None:
        raise PointsmanError("--series and --bin are about a file, and go with --load")
    return _of_plane(client_of(args).get("deployments", args.of, "load"))


def _of_file(file: Path, name: str | None, bin_s: float | None) -> Series:
    arrivals = file.suffix.lower() in ARRIVALS
    if bin_s is not None and not arrivals:
        raise PointsmanError(
            f"--bin goes with requests, one per line ({' or '.join(ARRIVALS)}); {file} has bins already"
        )
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            if arrivals:
                return arrivals_of(name or file.stem, lines, BIN_S if bin_s is None else bin_s, name)
            return chosen(rates_of(lines, file.stem), name)
    except OSError as error:
        raise PointsmanError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise PointsmanError(f"{file}: this is not UTF-8 text") from None
    except (UnreadableLoad, UnknownName) as error:
        hint = " with --series NAME" if str(error).endswith("choose one") else ""
        raise PointsmanError(f"{file}: {error}{hint}") from None


def _of_plane(told: dict[str, Any]) -> KnownLoad:
    name, bins, bin_s = told["deployment"], told["bins"], told["bin_s"]
    if len(bins) < LEAST_BINS:
        missing = duration((LEAST_BINS - len(bins)) * bin_s)
        raise PointsmanError(
            f'of "{name}" the plane has a history of {len(bins)} bins of {duration(bin_s)} so far; a rehearsal needs '
            f"{LEAST_BINS}: come back in {missing}, or bring a recording with --load"
        )
    limits = msgspec.convert(told["limits"], ScalingLimits)
    known = KnownLoad(
        series=Series(name, bin_s, [one["per_second"] for one in bins], bins[0]["began"]),
        interval_s=max(limits.interval_s, LEAST_INTERVAL_S),
        cost_per_replica_hour=told["cost_per_replica_hour"],
        limits=limits,
        policy=None if told["parameters"] is None else Named(told["policy"], told["parameters"]),
    )
    return _with_what_was_measured(known, told)


def _with_what_was_measured(known: KnownLoad, told: dict[str, Any]) -> KnownLoad:
    """Start-ups, and what a replica serves, as far as the plane has seen any."""
    start_up_s, request_s, at_once = told["start_up_s"], told["request_s"], told["max_concurrency"]
    notes = {}
    if start_up_s is None:
        notes["start_up"] = f"nobody has seen an instance start yet; {known.start_up_s:g} s is a guess (--start-up)"
    else:
        known = msgspec.structs.replace(known, start_up_s=start_up_s)
    if request_s is not None:
        known = msgspec.structs.replace(known, request_s=request_s)
    if request_s is not None and at_once:
        known = msgspec.structs.replace(known, capacity=at_once / request_s)
        notes["capacity"] = f"a replica takes {at_once} at once, and a request {request_s:.3g} s of late (--capacity)"
    nobody = "no request has come in the last hour" if request_s is None else "how many it takes at once nobody says"
    return msgspec.structs.replace(known, notes=notes, why_no_capacity=nobody)
