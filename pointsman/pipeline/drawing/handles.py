"""Who has handles to whom: which nodes are drawn for their handles alone, and where a line would have to go back."""

from pointsman.pipeline.graph import Graph, HandleTo, references


class HandleEdges:
    """A line goes to a node that only holders call. A handle to a node that steps call as well, or back to a holder, is
    only noted: the box of a call is not what the handle calls, and lines go one way."""

    def __init__(self, graph: Graph) -> None:
        self._to: dict[str, list[str]] = {}
        templates = [(node.name, (node.args, node.kwargs)) for node in graph.nodes]
        templates += [(call.node, (call.args, call.kwargs)) for call in graph.calls]
        for holder, template in templates:
            known = self._to.setdefault(holder, [])
            found = (one.node for one in references(template) if isinstance(one, HandleTo))
            known += [name for name in dict.fromkeys(found) if name not in known]
        self._called = {call.node for call in graph.calls}
        self._seen: set[str] = set()
        self._left: list[str] = []
        for name in [*(call.node for call in reversed(graph.calls)), *(node.name for node in graph.nodes)]:
            self._visit(name)
        self.only_held = [name for name in reversed(self._left) if name not in self._called]
        """Holders before those whom they hold, as far as there is such an order."""
        places = {name: place for place, name in enumerate(self.only_held)}
        self._line = {
            (holder, target)
            for holder, targets in self._to.items()
            for target in targets
            if target in places and places.get(holder, -1) < places[target]
        }

    def _visit(self, name: str) -> None:
        if name in self._seen:
            return
        self._seen.add(name)
        for target in reversed(self._to[name]):  # both backwards: what is left first comes last
            self._visit(target)
        self._left.append(name)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """(holder, held), in order."""
        pairs = [(holder, target) for holder, targets in self._to.items() for target in targets]
        return [pair for pair in pairs if pair in self._line]

    def notes(self, holder: str) -> list[str]:
        """Those to whom there is no line."""
        return [target for target in self._to[holder] if (holder, target) not in self._line]
