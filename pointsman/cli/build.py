"""`pointsman build MODULE:NAME`: write a pipeline as a file that can be deployed."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.cli.options import add_command, write_file
from pointsman.errors import PointsmanError, UnusableFile, command, did_you_mean, text_of_file

if TYPE_CHECKING:
    from types import ModuleType

EXAMPLE = """\
examples:
  pointsman build examples/diamond.py:dag -o deployment.yaml
  pointsman build shop.pipelines:checkout --name checkout
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "build",
        summary="write a pipeline as a file that can be deployed",
        description="Import a module and write the pipeline that it binds as YAML. All problems are reported at once. "
        "Run it again when the code has changed.",
        example=EXAMPLE,
    )
    parser.add_argument("pipeline", metavar="MODULE:NAME", help="the pipeline, as module:name or path/file.py:name")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="output file (default: standard output)")
    parser.add_argument("--name", default="", help="the name of the application (default: that of its file)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pointsman.config import load_application
    from pointsman.pipeline.application import build

    folder = (args.output.parent if args.output is not None else Path()).absolute()
    found = imported(args.pipeline)
    _check_bound(found, args.pipeline)
    application = build(found, name=args.name, folder=folder)
    text = application.to_yaml()
    load_application(text, folder, str(args.output or "<built>"))  # raises if the application could not be deployed
    if args.output is not None:
        write_file(args.output, text)
    if args.json:
        document = {"name": application.name, "file": args.output and str(args.output), "yaml": text}
        print(json.dumps(document, indent=2, ensure_ascii=False))
    elif args.output is None:
        print(text, end="")
    else:
        nodes = ", ".join(node.name for node in application.graph.nodes)
        print(f"{args.output}: application {application.name} of {nodes}")
        print(f"to deploy it to a running plane: {command('deploy', str(args.output))}")
        print(f"to run it alone: {command('up', str(args.output))}")
    return 0


def imported(named: str) -> Any:
    """The object that `module:name` or `path/file.py:name` names. Raises if there is no such object."""
    where, _, name = named.rpartition(":")
    if not where or not name:
        raise PointsmanError(f'"{named}" names no pipeline; write module:name or path/file.py:name')
    found: Any = _module(where)
    for part in name.split("."):
        if not hasattr(found, part):
            known = [other for other in vars(found) if not other.startswith("_")] if hasattr(found, "__dict__") else []
            raise PointsmanError(f'{where} has no "{part}"{did_you_mean(part, known)}')
        found = getattr(found, part)
    return found


def _check_bound(found: object, named: str) -> None:
    """Raise if the object is a class, function or module. A pipeline is what bind() returns."""
    import types

    kinds = {
        "a class": type,
        "a function": types.FunctionType | types.BuiltinFunctionType,
        "a module": types.ModuleType,
    }
    for kind, of_type in kinds.items():
        if isinstance(found, of_type):
            made = "decorate it with pointsman.deployment, and name what its bind() returned"
            raise PointsmanError(f"{named} is {kind}, not a pipeline; {made}")


def _check_text(file: Path) -> None:
    """Raise if the file is not a readable text file."""
    try:
        text_of_file(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableFile(file, error) from None


def _module(where: str) -> "ModuleType":
    import importlib
    import importlib.util

    from pointsman.config.registry import import_failure

    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        file = Path(where).absolute()
        _check_text(Path(where))
        sys.path.insert(0, str(file.parent))  # as Python does when it runs the file
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            raise PointsmanError(f"{where} is not a Python module")
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
    except PointsmanError:
        raise
    except Exception as error:
        raise PointsmanError(import_failure(where, error)) from error
    return module
