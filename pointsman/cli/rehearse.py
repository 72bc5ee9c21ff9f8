"""`pointsman rehearse`: decisions on recorded load, before they are made for real."""

from typing import Any

from pointsman.cli.rehearse_scaling import _add_scaling


def add(commands: Any) -> None:
    """Add the group and its commands."""
    group = commands.add_parser("rehearse", help="try a policy on recorded load")
    subjects = group.add_subparsers(title="what to rehearse", metavar="WHAT", required=True)
    _add_scaling(subjects)
