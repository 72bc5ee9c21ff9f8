"""Runtimes are named in one place, and nothing above them assumes that a worker is this machine."""

import ast
from pathlib import Path

import pytest

from tests.architecture.house import PACKAGE, SOURCES, nodes_of

ROOTS = {
    "runtimes/choosing.py", "__init__.py", "pipeline/nodes.py", "lab/traffic/replay.py", "lab/traffic/__init__.py",
}  # fmt: skip
"""Composition roots: planes by name; the in-process manager and pipelines, imported when they are first used; replays,
which always run on virtual time."""
CONCRETE = tuple(f"pointsman.runtimes.{name}" for name in ("local", "ray", "simulation", "inprocess"))
ROOMS = ("control", "gateway", "scaling", "pipeline")
"""They reach workers through a runtime only."""
OF_THIS_MACHINE = ("/dev/shm", "127.0.0.1", "localhost", ".sock", "/proc/", "/tmp")
NAMES = {"pid", "getpid", "killpg", "AF_UNIX", "create_unix_server", "create_unix_connection", "shm", "mkdtemp"}


def sources(*rooms: str) -> list[Path]:
    return sorted(source for room in rooms for source in (PACKAGE / room).rglob("*.py"))


def place(source: Path, node: ast.AST) -> str:
    return f"{source.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"


def test_concrete_runtimes_are_named_in_composition_roots_only() -> None:
    found = []
    for source in SOURCES:
        inside = source.relative_to(PACKAGE)
        if str(inside) in ROOTS:
            continue
        own = f"pointsman.runtimes.{inside.parts[1]}" if inside.parts[0] == "runtimes" and len(inside.parts) > 2 else ""
        for node in nodes_of(source):
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{name.name}" for name in node.names]
            elif isinstance(node, ast.Import):
                modules = [name.name for name in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                modules = [node.value]  # import_module("...")
            else:
                continue
            found += [
                f"{place(source, node)} names {module}"
                for module in modules
                if module.startswith(CONCRETE) and not (own and f"{module}.".startswith(f"{own}."))
            ]
    assert found == []


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_above_runtimes_assumes_that_a_worker_is_this_machine(room: str) -> None:
    found = []
    for source in sources(room):
        nodes = nodes_of(source)
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                found += [f"{place(source, node)} says {word}" for word in OF_THIS_MACHINE if word in node.value]
            name = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "arg", None)
            if name in NAMES:
                found.append(f"{place(source, node)} uses {name}")
    assert found == []


def test_traffic_and_the_control_loop_read_no_clock() -> None:
    """So that a simulation runs the same classes on virtual time."""
    for name in ("traffic.py", "serving.py", "control_loop.py", "instances.py", "interface.py"):
        text = (PACKAGE / "runtimes" / name).read_text(encoding="utf-8")
        assert "asyncio" not in text
        assert "import time" not in text
