"""`pointsman down`: stop a plane and everything that it runs."""

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from pointsman.cli.options import add_command, add_connection, time_span

if TYPE_CHECKING:
    from pointsman.cli.client import Client

EXAMPLE = """\
examples:
  pointsman down
  pointsman down --no-wait
"""

POLL_S = 0.1


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "down",
        summary="stop a plane and everything that it runs",
        description="Accept no new requests, finish those in flight, stop every instance, and wait until the plane is "
        "gone. Servers that the plane did not start keep running.",
        example=EXAMPLE,
    )
    parser.add_argument("--no-wait", dest="wait", action="store_false", help="return at once")
    parser.add_argument(
        "--timeout", type=time_span, default=300.0, metavar="TIME", help="maximum time to wait (default 5m)"
    )
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 1 if the plane still runs when the timeout ends."""
    from pointsman.cli.client import client_of
    from pointsman.errors import command

    client = client_of(args)
    client.post("down")
    gone = args.wait and _is_gone(client, time.monotonic() + args.timeout)
    if args.json:
        print(json.dumps({"stopping": True, "stopped": gone}, indent=2))
    elif gone:
        print("the plane has stopped")
    elif not args.wait:
        print("the plane is stopping")
    else:
        print(f"pointsman: the plane is still stopping; see: {command('status')}", file=sys.stderr)
    return 0 if gone or not args.wait else 1


def _is_gone(client: "Client", until: float) -> bool:
    while client.is_there():
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_S)
    return True
