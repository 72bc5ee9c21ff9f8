"""`pointsman check`: everything that can be found out before it goes live."""

from typing import Any

from pointsman.cli import check_config, check_policy

COMMANDS = (check_config, check_policy)


def add(commands: Any) -> None:
    """Add the group and its commands."""
    group = commands.add_parser("check", help="find mistakes before they go live")
    subjects = group.add_subparsers(title="what to check", metavar="WHAT", required=True)
    for command in COMMANDS:
        command.add(subjects)
