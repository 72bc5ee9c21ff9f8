"""`pointsman apply FILE`: puts a manifest in force on a running plane."""

import argparse
import json
import sys
from typing import Any

from pointsman.cli.manifest import add_file, add_yes, as_json, confirmed, read_manifest, show_changes
from pointsman.cli.options import add_command, add_connection, time_span

EXAMPLE = """\
examples:
  pointsman apply examples/smollm2.yaml
  pointsman apply examples/smollm2.yaml --timeout 10m
  pointsman apply examples/smollm2.yaml --no-wait --json
  pointsman apply smaller.yaml --yes
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "apply",
        summary="put a manifest in force on a running plane",
        description="Change only what differs, without dropping a request, and wait until every instance is ready. "
        "Applying the same manifest twice changes nothing. A destructive change, which pointsman plan marks with `!`, "
        "is confirmed on the terminal, or with --yes.",
        example=EXAMPLE,
    )
    add_file(parser)
    add_yes(parser)
    waiting = parser.add_mutually_exclusive_group()
    waiting.add_argument("--wait", action="store_true", default=True, help="wait until everything is ready (default)")
    waiting.add_argument("--no-wait", dest="wait", action="store_false", help="return at once")
    parser.add_argument(
        "--timeout", type=time_span, default=300.0, metavar="TIME", help="maximum time to wait (default 5m)"
    )
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """1 if something is not ready after the timeout."""
    from pointsman.cli.client import client_of
    from pointsman.cli.display import duration
    from pointsman.errors import command

    manifest, plan = read_manifest(args.file)
    client = client_of(args)
    answer = confirmed(lambda said: client.post("apply", body=manifest | {"confirmation": said}), args)
    if not args.json:
        show_changes(answer, "nothing has changed", plan.warnings)
    result: dict[str, Any] = {"changes": answer["changes"], "warnings": as_json(plan.warnings)}
    if not args.wait:
        if args.json:
            print(json.dumps(result, indent=2, ensure_ascii=False))
        return 0
    from pointsman.cli.progress import wait_until_ready

    ready, status = wait_until_ready(client, args.timeout, sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(result | {"ready": ready, "status": status}, indent=2, ensure_ascii=False))
    elif not ready:
        late = f"not everything is ready after {duration(args.timeout)}"
        print(f"pointsman: {late}; the plane keeps trying; see: {command('status')}", file=sys.stderr)
    return 0 if ready else 1
