"""Views with only the fields that matter."""

from typing import Any

from pointsman.scaling import DeploymentView, Window

NOON = 1_741_176_000.0
"""Wednesday, 5 March 2025, 12:00 UTC."""


def view(**facts: Any) -> DeploymentView:
    """An idle deployment of two replicas at noon."""
    usual: dict[str, Any] = {"name": "chat", "now": NOON, "replicas": 2, "target": 2, "max_replicas": 20}
    return DeploymentView(**usual | facts)


def flat(value: float, seconds: float = 300.0) -> Window:
    """A window of a constant value."""
    return Window(seconds, value, value, value, value, value, value, 100)
