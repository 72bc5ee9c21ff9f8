"""Measures the package by reading its source; nothing is imported."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

PACKAGE = Path(__file__).parents[2] / "pointsman"

SHORT_LINES = 60
MANY_METHODS = 12
LONG_LINES = 500


SOURCES = sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(source: Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"))


@cache
def nodes_of(source: Path) -> list[ast.AST]:
    """All nodes of its tree. Walking through the package takes as long as reading it."""
    return list(ast.walk(tree_of(source)))


@cache
def modules() -> dict[str, Path]:
    """Module name -> its file."""
    parts = {source: source.relative_to(PACKAGE.parent).with_suffix("").parts for source in SOURCES}
    return {".".join(names).removesuffix(".__init__"): source for source, names in parts.items()}


@cache
def lines() -> dict[str, int]:
    """Module name -> its number of lines."""
    return {module: source.read_text(encoding="utf-8").count("\n") for module, source in modules().items()}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """(module, class) for every class, wherever in its module it stands."""
    for module, source in modules().items():
        yield from ((module, node) for node in nodes_of(source) if isinstance(node, ast.ClassDef))


def importers() -> dict[str, set[str]]:
    """Module -> the modules that import it."""
    found = defaultdict[str, set[str]](set)
    for module, source in modules().items():
        for node in nodes_of(source):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                for name in names:
                    found[name if name in modules() else node.module].add(module)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.name].add(module)
    return found


def repeated_class_names() -> list[str]:
    """Class names that are defined more than once."""
    counts = Counter(node.name for _, node in classes())
    return sorted(name for name, count in counts.items() if count > 1)


def classes_with_many_methods() -> list[str]:
    """Classes with more than `MANY_METHODS` methods."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return sorted(
        f"{module}.{node.name}"
        for module, node in classes()
        if sum(isinstance(member, functions) for member in node.body) > MANY_METHODS
    )


LISTS = {
    "pointsman.cli.main",
    "pointsman.engines",
    "pointsman.placement.fit",
    "pointsman.routing.filters",
    "pointsman.routing.handlers",
    "pointsman.routing.producers",
    "pointsman.routing.scorers",
    "pointsman.scaling",
}
"""Modules that list plugins or commands. Each of these has a file of its own, because people look for it by name."""


def short_modules_with_one_importer() -> dict[str, str]:
    """Modules of at most `SHORT_LINES` lines that a single module imports, and that one."""
    by = importers()
    return {
        module: next(iter(by[module] - {module}))
        for module, count in lines().items()
        if count <= SHORT_LINES and len(by[module] - {module}) == 1 and not _is_package(module)
    }


def fragments() -> list[str]:
    """Short modules with one importer that are neither a plugin nor a command: they belong to their importer."""
    return sorted(module for module, importer in short_modules_with_one_importer().items() if importer not in LISTS)


def long_modules() -> list[str]:
    """Modules of more than `LONG_LINES` lines."""
    return sorted(module for module, count in lines().items() if count > LONG_LINES)


HTTP_MODULES = ("httptools", "http.client", "http.server", "urllib.request", "h11")


def http_in(module: str) -> Iterator[tuple[int, str]]:
    """(line, what) where a module speaks HTTP by itself: imports a parser or a client, or writes a status line."""
    for node in nodes_of(modules()[module]):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in HTTP_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in HTTP_MODULES:
            yield node.lineno, node.module
        elif isinstance(node, ast.Constant) and isinstance(node.value, bytes) and b"HTTP/1." in node.value:
            yield node.lineno, node.value.decode("latin-1")


def _is_package(module: str) -> bool:
    return (PACKAGE.parent / Path(*module.split(".")) / "__init__.py").exists()


KEEPS = ("keep", "complete", "every")
"""The methods of `Tasks` that start background work; the first argument is its name."""


def kept_in(module: str) -> set[str]:
    """Patterns of the names of the background tasks that a module starts, as `gateway/process.py`."""
    return {name for node in nodes_of(PACKAGE / module) if (name := _task_name(node, PACKAGE / module))}


def _task_name(node: ast.AST, source: Path) -> str:
    """Empty: it does not start a task."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KEEPS):
        return ""
    if not re.search(r"\b_?(tasks|background)$", ast.unparse(node.func.value)):
        return ""
    name = node.args[0]
    if isinstance(name, ast.Name):
        [name] = [
            one.value
            for one in nodes_of(source)
            if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == name.id
        ]
    if isinstance(name, ast.JoinedStr):
        return "".join(re.escape(str(one.value)) if isinstance(one, ast.Constant) else ".+" for one in name.values)
    assert isinstance(name, ast.Constant), f"a name that is not written here: {ast.unparse(name)}"
    return re.escape(str(name.value))


def main() -> None:
    """Print the figures."""
    sizes = lines().values()
    print("files", len(sizes))
    print("lines", sum(sizes))
    print("median", median(sizes))
    print(f"modules of at most {SHORT_LINES} lines", sum(count <= SHORT_LINES for count in sizes))
    print("... with one importer", len(short_modules_with_one_importer()))
    print("... that are neither a plugin nor a command", len(fragments()))
    print("class names defined twice", len(repeated_class_names()))
    print(f"classes with more than {MANY_METHODS} methods", len(classes_with_many_methods()))
    print(f"modules of more than {LONG_LINES} lines", long_modules())


if __name__ == "__main__":
    main()
