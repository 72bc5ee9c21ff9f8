"""Our policies on plain Ray Serve, and Ray graphs on our planes.

Enters: requests and measurements from Serve, and graphs that were written with Ray's or Serve's decorators. Leaves:
replicas for requests, numbers of replicas, Serve applications, and pipelines. The one rule: Serve runs everything, and
our code only decides. If a policy fails, Serve's default decides.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pointsman.integrations.ray_serve.applications import to_ray_serve
    from pointsman.integrations.ray_serve.graphs import ServeInputNode, from_ray_dag, pipeline
    from pointsman.integrations.ray_serve.records import explain, status
    from pointsman.integrations.ray_serve.router import PointsmanRouter, RefusedByPolicy, pointsman_routing
    from pointsman.integrations.ray_serve.scaling import pointsman_scaling

_HOMES = {
    "PointsmanRouter": "router",
    "RefusedByPolicy": "router",
    "pointsman_routing": "router",
    "pointsman_scaling": "scaling",
    "to_ray_serve": "applications",
    "from_ray_dag": "graphs",
    "ServeInputNode": "graphs",
    "pipeline": "graphs",
    "explain": "records",
    "status": "records",
}

__all__ = [
    "PointsmanRouter", "RefusedByPolicy", "pointsman_routing", "pointsman_scaling", "explain", "status",
    "to_ray_serve", "from_ray_dag", "ServeInputNode", "pipeline",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Look up a name when it is first used, so that Ray is imported only then."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
