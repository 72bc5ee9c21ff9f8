"""Common parts of commands: options for the plane, parsers of numbers and times, and errors of the output."""

import argparse
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from pointsman.errors import PointsmanError, UnusableFile, system_reason

SOCKET = "admin.sock"
"""The socket of the admin API, in the state directory."""
KEY = "POINTSMAN_ADMIN_KEY"


class WrongUsage(PointsmanError):
    """Arguments do not go together, or one is missing. The exit code is 2, as for errors that argparse finds."""


def add_command(commands: Any, name: str, *, summary: str, description: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_state(parser: Any) -> None:
    parser.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="the state directory of the plane (default $POINTSMAN_STATE, else ~/.local/state/pointsman)",
    )


def state_folder(given: Path | None) -> Path:
    """The state directory, as an absolute path. The directory need not exist."""
    named = given or os.environ.get("POINTSMAN_STATE")
    return Path(named).expanduser().absolute() if named else default_state_folder()


def default_state_folder() -> Path:
    base = Path(os.environ.get("XDG_STATE_HOME", ""))  # a relative path is invalid here, and is ignored
    return (base if base.is_absolute() else Path("~/.local/state").expanduser()) / "pointsman"


def plane_of(args: argparse.Namespace) -> tuple[str, str]:
    """The state directory and the URL of the plane that a command line names.

    The directory is empty if it is the default one, or if there is a URL.
    """
    if not hasattr(args, "state"):
        return "", ""
    state, url = state_folder(args.state), getattr(args, "url", None) or ""
    return ("" if url or state == default_state_folder() else str(state)), url


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the options that locate the plane, and --json."""
    where = parser.add_mutually_exclusive_group()
    add_state(where)
    where.add_argument(
        "--url", metavar="URL", help=f"the gateway of a remote plane, http://host:port; its admin key is in ${KEY}"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def write_file(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnusableFile(file, error, "write") from error


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number of at least 1')
    return int(text)


def at_least_zero(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number of at least 0')
    return int(text)


def above_zero(text: str) -> float:
    found = _number(text)
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f'"{text}" is not a number above 0')
    return found


def share(text: str) -> float:
    found = _number(text)
    if not 0 < found <= 1:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number above 0, and at most 1')
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def json_object(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'"{text}" is not JSON: {error}') from None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f'"{text}" is not a JSON object; write for example \'{{"limit": 3}}\'')
    return given


def time_span(text: str) -> float:
    """Parse a time such as 30, 30s or 5m for argparse. Returns seconds."""
    found = time_from_zero(text)
    if found <= 0:
        raise argparse.ArgumentTypeError(f'"{text}" is not above 0')
    return found


def time_from_zero(text: str) -> float:
    """Parse a time of at least 0 for argparse. Returns seconds."""
    from pointsman.parameters import seconds

    try:
        found = float(text) if text.isdecimal() else seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found < 0:
        raise argparse.ArgumentTypeError(f'"{text}" is below 0')
    return found


def drop_output_if_unwritable() -> bool:
    """Flush what was printed. If standard output cannot be written, drop the rest of the output and return False."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # for a broken pipe no report is needed: the reader closed it
            with suppress(OSError):  # standard error may go to the same full disk
                print(f"pointsman: the output cannot be written: {system_reason(error)}", file=sys.stderr)
        _drop(sys.stdout)
        return False
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            _drop(sys.stderr)
    return True


def _drop(stream: TextIO) -> None:
    """Drop the rest of the stream's buffer. Otherwise Python would try to write it on exit, and would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
