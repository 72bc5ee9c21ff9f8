"""Manifests as arguments of commands: read once, and checked before a plane is asked to run them."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pointsman.config import PointsmanPlan


def add_file(parser: argparse.ArgumentParser, what: str = "a manifest, or an application") -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help=f"{what}: YAML")


def read_manifest(file: Path) -> "tuple[dict[str, str], PointsmanPlan]":
    """The body for the admin API, and what the file builds. Raises `ConfigError` with every problem and its line."""
    from pointsman.config import load_manifest
    from pointsman.config.yaml import text_of

    text, folder = text_of(file), str(file.absolute().parent)
    return {"text": text, "folder": folder, "file": str(file)}, load_manifest(text, folder, str(file))


def show_changes(answer: dict[str, Any], none: str, notes: "tuple[str, ...]", file: Path) -> None:
    """Print what changes and why, or `none`, and the notes for the author of the manifest."""
    print(answer["text"] if answer["changes"] else none)
    for note in notes:
        print(f"{file}: note: {note}")
