"""`pointsman build MODULE:NAME`: write a pipeline as a file that can be deployed."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.cli.options import add_command
from pointsman.errors import PointsmanError, command, did_you_mean

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
    application = build(imported(args.pipeline), name=args.name, folder=folder)
    text = application.to_yaml()
    load_application(text, folder, str(args.output or "<built>"))  # raises if it could not be deployed
    if args.output is not None:
        try:
            args.output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise PointsmanError(f"{args.output} cannot be written: {error.strerror}") from error
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
    """The object that `module:name` or `path/file.py:name` names. Raises if there is none."""
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


def _module(where: str) -> "ModuleType":
    import importlib
    import importlib.util

    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        file = Path(where).absolute()
        sys.path.insert(0, str(file.parent))  # as when the file is run
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None or not file.is_file():
            raise PointsmanError(f"there is no file {file}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
    except PointsmanError:
        raise
    except Exception as error:
        raise PointsmanError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    return module
