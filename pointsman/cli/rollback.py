"""`pointsman rollback [APP]`: return to an earlier manifest, or to the previous version of an application.

`pointsman history`: list the manifests to which a rollback can return.
"""

import argparse
import json
from typing import Any

from pointsman.cli.apply import follow_plane
from pointsman.cli.deploy import add_waiting, follow
from pointsman.cli.manifest import add_yes, confirmed
from pointsman.cli.options import WrongUsage, add_command, add_connection, at_least_one

EXAMPLE = """\
examples:
  pointsman rollback
  pointsman rollback --to 3
  pointsman rollback diamond
"""
HISTORY = """\
examples:
  pointsman history
  pointsman history --json
"""
HEADS = ("generation", "since", "from", "changes")


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "rollback",
        summary="return to an earlier manifest, or to the previous version of an application",
        description="Put the previous manifest in force, or deploy the previous version of an application. A second "
        "rollback returns to the one before that. Only what differs changes. Applications that were deployed beside "
        "the manifest stay as they are. If the user's code of that version is gone, nothing changes.",
        example=EXAMPLE,
    )
    parser.add_argument("application", metavar="APP", nargs="?", help="default: the manifest")
    parser.add_argument(
        "--to",
        type=at_least_one,
        metavar="GENERATION",
        help="the generation of the manifest, as pointsman history lists it",
    )
    add_yes(parser)
    add_waiting(parser)
    add_connection(parser)
    parser.set_defaults(run=run)
    parser = add_command(
        commands,
        "history",
        summary="the manifests that were in force, and what each changed",
        description="List the last 100 manifests, newest first, with the time and a summary of what each changed.",
        example=HISTORY,
    )
    add_connection(parser)
    parser.set_defaults(run=show_history)


def run(args: argparse.Namespace) -> int:
    """Returns 1 if something is not ready in time."""
    from pointsman.cli.client import client_of

    client = client_of(args)
    if args.application is not None:
        if args.to is not None:
            raise WrongUsage("--to is a generation of the manifest; an application returns version by version")
        path = ("applications", args.application, "rollback")
        answer = confirmed(lambda said: client.post(*path, body={"confirmation": said}), args)
        return follow(client, args.application, answer, args)
    asked = {"generation": args.to}
    answer = confirmed(lambda said: client.post("rollback", body=asked | {"confirmation": said}), args)
    return follow_plane(client, answer, (), args.wait, as_json=args.json)


def show_history(args: argparse.Namespace) -> int:
    from datetime import datetime

    from pointsman.cli.client import client_of
    from pointsman.render.text import one_line, text_table

    told = client_of(args).get("history")
    if args.json:
        print(json.dumps(told, indent=2, ensure_ascii=False))
        return 0
    rows = []
    for one in told["manifests"]:
        since = datetime.fromisoformat(one["at"]).astimezone()
        back = "" if one["restores"] is None else f"back to {one['restores']}: "
        now = " (in force)" if one["in_force"] else ""
        what = one_line(back + (one["summary"] or "nothing"), 100)
        rows.append([f"{one['generation']}{now}", f"{since:%Y-%m-%d %H:%M:%S}", one["file"], what])
    print(text_table(HEADS, rows) if rows else "no manifest was applied yet")
    return 0
