"""Where code is, so that another process can load it, and which version of it that is."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

VERSION_DIGITS = 12


class Code(NamedTuple):
    """A class or function, for whoever must load it."""

    name: str
    """module:Name or path/to/file.py:Name."""
    version: str
    """Of the file that it is in."""
    root: str = ""
    """The folder that modules are found from; empty: they are installed."""


class NotImportable(ValueError):
    """Why no other process could load a piece of code."""


def code_of(body: Any, folder: Path) -> Code:
    """Where it is; files are named relative to the folder. Raises `NotImportable`."""
    name = getattr(body, "__qualname__", "")
    if not name or "<lambda>" in name:
        raise NotImportable("it has no name that another process could find it by; write a def or a class for it")
    if "<locals>" in name:
        raise NotImportable(f"{name.replace('.<locals>', '')} is defined inside a function; move it to module level")
    module = sys.modules.get(body.__module__)
    file = getattr(module, "__file__", None)
    if module is None or not file:
        raise NotImportable(f"it is defined in {body.__module__}, which is no file; save it in one")
    path = Path(file).resolve()
    version = file_version(path)
    spec = getattr(module, "__spec__", None)
    module_name = spec.name if spec is not None else body.__module__
    if _is_installed(path):
        return Code(f"{module_name}:{name}", version)
    if "." in module_name and (path.parent / "__init__.py").exists():
        root = path.parents[module_name.count(".") + (path.name == "__init__.py")]
        return Code(f"{module_name}:{name}", version, _relative(root, folder))
    return Code(f"{_relative(path, folder)}:{name}", version)


def file_version(path: Path) -> str:
    """The version of a file of code."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:VERSION_DIGITS]


def _is_installed(path: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or path.is_relative_to(Path(os.__file__).parent)


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder.resolve())).as_posix()
