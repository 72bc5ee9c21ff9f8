"""Imports go downwards only, and what runtimes stand on knows neither clock nor socket nor chance.

Both tests read the source; nothing is imported.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.house import PACKAGE, SOURCES, nodes_of, tree_of

FLOOR = {"types", "errors", "parameters", "reasons", "render", "selection"}
DECIDERS = {"routing", "strategies", "placement", "scaling", "pipeline"}
PURE = FLOOR | DECIDERS | {"engines", "control", "config"}
"""What runtimes stand on."""
MAY_IMPORT: dict[str, set[str]] = {
    "types": {"reasons"},
    "errors": set(),
    "parameters": set(),
    "render": {"types", "errors", "selection", "placement", "pipeline"},
    "reasons": {"render"},
    "selection": {"errors", "reasons"},
    "routing": FLOOR,
    "strategies": FLOOR | {"routing"},
    "placement": FLOOR - {"render"},
    "scaling": FLOOR,
    "pipeline": FLOOR - {"render"},
    "engines": FLOOR | {"routing", "placement"},
    "control": FLOOR | DECIDERS | {"engines"},
    "config": PURE,
    "http": {"errors"},
    "wire": {"errors", "http", "pipeline", "types"},
    "replica": PURE | {"http", "wire"},
    "simulator": {"errors", "http", "types"},
    "runtimes": PURE | {"http", "wire", "replica", "simulator"},
    "gateway": PURE | {"http", "wire", "replica", "runtimes"},
    "lab": PURE | {"runtimes", "simulator"},
    "integrations": PURE | {"http", "wire", "replica", "runtimes", "gateway", "lab"},
    "cli": PURE | {"http", "runtimes", "gateway", "lab", "integrations"},
}
"""Room -> rooms that it may know besides itself."""

WORLD = {
    "time", "datetime", "random", "secrets", "uuid", "socket", "select", "selectors", "ssl", "http", "urllib",
    "asyncio", "threading", "multiprocessing", "subprocess", "signal", "concurrent", "numpy.random",
}  # fmt: skip
"""Modules through which the world gets in."""
GIVEN = {("scaling/calendar.py", "datetime")}
"""Calendars, for moments that are given: see the test of their clocks."""
STAMPED = {("types.py", "time")}
"""The stamp of a request that is made without an arrival time. A dispatcher replaces it with its own time before it
decides; tests/strategies/test_published_interface.py checks that."""
PROGRAMS = {"engines/llama_cpp_server.py"}
"""Run as processes of their own and imported by nothing."""


def sources(room: str) -> list[Path]:
    folder = PACKAGE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{room}.py"]


def rooms() -> list[str]:
    """Every folder and module of the package that is there today."""
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return sorted(names - {"__init__", "__main__"})


def imported(source: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import, wherever in the file it stands."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: imports are absolute here"
            yield from ((f"{node.module}.{name.name}", node.lineno) for name in node.names)


RAY = ("integrations/ray_serve/", "runtimes/ray/")
"""Only these import Ray, which is an extra."""


def test_only_its_own_folders_import_ray() -> None:
    importing = [
        f"{source.relative_to(PACKAGE)}:{line}"
        for source in SOURCES
        if not str(source.relative_to(PACKAGE)).startswith(RAY)
        for module, line in imported(source)
        if module.split(".")[0] == "ray"
    ]
    assert importing == []


@pytest.mark.parametrize("module", ["pointsman", "pointsman.cli.main", "pointsman.integrations.ray_serve"])
def test_ray_is_imported_only_when_it_is_used(module: str) -> None:
    program = f"import sys, {module}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, check=False).returncode == 0


def test_every_room_is_in_the_plan() -> None:
    assert set(rooms()) <= MAY_IMPORT.keys()


@pytest.mark.parametrize("room", rooms())
def test_imports_go_downwards_only(room: str) -> None:
    upwards = [
        f"{source.relative_to(PACKAGE)}:{line} imports {module}"
        for source in sources(room)
        for module, line in imported(source)
        if module.startswith("pointsman.") and module.split(".")[1] not in MAY_IMPORT[room] | {room}
    ]
    assert upwards == []


@pytest.mark.parametrize("room", sorted(PURE & set(rooms())))
def test_no_clock_no_socket_no_chance_below_the_runtimes(room: str) -> None:
    worldly = [
        f"{source.relative_to(PACKAGE)}:{line} imports {module}"
        for source in sources(room)
        if str(source.relative_to(PACKAGE)) not in PROGRAMS
        for module, line in imported(source)
        if any(
            f"{module}.".startswith(f"{outside}.")
            and (str(source.relative_to(PACKAGE)), outside) not in GIVEN | STAMPED
            for outside in WORLD
        )
    ]
    assert worldly == []


@pytest.mark.parametrize("source", sorted({source for source, _ in GIVEN}))
def test_who_knows_the_calendar_asks_no_clock(source: str) -> None:
    asked = {node.attr for node in nodes_of(PACKAGE / source) if isinstance(node, ast.Attribute)}
    assert asked.isdisjoint({"now", "utcnow", "today"})


@pytest.mark.parametrize("room", sorted(PURE & set(rooms())))
def test_nothing_waits_below_the_runtimes(room: str) -> None:
    waiting = [
        f"{source.relative_to(PACKAGE)}:{node.lineno}"
        for source in sources(room)
        for node in nodes_of(source)
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith)
    ]
    assert waiting == []


@pytest.mark.parametrize("room", sorted(PURE & set(rooms())))
def test_nothing_lives_at_module_level(room: str) -> None:
    """State has four homes, and a module is none of them: what is assigned there is never a bare container to fill."""
    homes = [
        f"{source.relative_to(PACKAGE)}:{node.lineno}"
        for source in sources(room)
        for node in tree_of(source).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Dict | ast.List | ast.Set)
        and not (node.value.keys if isinstance(node.value, ast.Dict) else node.value.elts)
    ]
    assert homes == []
