"""Waits until everything on a plane is ready, and prints a line for each change."""

import time
from typing import Any, TextIO

from pointsman.cli.client import Client
from pointsman.cli.display import Condition, DeploymentRow, deployments_of

POLL_S = 0.2


def wait_until_ready(client: Client, timeout_s: float, out: TextIO) -> tuple[bool, dict[str, Any]]:
    """Whether everything was ready in time, and the newest status. Instances that cannot start are not waited for."""
    began, shown = time.monotonic(), dict[str, Condition]()
    while True:
        status = client.get("status")
        deployments = deployments_of(status)
        taken_s = time.monotonic() - began
        for deployment in deployments:
            show_change(deployment, shown, out)
        if all(deployment.settled for deployment in deployments):
            return True, status
        given_up = any(deployment.stopped for deployment in deployments)
        if taken_s >= timeout_s or (given_up and all(one.settled or one.stopped for one in deployments)):
            return False, status
        time.sleep(min(POLL_S, timeout_s - taken_s))


def show_change(deployment: DeploymentRow, shown: dict[str, Condition], out: TextIO) -> None:
    """Print the state of a deployment if it has changed. A deployment that was settled from the start is left out."""
    condition, before = deployment.condition, shown.get(deployment.name)
    if condition != before and not (before is None and deployment.settled):
        print(f"{deployment.name}: {deployment.in_words()}", file=out, flush=True)
    shown[deployment.name] = condition
