"""Waiting for a plane to get where it should be, with a line for everything that happens on the way."""

import time
from typing import Any, TextIO

from pointsman.cli.client import Client
from pointsman.cli.display import DeploymentRow, deployments_of

POLL_S = 0.2


class Progress:
    """Looks at a plane again and again."""

    def __init__(self, client: Client, out: TextIO) -> None:
        self.status: dict[str, Any] = {}
        """As it was last seen."""
        self._client = client
        self._out = out
        self._said: dict[str, str] = {}

    def wait(self, timeout_s: float) -> bool:
        """Whether everything was ready in time."""
        began = time.monotonic()
        while True:
            self.status = self._client.get("status")
            deployments = deployments_of(self.status)
            taken_s = time.monotonic() - began
            for deployment in deployments:
                self._tell(deployment)
            if all(deployment.settled for deployment in deployments):
                return True
            if taken_s >= timeout_s:
                return False
            time.sleep(min(POLL_S, timeout_s - taken_s))

    def _tell(self, deployment: DeploymentRow) -> None:
        """Say where it is, if that is news; one that was settled from the start is none."""
        gist, before = deployment.gist, self._said.get(deployment.name)
        if gist != before and not (before is None and deployment.settled):
            print(f"{deployment.name}: {deployment.in_words()}", file=self._out, flush=True)
        self._said[deployment.name] = gist
