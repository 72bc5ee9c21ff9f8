"""Manifests as arguments of commands: read once, and checked before a plane is asked to run them."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pointsman.config import ConfigWarning, PointsmanPlan


def add_file(parser: argparse.ArgumentParser, what: str = "a manifest, or an application") -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help=f"{what}: YAML")


def read_manifest(file: Path) -> "tuple[dict[str, str], PointsmanPlan]":
    """The body for the admin API, and what the file builds. Raises `ConfigError` with every problem and its line."""
    from pointsman.config import load_manifest
    from pointsman.config.yaml import text_of

    text, folder = text_of(file), str(file.absolute().parent)
    return {"text": text, "folder": folder, "file": str(file)}, load_manifest(text, folder, str(file))


def show_changes(answer: dict[str, Any], none: str, warnings: "Sequence[ConfigWarning]") -> None:
    """Print what changes and why, or `none`, and what the author of the manifest should know."""
    print(answer["text"] if answer["changes"] else none)
    for warning in warnings:
        print(warning)


def as_json(warnings: "Sequence[ConfigWarning]") -> list[dict[str, Any]]:
    """With file, line, field and message."""
    import msgspec

    return [msgspec.to_builtins(warning) for warning in warnings]
