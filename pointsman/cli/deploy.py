"""`pointsman deploy FILE`: put an application in force on a running plane."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from pointsman.cli.manifest import add_file, read_manifest
from pointsman.cli.options import add_command, add_connection, time_span

if TYPE_CHECKING:
    from pointsman.cli.client import Client


# Following an application on its way to another version: until all is ready, or the rollout has failed.


POLL_S = 0.2


def add_waiting(parser: argparse.ArgumentParser) -> None:
    """Add --wait and --no-wait."""
    waiting = parser.add_mutually_exclusive_group()
    waiting.add_argument(
        "--wait", type=time_span, default=300.0, metavar="TIME", help="until all is ready, at most so long (5m)"
    )
    waiting.add_argument("--no-wait", dest="wait", action="store_const", const=0.0, help="return at once")


def follow(
    client: "Client", name: str, answer: dict[str, Any], args: argparse.Namespace, notes: Sequence[str] = ()
) -> int:
    """Tell what changes and how it goes. 0: all is ready, or nobody waits; 1: not in time, or the rollout failed."""
    if not args.json:
        print(answer["text"] if answer["changes"] else f"nothing changed: this version of {name} is in force")
        for note in notes:
            print(f"note: {note}")
    told: dict[str, Any] = {"application": name, "changes": answer["changes"], "notes": list(notes)}
    code = 0
    if args.wait:
        watch = Rollout(client, name, sys.stderr if args.json else sys.stdout)
        problem = watch.wait(args.wait)
        told |= {"ready": not problem, "problem": problem, "deployments": watch.deployments}
        if problem and not args.json:
            print(f"pointsman: {problem}; pointsman status {name} shows more", file=sys.stderr)
        code = 1 if problem else 0
    if args.json:
        print(json.dumps(told, indent=2, ensure_ascii=False))
    return code


class Rollout:
    """Looks at an application again and again."""

    def __init__(self, client: "Client", name: str, out: TextIO) -> None:
        self.deployments: list[dict[str, Any]] = []
        """As they were last seen."""
        self._client = client
        self._name = name
        self._out = out
        self._said: dict[str, str] = {}

    def wait(self, timeout_s: float) -> str:
        """Empty: all is ready. Else what is not as it should be."""
        from pointsman.cli.display import DeploymentRow, duration

        began = time.monotonic()
        while True:
            self.deployments = self._client.get("applications", self._name)["deployments"]
            seen = [DeploymentRow(told) for told in self.deployments]
            for one in seen:
                gist, before = one.gist, self._said.get(one.name)
                if gist != before and not (before is None and one.settled):
                    print(f"{one.name}: {one.in_words()}", file=self._out, flush=True)
                self._said[one.name] = gist
            if all(one.settled for one in seen):
                return ""
            stopped = [f"{one.name}: {one.stopped}" for one in seen if one.stopped]
            if stopped and all(one.settled or one.stopped for one in seen):
                return "; ".join(stopped)
            taken_s = time.monotonic() - began
            if taken_s >= timeout_s:
                return f"not every node is ready after {duration(timeout_s)}; it goes on"
            time.sleep(min(POLL_S, timeout_s - taken_s))


EXAMPLE = """\
examples:
  pointsman build examples/diamond.py:dag -o deployment.yaml
  pointsman deploy deployment.yaml
  pointsman deploy deployment.yaml --wait 10m --json
"""


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "deploy",
        summary="put an application in force on a running plane",
        description="Touch only the nodes that differ, without dropping a request, and wait until all their replicas "
        "are ready, or until a new version has failed to start and the one before serves on. Deploying the same file "
        "twice does nothing.",
        example=EXAMPLE,
    )
    add_file(parser, "an application, as pointsman build writes it")
    add_waiting(parser)
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """1 if a node is not ready in time, or its rollout was stopped."""
    from pointsman.cli.client import NoPlane, client_of
    from pointsman.errors import PointsmanError

    document, plan = read_manifest(args.file)
    if not plan.application_alone:
        raise PointsmanError(f"{args.file} is a manifest; pointsman apply puts it in force")
    try:
        client = client_of(args)
        answer = client.post("applications", body=document)
    except NoPlane as nobody:
        if args.url:
            raise
        raise NoPlane(nobody.found, f"start one with it: pointsman up {args.file}") from None
    return follow(client, plan.applications[0].name, answer, args, plan.notes)
