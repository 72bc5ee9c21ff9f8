"""Reads the command line, and runs the command."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pointsman.cli import (
    apply,
    build,
    check,
    delete,
    deploy,
    down,
    drain,
    estimate,
    events,
    explain,
    key,
    lab,
    logs,
    place,
    plan,
    promote,
    record,
    rehearse,
    requests,
    rollback,
    scale,
    schema,
    shadow,
    status,
    up,
)
from pointsman.cli.options import WrongUsage, add_command, drop_output_if_unwritable, plane_of
from pointsman.errors import PROGRAM_CALL, ConfigError, PointsmanError, did_you_mean, shown, system_reason

COMMANDS = (
    up, plan, apply, status, explain, requests, events, logs, scale, drain, down, key,
    build, deploy, rollback, delete,
    shadow, promote, record,
    estimate, place, check, rehearse, lab, schema,
)  # fmt: skip

EXAMPLE = """\
example:
  pointsman up examples/smollm2.yaml           real models and a gateway, until Ctrl-C
  pointsman plan examples/smollm2.yaml         what it would start
  pointsman status                             what runs, and what is wrong
  pointsman requests                           the newest requests
  pointsman explain REQUEST_ID                 why a request went to its instance
  pointsman check config scheduling.yaml       all mistakes in a file, before it goes live
  pointsman check policy mymodule:MyPolicy     which promises your policy breaks, with small examples
  pointsman rehearse scaling panic --of chat   what a scaling policy would have cost on past load
  pointsman lab compare requests.jsonl --policy round-robin --policy pending-work
                                               which routing policy wins on recorded traffic, and by how much
  pointsman schema > pointsman.schema.json     completion in your editor
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    PROGRAM_CALL.state, PROGRAM_CALL.url = plane_of(args)
    if "" not in sys.path:
        sys.path.insert(0, "")  # the user's own classes may be in the current directory
    try:
        code: int = args.run(args)
    except PointsmanError as error:
        _report(error, as_json=getattr(args, "json", False))
        return 2 if isinstance(error, WrongUsage) else 1
    except BrokenPipeError:
        drop_output_if_unwritable()
        return 1
    except OSError as error:
        _report(PointsmanError(_system_error(error)), as_json=getattr(args, "json", False))
        return 1
    except KeyboardInterrupt:
        return 130
    return code if drop_output_if_unwritable() else 1


def _report(error: PointsmanError, *, as_json: bool) -> None:
    """Print an error as text, or as JSON in the form that the admin API uses."""
    problems = list(getattr(error, "problems", ()))
    if as_json:
        document = {"message": str(error), **getattr(error, "error", {})}
        if isinstance(error, ConfigError):
            import msgspec

            document["problems"] = msgspec.to_builtins(problems)
        print(json.dumps({"error": document}, indent=2, ensure_ascii=False))
    elif any(_file(problem) for problem in problems):
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        print(f"{error}\npointsman: {count}; nothing was applied", file=sys.stderr)
    else:
        print(f"pointsman: {error}", file=sys.stderr)


def _system_error(error: OSError) -> str:
    """An error from the operating system as text, for failures that no command expects."""
    files = [str(one) for one in (error.filename, error.filename2) if isinstance(one, str | Path)]
    return ": ".join([*map(shown, files), system_reason(error)])


def _file(problem: object) -> object:
    """The file that has the problem. None if the problem is not in a file."""
    return problem.get("file") if isinstance(problem, dict) else getattr(problem, "file", None)


class _Version(argparse.Action):
    """Prints the version of the installed package.

    The version is looked up only when needed, because the lookup takes longer than printing the help.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"pointsman {version('pointsman')}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest valid choice for a wrong one."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = "command" if isinstance(action, argparse._SubParsersAction) else "value"
            near = did_you_mean(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f'there is no {what} "{shown(str(value))}"{near}')


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="pointsman",
        description="A control plane for inference: places, routes, scales and wires models.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = made.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    _add_completion(commands)
    return made


COMPLETION_EXAMPLE = """\
examples:
  eval "$(pointsman completion bash)"
  pointsman completion bash > ~/.local/share/bash-completion/completions/pointsman
  pointsman completion zsh > ~/.zfunc/_pointsman
"""
SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")
FILES = ("FILE", "PATH")
"""Names that the help shows for arguments that are files."""


def _add_completion(commands: Any) -> None:
    made = add_command(
        commands,
        "completion",
        summary="print a script that completes commands in your shell",
        description="Print a script for the shell, which completes commands, options, their choices, and files. "
        "Print it again after an upgrade.",
        example=COMPLETION_EXAMPLE,
    )
    made.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    made.set_defaults(run=_print_completion)


def _print_completion(args: argparse.Namespace) -> int:
    import shtab

    whole = parser()
    _complete_files(whole, shtab)
    print(shtab.complete(whole, args.shell))
    return 0


def _complete_files(made: argparse.ArgumentParser, shtab: Any) -> None:
    """Let the shell complete files and folders for arguments that are files or folders."""
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, shtab)
        elif action.metavar == "DIR":
            action.complete = shtab.DIR  # type: ignore[attr-defined]
        elif action.type is Path or action.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
