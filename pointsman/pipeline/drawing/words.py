"""What is said above a picture."""

from pointsman.pipeline.graph import Graph, NodeKind


def headline(graph: Graph) -> str:
    """How large it is."""
    replicas = sum(
        node.options.num_replicas * node.options.shards for node in graph.nodes if node.kind is not NodeKind.MODEL
    )
    replicas += graph.ingress.num_replicas if graph.has_ingress else 0
    return ", ".join(
        [counted(len(graph.calls), "call"), counted(len(graph.nodes), "node"), counted(replicas, "process")]
    )


def counted(count: int, what: str) -> str:
    """1 call, 2 calls, 3 processes."""
    ending = "" if count == 1 else "es" if what.endswith("s") else "s"
    return f"{count} {what}{ending}"
