"""`pointsman place MANIFEST`: where instances would go, and why; or why nowhere, and what would have to change."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.cli.manifest import add_file, read_manifest
from pointsman.cli.options import add_command, add_connection
from pointsman.errors import PointsmanError

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
    """Add the command."""
    parser = add_command(
        commands,
        "place",
        summary="where instances would go, and why",
        description="Place what is missing of a manifest's instances: on the fleet of the plane that runs, on one that "
        "a file describes, or else on this machine. Nothing is started. Exit code 1 if one of them has no place.",
        example=EXAMPLE,
    )
    add_file(parser)
    add_connection(parser)
    parser.add_argument("--fleet", type=Path, metavar="FLEET.yaml", help="a described fleet")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the fleet with what was placed")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Place everything and print what came of it."""
    from pointsman.lab.placement import Rehearsal
    from pointsman.render.fleet_svg import fleet_svg
    from pointsman.render.fleet_text import fleet_text

    _, plan = read_manifest(args.file)
    fleet = _fleet(args)
    rehearsal = Rehearsal(fleet)
    unknown = rehearsal.place(_asks(plan))
    if args.svg is not None:
        try:
            args.svg.write_text(fleet_svg(fleet), encoding="utf-8")
        except OSError as error:
            raise PointsmanError(f"cannot write {args.svg}: {error.strerror}") from error
    if args.json:
        told = {"instances": rehearsal.as_list(), "unknown": unknown}
        print(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        print(rehearsal.as_text())
        for name in unknown:
            print(f"{name}: what it needs is not known; give placement.resources, or placement.modelFiles")
        print(f"\n{fleet_text(fleet, color=sys.stdout.isatty())}")
    return 1 if rehearsal.refused or unknown else 0


def _fleet(args: argparse.Namespace) -> "Fleet":
    """As a file describes it, as a plane that runs knows it, or this machine."""
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
    """(deployment, replicas, ask) of each that runs an engine."""
    return [(one.name, one.desired.replicas, one.desired.ask) for one in plan.deployments if one.engine is not None]
