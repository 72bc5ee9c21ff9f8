"""`pointsman plan FILE`: what applying a manifest would change, and why."""

import argparse
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pointsman.cli.manifest import add_file, as_json, read_manifest, show_changes
from pointsman.cli.options import add_command, add_connection

if TYPE_CHECKING:
    from pointsman.config import PointsmanPlan
    from pointsman.lab.traffic import TrafficComparison

EXAMPLE = """\
examples:
  pointsman plan examples/smollm2.yaml
  pointsman plan examples/smollm2.yaml --json
  pointsman plan new.yaml --rehearse requests.jsonl
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "plan",
        summary="what applying a manifest would change, and why",
        description="Compare a manifest with what runs, and change nothing. Lines of destructive changes, which apply "
        "asks to confirm, begin with `!`. If no plane runs, say what `pointsman up` would start.",
        example=EXAMPLE,
    )
    add_file(parser)
    parser.add_argument(
        "--rehearse", metavar="RECORDING", help="replay recorded requests on the manifest too, with simulated engines"
    )
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pointsman.cli.client import NoPlane, client_of
    from pointsman.errors import command

    manifest, plan = read_manifest(args.file)
    try:
        answer = client_of(args).post("plan", body=manifest)
    except NoPlane as error:
        if args.url:
            raise
        answer = _from_nothing(plan)
        if not args.json:
            listens = f"this would start one that listens on {plan.gateway.listen}"
            print(f"{error.found}; {listens}: {command('up', str(args.file))}")
    if args.json:
        result = {"changes": answer["changes"], "destructive": answer.get("destructive", [])}
        result |= {"dangers": answer.get("dangers", [])}
        result |= {"warnings": as_json(plan.warnings)}
        if args.rehearse is not None:
            result["rehearsal"] = _rehearsed(args).as_dict()
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        show_changes(answer, "nothing would change", plan.warnings)
        if args.rehearse is not None:
            print(f"\nwith {args.rehearse}:\n{_rehearsed(args).as_text()}")
    return 0


def _rehearsed(args: argparse.Namespace) -> "TrafficComparison":
    """Replay a recording on this manifest only. `pointsman lab whatif` compares two manifests."""
    from pointsman.lab.traffic import (
        ReplaySetting,
        TrafficComparison,
        Trial,
        TrialCache,
        default_cache,
        fleet_of,
        run_trials,
    )

    trial = Trial(source=args.rehearse, policy=None, setting=ReplaySetting(fleet=fleet_of(str(args.file))))
    return TrafficComparison(run_trials([trial], TrialCache(default_cache()), 1))


def _from_nothing(plan: "PointsmanPlan") -> dict[str, Any]:
    """The changes that would be made if nothing ran yet, in the form that the admin API uses."""
    from pointsman.config.changes import Outlook, changes_between
    from pointsman.config.revision import EndpointsFiles
    from pointsman.control import Controller
    from pointsman.control.events import WorkerSeen
    from pointsman.runtimes.choosing import workers_of

    controller = Controller()
    with suppress(Exception):  # drivers may raise anything; without workers, instances get no places
        for worker in workers_of("local", plan.worker_labels()):
            if worker.memory_bytes:
                controller.handle(WorkerSeen(worker), 0.0)
    files = EndpointsFiles()
    files.configure(plan)
    return changes_between(None, plan, Outlook(controller.preview(files.desired()))).as_dict()
