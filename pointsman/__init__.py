"""Pointsman: a control plane for inference.

It places model instances, routes each request to the right one, scales them, and wires models into pipelines. Every
decision comes from a policy. You can replace a policy with a few lines of Python, rehearse it, and ask why it decided
as it did.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pointsman.integrations.ray_serve.graphs import from_ray_dag
    from pointsman.pipeline.application import Application, build
    from pointsman.pipeline.building import BuildError
    from pointsman.pipeline.context import current, record_metric
    from pointsman.pipeline.nodes import InputNode, deployment, model
    from pointsman.pipeline.options import batch
    from pointsman.reasons import Reason
    from pointsman.runtimes.inprocess import ControlPlaneManager
    from pointsman.strategies import SchedulingPolicy, Strategy
    from pointsman.types import ExecutionInstance, ParallelismType, RequestMetadata, RequestPriority, SchedulingDecision

__all__ = [
    "ControlPlaneManager",
    "RequestMetadata", "ExecutionInstance", "SchedulingDecision", "Reason", "RequestPriority", "ParallelismType",
    "SchedulingPolicy", "Strategy",
    "deployment", "InputNode", "model", "batch", "current", "record_metric", "build", "Application", "BuildError",
    "from_ray_dag",
]  # fmt: skip

_HOMES = {
    "ControlPlaneManager": "pointsman.runtimes.inprocess",
    "Reason": "pointsman.reasons",
    "SchedulingPolicy": "pointsman.strategies",
    "Strategy": "pointsman.strategies",
    "deployment": "pointsman.pipeline.nodes",
    "InputNode": "pointsman.pipeline.nodes",
    "model": "pointsman.pipeline.nodes",
    "batch": "pointsman.pipeline.options",
    "current": "pointsman.pipeline.context",
    "record_metric": "pointsman.pipeline.context",
    "from_ray_dag": "pointsman.integrations.ray_serve.graphs",
    "build": "pointsman.pipeline.application",
    "Application": "pointsman.pipeline.application",
    "BuildError": "pointsman.pipeline.building",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used. Without this, the command line would start slowly."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "pointsman.types")), name)
