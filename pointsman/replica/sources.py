"""Code of an earlier version, for a replica that starts after its files were edited.

Enters: `POINTSMAN_SOURCES`, the content of files as it was when the version took effect. Leaves: modules with that
content. They keep their own names and paths, so tracebacks name the right files, and the modules find other files in
their folders.
"""

import importlib.util
import linecache
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from pointsman.pipeline.sources import Sources


class KeptLoader(SourceFileLoader):
    """Loads a file with the content that it had when it was deployed."""

    def __init__(self, fullname: str, path: str, content: bytes) -> None:
        super().__init__(fullname, path)
        self._content = content

    def get_data(self, path: str) -> bytes:
        return self._content if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType | None:
        """Code that is compiled from the kept content. A file of bytecode would have the present content."""
        lines = self._content.decode("utf-8", "replace").splitlines(keepends=True)
        linecache.cache[self.path] = (len(self._content), None, lines, self.path)
        return self.source_to_code(self._content, self.path)


class KeptFinder:
    """Finds modules among kept sources before Python looks at the files."""

    def __init__(self, sources: Sources) -> None:
        self.sources = {str(path.resolve()): content for path, content in sources.items()}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.rpartition(".")[2]
        for folder in sys.path if path is None else path:
            for tail in (f"{name}/__init__.py", f"{name}.py"):
                found = self.spec_of(fullname, Path(folder, tail).resolve())
                if found is not None:
                    return found
        return None

    def spec_of(self, fullname: str, file: Path) -> ModuleSpec | None:
        """The spec of a file; None if its content was not kept."""
        content = self.sources.get(str(file))
        if content is None:
            return None
        loader = KeptLoader(fullname, str(file), content)
        inside = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=inside)


def install(sources: Sources) -> None:
    sys.meta_path.insert(0, KeptFinder(sources))


def kept_finder() -> KeptFinder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, KeptFinder)), None)
