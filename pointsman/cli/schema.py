"""`pointsman schema`: the JSON schema of configuration files, for editors."""

import argparse
import json
from typing import Any

from pointsman.cli.options import add_command

EXAMPLE = """\
example:
  pointsman schema --kind Pointsman > pointsman.schema.json
"""

KINDS = ("EndpointPickerConfig", "Pointsman", "Application")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "schema",
        summary="print the JSON schema of configuration files",
        description="Print the JSON schema of configuration files, with every built-in plugin and engine and their "
        "parameters. Editors with YAML support use it: # yaml-language-server: $schema=pointsman.schema.json",
        example=EXAMPLE,
    )
    parser.add_argument("--kind", choices=KINDS, help="only this kind of document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pointsman.config import json_schema

    print(json.dumps(json_schema(args.kind), indent=2))
    return 0
