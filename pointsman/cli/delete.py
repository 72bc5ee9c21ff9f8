"""`pointsman delete APP`: remove an application from a running plane."""

import argparse
import json
from typing import Any

from pointsman.cli.options import add_command, add_connection

EXAMPLE = """\
example:
  pointsman delete diamond
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "delete",
        summary="remove an application",
        description="Refuse new requests for it, let running ones end, stop its replicas, and forget its versions.",
        example=EXAMPLE,
    )
    parser.add_argument("application", metavar="APP")
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pointsman.cli.client import client_of

    answer = client_of(args).delete("applications", args.application)
    if args.json:
        print(json.dumps({"changes": answer["changes"]}, indent=2, ensure_ascii=False))
    else:
        print(answer["text"])
        print(f"{args.application} is deleted; its replicas stop when their calls have ended")
    return 0
