"""`pointsman`: reads the command line and runs a command."""

import argparse
import os
import sys
from collections.abc import Sequence

from pointsman.cli import check, schema
from pointsman.errors import PointsmanError

COMMANDS = (check, schema)

EXAMPLE = """\
example:
  pointsman schema > pointsman.schema.json     completion in your editor
  pointsman check config scheduling.yaml       every mistake of a file, before it goes live
  pointsman check policy mymodule:MyPolicy     which promise a policy of yours breaks, with the smallest example
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = parser().parse_args(argv)
    if "" not in sys.path:
        sys.path.insert(0, "")  # your own classes may be in the current directory
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except PointsmanError as error:
        print(f"pointsman: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    made = argparse.ArgumentParser(
        prog="pointsman",
        description="A control plane for inference: places, routes, scales and wires models.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return made


if __name__ == "__main__":
    sys.exit(main())
