"""Pipelines: models and plain Python, bound into a graph that runs in this process, on local replicas, or on Ray.

Enters: classes and functions of the user, bound to each other. Leaves: a `Graph` (frozen, the same as its YAML), a
`Flow` (the same graph, ready to run) and a `Run` of the flow. The one rule: nothing here calls the user's code; only
the runtime that carries out a run calls it.
"""

from pointsman.pipeline.flow import Flow, Run, Step, flow_of
from pointsman.pipeline.graph import Access, Call, FromInput, FromStep, Graph, HandleTo, Node, NodeKind
from pointsman.pipeline.options import NodeOptions

__all__ = [
    "Graph", "Node", "NodeKind", "NodeOptions", "Call", "FromInput", "FromStep", "HandleTo", "Access",
    "Flow", "Step", "flow_of",
    "Run",
]  # fmt: skip
