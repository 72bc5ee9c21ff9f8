"""`pointsman plan FILE`: what applying a manifest would change, and why."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from pointsman.cli.manifest import add_file, read_manifest, show_changes
from pointsman.cli.options import add_command, add_connection

if TYPE_CHECKING:
    from pointsman.config import PointsmanPlan
    from pointsman.types import Worker

EXAMPLE = """\
examples:
  pointsman plan examples/smollm2.yaml
  pointsman plan examples/smollm2.yaml --json
"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "plan",
        summary="what applying a manifest would change, and why",
        description="Compare a manifest with what runs, and change nothing. If no plane runs, say what `pointsman up` "
        "would start.",
        example=EXAMPLE,
    )
    add_file(parser)
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the changes."""
    from pointsman.cli.client import NoPlane, client_of

    manifest, plan = read_manifest(args.file)
    try:
        answer = client_of(args).post("plan", body=manifest)
    except NoPlane as nobody:
        if args.url:
            raise
        answer = _from_nothing(plan)
        if not args.json:
            start = f"pointsman up {args.file} would start one that listens on {plan.gateway.listen}"
            print(f"{nobody.found}; {start}, and:")
    if args.json:
        print(json.dumps({"changes": answer["changes"], "notes": plan.notes}, indent=2, ensure_ascii=False))
    else:
        show_changes(answer, "nothing would change", plan.notes, args.file)
    return 0


def _from_nothing(plan: "PointsmanPlan") -> dict[str, Any]:
    """What would be done where nothing runs yet, as the admin API says it."""
    import msgspec

    from pointsman.config.changes import changes_between
    from pointsman.config.revision import EndpointsFiles
    from pointsman.control import Controller
    from pointsman.control.events import WorkerSeen

    controller = Controller()
    machine = _this_machine(plan)
    if machine is not None:
        controller.handle(WorkerSeen(machine), 0.0)
    listed = EndpointsFiles()
    listed.configure(plan)
    changes = changes_between(None, plan, controller.preview(listed.desired()))
    return {"changes": msgspec.to_builtins(changes.steps), "text": str(changes)}


def _this_machine(plan: "PointsmanPlan") -> "Worker | None":
    """What a plane would see here; None: it cannot be looked at, and instances would get no places."""
    from pointsman.runtimes.local.detection import detect

    try:
        worker = detect(labels=plan.worker_labels())
    except Exception:  # drivers are somebody else's
        return None
    return worker if worker.memory_bytes else None
