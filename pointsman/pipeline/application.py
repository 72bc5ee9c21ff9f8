"""An application: a named graph whose nodes can be configured; it can be deployed, drawn, and written as YAML."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from pointsman.errors import UnknownName
from pointsman.pipeline.building import INGRESS, bound_graph
from pointsman.pipeline.context import loading_stops_here
from pointsman.pipeline.graph import Graph, NodeKind
from pointsman.pipeline.options import NodeOptions


class Application:
    """A built pipeline. Its nodes are attributes, and items: a node called `draw` is `app["draw"]`."""

    def __init__(self, name: str, graph: Graph, folder: Path) -> None:
        self.name = name
        self.graph = graph
        self.folder = folder
        """The folder to which paths of code files are relative."""

    def __getattr__(self, name: str) -> "ApplicationNode":
        if name.startswith("__"):
            raise AttributeError(name)
        return ApplicationNode(self, name)

    def __getitem__(self, name: str) -> "ApplicationNode":
        return ApplicationNode(self, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), INGRESS, *(node.name for node in self.graph.nodes)]

    def to_yaml(self) -> str:
        """The file for `pointsman deploy FILE`."""
        from pointsman.pipeline.document import to_yaml

        return to_yaml(self.name, self.graph)

    def draw(self, path: Path | str | None = None) -> str:
        """The graph as text for a terminal. With `path`, the text has the format of the path's suffix (.mmd, .dot,
        .txt), and is also written to that file."""
        drawing = import_module("pointsman.render.graph_text")
        return str(drawing.draw(self.name, self.graph, None if path is None else Path(path)))

    def to_ray_serve(self) -> Any:
        """The same application, bound for plain Ray Serve: pass it to `serve.run`. Needs Ray."""
        return import_module("pointsman.integrations.ray_serve.applications").to_ray_serve(self)

    def deploy(self, runtime: str = "local", **options: Any) -> Any:
        """Run the application, and return a handle to it. `options`: the options of the runtime."""
        loading_stops_here("deploy")
        return import_module("pointsman.gateway.deploying").deploy(self, runtime, **options)

    def __repr__(self) -> str:
        return f"<application {self.name}: {', '.join(node.name for node in self.graph.nodes)}>"


class ApplicationNode:
    def __init__(self, application: Application, name: str) -> None:
        names = [node.name for node in application.graph.nodes]
        if name not in (*names, INGRESS):
            raise UnknownName("node", name, [*names, INGRESS])
        self._application = application
        self.name = name

    @property
    def options(self) -> NodeOptions:
        graph = self._application.graph
        return graph.ingress if self.name == INGRESS else graph.node(self.name).options

    def set_options(self, **changes: Any) -> None:
        graph, options = self._application.graph, self.options.changed(changes)
        if self.name == INGRESS:
            self._application.graph = msgspec.structs.replace(graph, ingress=options)
            return
        nodes = (
            msgspec.structs.replace(node, options=options) if node.name == self.name else node for node in graph.nodes
        )
        self._application.graph = msgspec.structs.replace(graph, nodes=tuple(nodes))


def build(root: Any, *, name: str = "", folder: Path | str | None = None) -> Application:
    """Build an application from bound objects. Raises `BuildError` with all problems.

    `name`: by default the name of the application's code file. `folder`: the folder to which paths of code files are
    relative; by default the current folder.
    """
    if isinstance(root, Application):
        return root
    there = Path.cwd() if folder is None else Path(folder)
    graph = bound_graph(root, there).graph
    return Application(name or _name_of(graph), graph, there)


def _name_of(graph: Graph) -> str:
    """The name of the code file of the last call; calls of models do not count."""
    owners = (graph.node(call.node) for call in reversed(graph.calls))
    where = next((owner.code.rpartition(":")[0] for owner in owners if owner.kind is not NodeKind.MODEL), "")
    stem = Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]
    if stem in ("app", "main", "__main__") and "/" in where:
        stem = Path(where).parent.name
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_") or "app"
