"""Manifests as arguments of commands.

Each manifest is read once, and checked before it is sent to a plane. The operator confirms destructive changes.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.errors import PointsmanError

if TYPE_CHECKING:
    from pointsman.config import ConfigWarning, PointsmanPlan


class NotAgreed(PointsmanError):
    """A destructive change that the operator did not confirm."""

    def __init__(self, message: str, asked: dict[str, Any]) -> None:
        super().__init__(message)
        self.error = asked | {"message": message}


def add_file(parser: argparse.ArgumentParser, what: str = "a manifest, or an application") -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help=f"{what}: YAML")


def read_manifest(file: Path) -> "tuple[dict[str, str], PointsmanPlan]":
    """The body for the admin API, and the plan that the file builds.

    Raises a `ConfigError` that lists every problem with its line.
    """
    from pointsman.config import load_manifest
    from pointsman.config.yaml import text_of

    text, folder = text_of(file), str(file.absolute().parent)
    return {"text": text, "folder": folder, "file": str(file)}, load_manifest(text, folder, str(file))


def add_yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--yes",
        action="store_true",
        help="do not ask before a destructive change: one that removes authentication, all deployments or "
        "applications, or more than half of the instances that run",
    )


MAX_CONFIRMATIONS = 5
"""Maximum number of confirmations for one change. If the running instances have changed meanwhile, the confirmation is
repeated."""


def confirmed(send: "Callable[[str], Any]", args: argparse.Namespace) -> Any:
    """The plane's answer to a change. A destructive change needs a confirmation on the terminal, or --yes.

    `send` gets the confirmation for exactly the change that was shown. The plane refuses this confirmation if anything
    has changed since.
    """
    from pointsman.cli.client import PlaneRefused

    confirmation = ""
    for _ in range(MAX_CONFIRMATIONS):
        try:
            return send(confirmation)
        except PlaneRefused as error:
            asked = error.error
            if asked.get("code") != "confirmation_needed":
                raise
            dangers = "; ".join(asked["destructive"])
            if not args.yes and not _agreed(asked, args):
                raise NotAgreed(
                    f"nothing was changed: {dangers}. If that is wanted, run the same command with --yes", asked
                ) from None
            confirmation = asked["confirmation"]
    raise PointsmanError("nothing was changed, because what runs changes all the time; try again")


def _agreed(asked: dict[str, Any], args: argparse.Namespace) -> bool:
    """Whether the operator agrees. False if there is no terminal on which to ask."""
    if args.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    print(asked["text"])
    try:
        return input("\nType yes to do this: ").strip() == "yes"
    except EOFError:
        return False


def show_changes(answer: dict[str, Any], none: str, warnings: "Sequence[ConfigWarning]") -> None:
    """Print what changes and why, or `none` if nothing changes. Then print the warnings for the manifest's author."""
    print(answer["text"] if answer["changes"] else none)
    for warning in warnings:
        print(warning)


def as_json(warnings: "Sequence[ConfigWarning]") -> list[dict[str, Any]]:
    """Warnings as JSON: file, line, field and message."""
    import msgspec

    return [msgspec.to_builtins(warning) for warning in warnings]
