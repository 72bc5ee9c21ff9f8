"""`pointsman deploy FILE`: deploy an application to a running plane."""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from pointsman.cli.manifest import add_file, add_yes, as_json, confirmed, read_manifest
from pointsman.cli.options import add_command, add_connection, time_span

if TYPE_CHECKING:
    from pointsman.cli.client import Client
    from pointsman.cli.display import DeploymentRow
    from pointsman.config import ConfigWarning

EXAMPLE = """\
examples:
  pointsman build examples/diamond.py:dag -o deployment.yaml
  pointsman deploy deployment.yaml
  pointsman deploy deployment.yaml --wait 10m --json
"""

POLL_S = 0.2
AFTER_TRACEBACK = ("the replica cannot start", "[pointsman]")
"""Prefixes of the log lines that follow the traceback of a node's code."""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "deploy",
        summary="deploy an application to a running plane",
        description="Replace only the nodes that differ, without dropping a request, and wait until all their "
        "replicas are ready, or until a new version has failed to start and the previous one keeps serving. Deploying "
        "the same file twice changes nothing.",
        example=EXAMPLE,
    )
    add_file(parser, "an application, as build writes it")
    add_yes(parser)
    add_waiting(parser)
    add_connection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a node is not ready in time, or if a node's rollout was stopped."""
    from pointsman.cli.client import NoPlane, client_of
    from pointsman.errors import PointsmanError, command

    document, plan = read_manifest(args.file)
    if not plan.application_alone:
        raise PointsmanError(f"{args.file} is a manifest, not an application; use: {command('apply', str(args.file))}")
    try:
        client = client_of(args)
        answer = confirmed(lambda said: client.post("applications", body=document | {"confirmation": said}), args)
    except NoPlane as error:
        if args.url:
            raise
        raise NoPlane(error.found, f"start one with it: {command('up', str(args.file))}") from None
    return follow(client, plan.applications[0].name, answer, args, plan.warnings)


def add_waiting(parser: argparse.ArgumentParser) -> None:
    waiting = parser.add_mutually_exclusive_group()
    waiting.add_argument(
        "--wait",
        type=time_span,
        default=300.0,
        metavar="TIME",
        help="maximum time to wait for the rollout (default 5m)",
    )
    waiting.add_argument("--no-wait", dest="wait", action="store_const", const=0.0, help="do not wait")


def follow(
    client: "Client",
    name: str,
    answer: dict[str, Any],
    args: argparse.Namespace,
    warnings: "Sequence[ConfigWarning]" = (),
) -> int:
    """Print the changes and follow the rollout. Returns 1 if the rollout fails or is not finished in time."""
    from pointsman.errors import command

    if not args.json:
        print(answer["text"] if answer["changes"] else f"no changes: this version of {name} is already deployed")
        for warning in warnings:
            print(warning)
    result: dict[str, Any] = {"application": name, "changes": answer["changes"], "warnings": as_json(warnings)}
    code = 0
    if args.wait:
        problem, deployments = _wait(client, name, args.wait, sys.stderr if args.json else sys.stdout)
        result |= {"ready": not problem, "problem": problem, "deployments": deployments}
        if problem and not args.json:
            print(f"pointsman: {problem}; see: {command('status', name)}", file=sys.stderr)
        code = 1 if problem else 0
    if args.json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    return code


def _wait(client: "Client", name: str, timeout_s: float, out: TextIO) -> tuple[str, list[dict[str, Any]]]:
    """Wait until all deployments are ready. Returns the problem and the last status of the deployments.

    The problem is empty if there is none.
    """
    from pointsman.cli.display import MAX_STARTS, Condition, DeploymentRow, duration
    from pointsman.cli.progress import show_change

    began, shown = time.monotonic(), dict[str, Condition]()
    while True:
        deployments = client.get("applications", name)["deployments"]
        rows = [DeploymentRow(one) for one in deployments]
        for one in rows:
            show_change(one, shown, out)
        if all(one.settled for one in rows):
            return "", deployments
        stopped = [f"{one.name}: {one.stopped}" for one in rows if one.stopped]
        if stopped and all(one.settled or one.stopped for one in rows):
            return "; ".join(stopped), deployments
        failing = [one for one in rows if one.failing]
        if failing and all(one.settled or one.stopped or one.failing for one in rows):
            _show_tracebacks(client, failing, out)
            reasons = "; ".join(f"{one.name}: {one.failing.reason}" for one in failing if one.failing)
            return f"{reasons}; it is tried again, and has failed {MAX_STARTS} times", deployments
        taken_s = time.monotonic() - began
        if taken_s >= timeout_s:
            return f"not every node is ready after {duration(timeout_s)}; the rollout continues", deployments
        time.sleep(min(POLL_S, timeout_s - taken_s))


def _show_tracebacks(client: "Client", failing: "Sequence[DeploymentRow]", out: TextIO) -> None:
    """Print the traceback from each failing node's code. It comes from the log of the node's last start."""
    from pointsman.cli.logs import lines_of

    for one in failing:
        if one.failing is None:
            continue
        lines = lines_of(client.get("instances", one.failing.name, "logs", lines=200))
        starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
        if starts:
            raised = itertools.takewhile(lambda line: not line.startswith(AFTER_TRACEBACK), lines[starts[-1] :])
            print(*[f"{one.failing.name}: {line}" for line in raised], sep="\n", file=out, flush=True)
