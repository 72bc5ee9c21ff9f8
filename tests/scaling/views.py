"""Views by hand, with only what matters in them."""

from typing import Any

from pointsman.scaling import DeploymentView, Window

NOON = 1_741_176_000.0
"""Wednesday, 5 March 2025, 12:00 UTC."""


def view(**facts: Any) -> DeploymentView:
    """A deployment of two replicas at noon, in which nothing is going on."""
    usual: dict[str, Any] = {"name": "chat", "now": NOON, "replicas": 2, "target": 2, "max_replicas": 20}
    return DeploymentView(**usual | facts)


def flat(value: float, seconds: float = 300.0) -> Window:
    """It was this all the time."""
    return Window(seconds, value, value, value, value, value, value, 100)
