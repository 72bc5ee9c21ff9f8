"""The simulation decides nothing by itself: it runs the dispatcher, the controller and the policies of the product."""

import ast
from collections.abc import Iterator

from tests.architecture.house import PACKAGE, modules, nodes_of
from tests.architecture.test_layers import imported

SIMULATION = "pointsman.runtimes.simulation"
MACHINES = {"Dispatcher", "Controller", "Sender", "RequestTable", "Placer", "Autoscaler", "Scheduler"}
"""What decides. Each is defined once, outside the simulation."""

NAMES = {"pointsman.routing.handlers.disagg.PREFILLER", "pointsman.routing.handlers.disagg.address"}
"""A header, and how it names an endpoint."""


def nodes() -> Iterator[ast.AST]:
    """Of all files of the simulation."""
    for name, source in modules().items():
        if name.startswith(SIMULATION):
            yield from nodes_of(source)


def test_what_decides_is_defined_once_and_not_in_the_simulation() -> None:
    defined: dict[str, list[str]] = {name: [] for name in MACHINES}
    for module, source in modules().items():
        for node in nodes_of(source):
            if isinstance(node, ast.ClassDef) and node.name in MACHINES:
                defined[node.name].append(module)
    assert {name: len(found) for name, found in defined.items()} == dict.fromkeys(MACHINES, 1)
    assert [module for found in defined.values() for module in found if module.startswith(SIMULATION)] == []


def test_the_simulation_runs_the_plane_and_the_lanes_of_the_product() -> None:
    """`Plane` owns the controller, `Traffic` the dispatchers: both are imported and constructed, not replaced."""
    folder = PACKAGE / "runtimes" / "simulation"
    used = {module for source in folder.glob("*.py") for module, _ in imported(source)}
    assert {
        "pointsman.runtimes.plane.Plane",
        "pointsman.runtimes.traffic.Traffic",
        "pointsman.scaling.autoscaler.Autoscaler",
    } <= used
    made = {node.func.id for node in nodes() if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert {"Plane", "Traffic", "ControlLoop"} <= made


def test_the_simulation_subclasses_nothing_that_decides() -> None:
    """It could override a decision there."""
    bases = {
        base.id
        for node in nodes()
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name)
    }
    assert bases.isdisjoint(MACHINES | {"Plane", "Traffic", "Lane", "ControlLoop"})


def test_the_simulation_handles_no_scheduling_plugin() -> None:
    """Filters, scorers, pickers and strategies are the dispatcher's business. The name of a header is no plugin."""
    inside = ("routing.filters", "routing.scorers", "routing.handlers", "selection", "strategies", "placement.fit")
    found = [
        f"{source.name}:{line} imports {module}"
        for source in (PACKAGE / "runtimes" / "simulation").glob("*.py")
        for module, line in imported(source)
        if any(module.startswith(f"pointsman.{room}.") for room in inside) and module not in NAMES
    ]
    assert found == []
