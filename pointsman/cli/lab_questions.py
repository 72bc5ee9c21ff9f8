"""`pointsman lab regret` and `pointsman lab whatif`: questions that replays answer."""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.cli.lab import TrialProgress, add_objectives, add_replays, cache_of
from pointsman.cli.options import add_command, add_connection, at_least_one, at_least_zero, share
from pointsman.errors import PointsmanError, UnusableFile, command, text_of_file

if TYPE_CHECKING:
    from pointsman.lab.traffic import TrafficComparison

REGRET_EXAMPLE = """\
examples:
  pointsman lab run requests.jsonl --policy pending-work --speed 3 --first 1000 --save run.json
  pointsman lab regret run.json --request 17
"""
WHATIF_EXAMPLE = """\
examples:
  pointsman lab whatif new.yaml --recording requests.jsonl --against old.yaml
  pointsman lab whatif new.yaml --against old.yaml                   on the newest requests of the running plane
"""
RECORDS = 100_000
"""Maximum number of requests to ask a plane for."""


def add_regret(commands: Any) -> None:
    parser = add_command(
        commands,
        "regret",
        summary="what one decision of a run has cost",
        description="Replay a run of `lab run --save` once for each other instance: the same up to one decision, which "
        "is forced; then the policy continues. Print the difference in misses and latencies.",
        example=REGRET_EXAMPLE,
    )
    parser.add_argument("saved", type=Path, metavar="RUN", help="the file of lab run --save")
    parser.add_argument(
        "--request",
        type=at_least_zero,
        required=True,
        metavar="N",
        help="number of the request in order of arrival, from 0",
    )
    parser.add_argument("--processes", type=at_least_one, metavar="N", help="parallel replays (default: one per core)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_regret)


def _regret(args: argparse.Namespace) -> int:
    import msgspec

    from pointsman.lab.traffic import Trial, regret

    try:
        trial = msgspec.json.decode(text_of_file(args.saved), type=Trial)
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableFile(args.saved, error) from error
    except msgspec.DecodeError as error:
        made = command("lab", "run", "RECORDING", "--save", "FILE")
        raise PointsmanError(f"{args.saved} is not a saved run ({error}); make one with: {made}") from None
    progress = TrialProgress()
    found = regret(trial, args.request, args.processes, progress.show)
    progress.clear()
    print(json.dumps(found.as_dict(), indent=2) if args.json else found.as_text())
    return 0


def add_whatif(commands: Any) -> None:
    parser = add_command(
        commands,
        "whatif",
        summary="what a changed manifest would do to recent traffic",
        description="Replay a recording, or the newest requests of the running plane, on the fleets of two manifests, "
        "and say whether the new one may be applied. The exit code is 1 if the share of requests in time falls by more "
        "than --worse. Records of a plane have lengths and times, but do not show which prompts begin alike. A "
        "recording has both.",
        example=WHATIF_EXAMPLE,
    )
    parser.add_argument("file", metavar="NEW.yaml", help="the changed manifest")
    parser.add_argument("--against", required=True, metavar="OLD.yaml", help="the manifest that is in force")
    parser.add_argument("--recording", metavar="FILE", help="requests to replay (default: the newest of the plane)")
    parser.add_argument(
        "--worse", type=share, default=0.01, metavar="SHARE", help="loss that is accepted (default 0.01)"
    )
    parser.add_argument(
        "--seeds", type=at_least_one, default=1, metavar="N", help="seeds of arrivals and choices (default 1)"
    )
    add_replays(parser)
    add_objectives(parser)
    add_connection(parser)
    parser.set_defaults(run=_whatif)


def _whatif(args: argparse.Namespace) -> int:
    with traffic_of(args) as source:
        compared = rehearsed(args, source)
    before, after = (compared.cells[name, 1.0].of("attainment").mean for name in compared.policies)
    may = after >= before - args.worse
    if args.json:
        print(json.dumps(compared.as_dict() | {"may_apply": may}, indent=2))
    else:
        print(compared.as_text())
        print(f"{'it may be applied' if may else 'do not apply it'}: {before:.1%} in time before, {after:.1%} after")
    return 0 if may else 1


def rehearsed(args: argparse.Namespace, source: str) -> "TrafficComparison":
    """Replay both manifests. The manifest in force is the first in the comparison."""
    from pointsman.lab.traffic import Objectives, ReplaySetting, TrafficComparison, Trial, fleet_of, run_trials

    trials = [
        Trial(
            source=source,
            policy=None,
            setting=ReplaySetting(fleet=fleet_of(manifest), start_up_s=args.start_up),
            seed=seed,
            objectives=Objectives(args.ttft, args.tpot),
            name=name,
        )
        for name, manifest in (("in force", args.against), ("changed", args.file))
        for seed in range(args.seeds)
    ]
    progress = TrialProgress()
    finished = run_trials(trials, cache_of(args), args.processes, progress.show)
    progress.clear()
    return TrafficComparison(finished)


@contextmanager
def traffic_of(args: argparse.Namespace) -> Iterator[str]:
    """The recording that the command names, or else a temporary file with the requests that the plane has recorded."""
    import msgspec

    from pointsman.cli.client import client_of
    from pointsman.lab.traffic import requests_of_plane

    if args.recording is not None:
        yield args.recording
        return
    found = requests_of_plane(client_of(args).get("requests", limit=RECORDS))
    with tempfile.NamedTemporaryFile(prefix="pointsman-", suffix=".jsonl") as file:
        file.write(b"".join(msgspec.json.encode(one) + b"\n" for one in found))
        file.flush()
        yield file.name
