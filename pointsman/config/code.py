"""The user's code as part of a version: each module that a document names, and all user modules that it imports.

Enters: names as written in documents, `package.module:Name` or `path/file.py:Name`. Leaves: a digest of their files,
and modules that have the content of their files. The one rule: a module that was loaded is never changed. If the files
of a module have changed, a new module is loaded. Objects from the old module keep the code that they were made from.
"""

import ast
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from pointsman.pipeline.sources import MAX_KEPT_BYTES, Sources, pack_sources

LOADED = "__pointsman_code__"
"""The attribute of a module that holds the digest of the files that the module was loaded from."""
DIGITS = 12
INSTALLED = {"site-packages", "dist-packages"}
"""Names of folders with installed packages, in this environment and in one that it is based on."""
PACKAGE = __name__.partition(".")[0]
"""Our own package, which is not user code."""


IN_FORCE: ContextVar[Sources | None] = ContextVar("pointsman_sources", default=None)
"""The sources of the version that is being loaded. If None, the present content of the files is loaded."""


@contextmanager
def loaded_from(sources: Sources | None) -> Iterator[None]:
    """Load documents with the code in `sources`, even if its files were edited later."""
    token = IN_FORCE.set(sources)
    try:
        yield
    finally:
        IN_FORCE.reset(token)


class SourceTree:
    """The modules and files below some folders, and what they import from these folders."""

    def __init__(self, roots: Sequence[Path], sources: Sources | None = None) -> None:
        """`roots` are in the order in which Python searches them. `sources`, if given, replaces the files on disk."""
        self._roots = roots
        self._sources = sources
        self._imports: dict[Path, list[str]] = {}

    def _has(self, file: Path) -> bool:
        return file.is_file() if self._sources is None else file in self._sources

    def read(self, file: Path) -> bytes:
        """The content of a file. Raises OSError if the file cannot be read."""
        return file.read_bytes() if self._sources is None else self._sources[file]

    def file_of(self, module: str) -> Path | None:
        """The file of a module; None if the module is not below the folders."""
        first, *_ = parts = module.split(".")
        if first == PACKAGE or not all(part.isidentifier() for part in parts):
            return None
        end = module.replace(".", "/")
        candidates = (root / tail for root in self._roots for tail in (f"{end}/__init__.py", f"{end}.py"))
        return next((file for file in candidates if self._has(file)), None)

    def modules_of(self, start: str) -> dict[str, Path]:
        """A module and all modules that it imports, even indirectly, by name. `start` is a module name or a file."""
        found: dict[str, Path] = {}
        waiting = [start]
        while waiting:
            name = waiting.pop()
            file = self._roots[0] / name if name.endswith(".py") else self.file_of(name)
            if name in found or file is None or not self._has(file):
                continue
            found[name] = file
            waiting += self._imported(name, file)
        return found

    def _imported(self, name: str, file: Path) -> list[str]:
        if file not in self._imports:
            package = "" if name.endswith(".py") else name if file.name == "__init__.py" else name.rpartition(".")[0]
            found = {part for module in self._imports_in(file, package) for part in _with_packages(module)}
            self._imports[file] = sorted(found | set(_with_packages(package)))
        return self._imports[file]

    def _imports_in(self, file: Path, package: str) -> Iterator[str]:
        try:
            tree = ast.parse(self.read(file))
        except (OSError, SyntaxError, ValueError):  # loading the module reports the error
            return
        yield from _imported_by(tree, package)


def _imported_by(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)


def _with_packages(module: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c"""
    parts = module.split(".") if module else []
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def digest(files: Iterable[tuple[str, Path]], read: Callable[[Path], bytes] = Path.read_bytes) -> str:
    """A digest of the names and contents of files; empty if there are no files."""
    whole = sha256()
    found = sorted(files)
    for name, file in found:
        with suppress(OSError):
            content = read(file)
            whole.update(f"{name}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()[:DIGITS] if found else ""


def code_version(codes: Iterable[str], roots: Sequence[Path]) -> str:
    """A digest of the files that `codes` load. Each code is `package.module:Name` or `path/file.py:Name`."""
    return digest(_files_of(codes, roots))


def _files_of(codes: Iterable[str], roots: Sequence[Path], sources: Sources | None = None) -> set[tuple[str, Path]]:
    found = set()
    for start in [code.rpartition(":")[0] for code in codes if code]:
        beside = [(roots[0] / start).parent] if start.endswith(".py") else []  # replicas search there too
        found |= set(SourceTree([*roots[:1], *beside, *roots[1:]], sources).modules_of(start).items())
    return found


class CodeInForce:
    """A document's code at the time when the document took effect. Processes that start later load the same code."""

    def __init__(self, codes: Sequence[str], roots: Sequence[Path]) -> None:
        self._codes = codes
        self._roots = roots
        known = IN_FORCE.get()
        files = _files_of(codes, roots, known)
        self._seen = {file: _stamp(file) for _, file in files}
        _drop_stale_bytecode(self._seen)
        self.sources: dict[Path, bytes] = {}
        """The content of each file that can be read."""
        for _, file in files:
            with suppress(OSError):
                self.sources[file] = file.read_bytes() if known is None else known[file]
        self.version = digest(files, self._content)
        self._was_edited = known is not None and code_version(codes, roots) != self.version
        packed = pack_sources(self.sources)
        self.packed = packed if len(packed) <= MAX_KEPT_BYTES else ""
        """The packed sources, for replicas that start after an edit; empty if they are too large."""

    def is_edited(self) -> bool:
        """Whether the content of a file has changed. Reads the files only if one of them was written since."""
        if all(_stamp(file) == stamp for file, stamp in self._seen.items()):
            return self._was_edited
        _drop_stale_bytecode(self._seen)
        return code_version(self._codes, self._roots) != self.version

    def _content(self, file: Path) -> bytes:
        if file not in self.sources:
            raise FileNotFoundError(file)
        return self.sources[file]


def _drop_stale_bytecode(files: Iterable[Path]) -> None:
    """Remove compiled code that is older than its source. Python compares only whole seconds, so it might load it."""
    for file in files:
        with suppress(OSError, NotImplementedError):
            compiled = Path(importlib.util.cache_from_source(str(file)))
            if compiled.stat().st_mtime_ns < file.stat().st_mtime_ns:
                compiled.unlink()


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """A value that changes whenever the file is written; None if the file no longer exists."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


# Code that runs in this process: users' policies, plugins and engines


def own_roots() -> list[Path]:
    """The folders that Python loads the user's modules from, without the standard library and installed packages."""
    paths = [Path(path).absolute() for path in sysconfig.get_paths().values()]
    folders = [Path(entry).absolute() for entry in sys.path]
    own = [folder for folder in folders if folder.is_dir() and not INSTALLED & set(folder.parts)]
    return [folder for folder in own if not any(folder.is_relative_to(one) for one in paths)]


def load_module(name: str) -> ModuleType:
    """Load a module from its present files. If its code raises, the error is passed on and the old module stays."""
    tree = SourceTree(own_roots())
    versions = {module: digest(tree.modules_of(module).items()) for module in tree.modules_of(name)}
    there = {module: sys.modules[module] for module in versions if module in sys.modules}
    stale = {module: known for module, known in there.items() if _version(known, versions[module]) != versions[module]}
    for module, known in stale.items():
        del sys.modules[module]
        _forget_bytecode(known)
    importlib.invalidate_caches()
    try:
        loaded = importlib.import_module(name)
    except BaseException:
        sys.modules.update(stale)
        raise
    for module, version in versions.items():
        if module in sys.modules and LOADED not in vars(sys.modules[module]):
            setattr(sys.modules[module], LOADED, version)
    return loaded


def _version(module: ModuleType, default: str) -> str:
    return str(vars(module).get(LOADED, default))


def _forget_bytecode(module: ModuleType) -> None:
    """Remove a module's compiled code. Python would accept it if the source has the same size and was changed in the
    same second."""
    file = getattr(module, "__file__", None)
    if file is not None:
        with suppress(OSError, NotImplementedError):
            Path(importlib.util.cache_from_source(file)).unlink()


def code_in(section: Any) -> dict[str, str]:
    """The version of the code of each user class and function that a section of a document names."""
    roots = own_roots()
    return {name: version for name in sorted(set(_names(section))) if (version := code_version([name], roots))}


def _names(section: Any) -> Iterator[str]:
    if isinstance(section, dict):
        for field, value in section.items():
            if field in ("policy", "type") and isinstance(value, str) and ":" in value:
                yield value
            yield from _names(value)
    elif isinstance(section, list | tuple):
        for entry in section:
            yield from _names(entry)
