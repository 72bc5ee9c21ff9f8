"""Waiting until everything on a plane is ready, with a line for each change."""

import time
from typing import Any, TextIO

from pointsman.cli.client import Client
from pointsman.cli.display import DeploymentRow, deployments_of

POLL_S = 0.2


class Progress:
    """Polls the status of a plane."""

    def __init__(self, client: Client, out: TextIO) -> None:
        self.status: dict[str, Any] = {}
        """The newest."""
        self._client = client
        self._out = out
        self._shown: dict[str, str] = {}

    def wait(self, timeout_s: float) -> bool:
        """Whether everything was ready in time."""
        began = time.monotonic()
        while True:
            self.status = self._client.get("status")
            deployments = deployments_of(self.status)
            taken_s = time.monotonic() - began
            for deployment in deployments:
                self._show(deployment)
            if all(deployment.settled for deployment in deployments):
                return True
            if taken_s >= timeout_s:
                return False
            time.sleep(min(POLL_S, timeout_s - taken_s))

    def _show(self, deployment: DeploymentRow) -> None:
        """Print the state of a deployment, if it has changed; one that was settled from the start is left out."""
        gist, before = deployment.gist, self._shown.get(deployment.name)
        if gist != before and not (before is None and deployment.settled):
            print(f"{deployment.name}: {deployment.in_words()}", file=self._out, flush=True)
        self._shown[deployment.name] = gist
