"""`pointsman schema`: the JSON schema of configuration files, for editors."""

import argparse
import json
from typing import Any

KINDS = ("EndpointPickerConfig", "Pointsman")


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "schema",
        help="print the JSON schema of configuration files",
        description="Print the JSON schema of configuration files, with every built-in plugin and its parameters. "
        "Editors that speak YAML use it: # yaml-language-server: $schema=pointsman.schema.json",
    )
    parser.add_argument("--kind", choices=KINDS, help="only this kind of document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it."""
    from pointsman.config import json_schema

    print(json.dumps(json_schema(args.kind), indent=2))
    return 0
