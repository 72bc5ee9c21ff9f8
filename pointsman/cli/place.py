"""`pointsman place MANIFEST`: where instances would go and why, or why there is no place and what would help."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.cli.manifest import add_file, read_manifest
from pointsman.cli.options import add_command, add_connection, write_file

if TYPE_CHECKING:
    from pointsman.config import PointsmanPlan
    from pointsman.placement.fleet import Fleet

EXAMPLE = """\
examples:
  pointsman place examples/smollm2.yaml                                    on this machine
  pointsman place examples/fleets/homelab-models.yaml --fleet examples/fleets/homelab.yaml
  pointsman place examples/fleets/h100-models.yaml --fleet examples/fleets/h100.yaml --svg fleet.svg
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "place",
        summary="where instances would go, and why",
        description="Place the missing instances of a manifest: on a fleet that a file describes, else on that of the "
        "running plane, else on this machine. Nothing is started. The exit code is 1 if an instance has no place.",
        example=EXAMPLE,
    )
    add_file(parser)
    add_connection(parser)
    parser.add_argument("--fleet", type=Path, metavar="FLEET.yaml", help="a file that describes a fleet")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the fleet with the placed instances")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 1 if an instance has no place."""
    from pointsman.lab.placement import Rehearsal
    from pointsman.render.fleet_svg import fleet_svg
    from pointsman.render.fleet_text import fleet_text

    _, plan = read_manifest(args.file)
    fleet = _fleet(args)
    rehearsal = Rehearsal(fleet)
    unknown = rehearsal.place(_asks(plan))
    if args.svg is not None:
        write_file(args.svg, fleet_svg(fleet))
    if args.json:
        print(json.dumps({"instances": rehearsal.as_list(), "unknown": unknown}, indent=2, ensure_ascii=False))
    else:
        print(rehearsal.as_text())
        for name in unknown:
            print(f"{name}: its needs are not known; set placement.resources or placement.modelFiles")
        print(f"\n{fleet_text(fleet, color=sys.stdout.isatty())}")
    return 1 if rehearsal.refused or unknown else 0


def _fleet(args: argparse.Namespace) -> "Fleet":
    """The fleet to place instances on: from a file, from the running plane, or this machine."""
    import msgspec

    from pointsman.cli.client import NoPlane, client_of
    from pointsman.placement.fleet import Fleet, Snapshot

    if args.fleet is not None:
        from pointsman.config.fleet import load_fleet

        return load_fleet(args.fleet).fleet()
    try:
        return msgspec.convert(client_of(args).get("fleet"), Snapshot).fleet()
    except NoPlane:
        if args.url:
            raise
    from pointsman.runtimes.choosing import workers_of

    return Fleet(workers_of("local"))


def _asks(plan: "PointsmanPlan") -> list[Any]:
    """The name, the number of replicas and the ask of each deployment that has an engine."""
    return [(one.name, one.desired.replicas, one.desired.ask) for one in plan.deployments if one.engine is not None]
