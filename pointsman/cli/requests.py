"""`pointsman requests`: the newest requests and their outcomes."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from pointsman.cli.options import add_command, add_connection, at_least_one

EXAMPLE = """\
examples:
  pointsman requests
  pointsman requests --only failed -n 5
  pointsman requests --model smollm2 --instance chat-1 --json
"""

STATES = ("waiting", "running", "served", "failed", "refused", "abandoned")
HEADS = (
    "request", "model", "tenant", "state", "status", "instance", "tries", "waited", "first token", "total", "tokens",
)  # fmt: skip


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "requests",
        summary="the newest requests and their outcomes",
        description="List requests, newest first, with their outcomes, including those of an earlier run of the plane. "
        "pointsman explain shows one of them in detail.",
        example=EXAMPLE,
    )
    parser.add_argument("--model", help="only requests for this model, as the client named it")
    parser.add_argument("--only", choices=STATES, help="only requests in this state")
    parser.add_argument("--instance", help="only requests that went to this instance")
    parser.add_argument("--steps", action="store_true", help="list the steps of requests to applications too")
    parser.add_argument("--tenant", help="only requests of this tenant")
    parser.add_argument(
        "-n", "--limit", type=at_least_one, default=20, metavar="N", help="maximum number of requests (default 20)"
    )
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pointsman.cli.client import client_of

    answer = client_of(args).get(
        "requests",
        model=args.model,
        state=args.only,
        instance=args.instance,
        tenant=args.tenant,
        limit=args.limit,
        steps=1 if args.steps else None,
    )
    print(json.dumps(answer, indent=2, ensure_ascii=False) if args.json else _table(answer, args))
    return 0


def _table(answer: Mapping[str, Any], args: argparse.Namespace) -> str:
    from pointsman.render.text import text_table

    listed = answer["requests"]
    if not listed:
        wanted = {"model": args.model, "state": args.only, "instance": args.instance, "tenant": args.tenant}
        given = ", ".join(f'{name} "{value}"' for name, value in wanted.items() if value is not None)
        return f"no requests found with {given}" if given else "no requests found"
    table = text_table(HEADS, [_row(request) for request in listed])
    more = answer.get("found", len(listed)) - len(listed)
    return f"{table}\n{more} more; see -n" if more > 0 else table


def _row(request: Mapping[str, Any]) -> list[str]:
    from pointsman.cli.display import milliseconds

    tokens = [request.get("input_tokens"), request.get("output_tokens")]
    return [
        request["request_id"],
        request["model"],
        request.get("tenant") or "",
        request["state"],
        str(request.get("status") or ""),
        request.get("instance") or "",
        str(request.get("tries") or ""),
        *(milliseconds(request.get(name)) for name in ("waited_ms", "first_token_ms", "total_ms")),
        " + ".join(str(count) for count in tokens if count is not None),
    ]
