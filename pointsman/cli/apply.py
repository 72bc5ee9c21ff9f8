"""`pointsman apply FILE`: puts a manifest in force on a running plane."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pointsman.cli.manifest import add_file, add_yes, confirmed, read_manifest, show_changes
from pointsman.cli.manifest import as_json as warnings_as_json
from pointsman.cli.options import add_command, add_connection, time_span

if TYPE_CHECKING:
    from pointsman.cli.client import Client
    from pointsman.config import ConfigWarning

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
    """Returns 1 if something is still not ready when the timeout ends."""
    from pointsman.cli.client import client_of

    manifest, plan = read_manifest(args.file)
    client = client_of(args)
    answer = confirmed(lambda said: client.post("apply", body=manifest | {"confirmation": said}), args)
    return follow_plane(client, answer, plan.warnings, args.timeout if args.wait else 0.0, as_json=args.json)


def follow_plane(
    client: "Client", answer: dict[str, Any], warnings: "Sequence[ConfigWarning]", timeout_s: float, *, as_json: bool
) -> int:
    """Print the changes. Then wait until everything is ready, unless `timeout_s` is 0.

    Returns 1 if something is still not ready when the timeout ends.
    """
    from pointsman.cli.display import deployments_of, duration
    from pointsman.cli.progress import wait_until_ready
    from pointsman.errors import command

    if not as_json:
        show_changes(answer, "nothing has changed", warnings)
    result: dict[str, Any] = {"changes": answer["changes"], "warnings": warnings_as_json(warnings)}
    if not timeout_s:
        if as_json:
            print(json.dumps(result, indent=2, ensure_ascii=False))
        return 0
    ready, status = wait_until_ready(client, timeout_s, sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(result | {"ready": ready, "status": status}, indent=2, ensure_ascii=False))
    elif not ready:
        late = f"not everything is ready after {duration(timeout_s)}; the plane keeps trying"
        if any(deployment.stopped for deployment in deployments_of(status)):
            late = "not everything can start"
        print(f"pointsman: {late}; see: {command('status')}", file=sys.stderr)
    return 0 if ready else 1
