"""`pointsman check`: everything that can be found out before it goes live."""

from typing import Any

from pointsman.cli.check_config import _add_config
from pointsman.cli.check_policy import _add_policy


def add(commands: Any) -> None:
    """Add the group and its commands."""
    group = commands.add_parser("check", help="find mistakes before they go live")
    subjects = group.add_subparsers(title="what to check", metavar="WHAT", required=True)
    _add_config(subjects)
    _add_policy(subjects)
