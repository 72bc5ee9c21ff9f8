"""Loads user code named `module:Name` or `path/to/file.py:Name`.

Enters: names. Leaves: classes and functions. The one rule: a script is loaded only until it has defined what is wanted;
loading stops where the script would run its own pipeline.
"""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

from pointsman.errors import PointsmanError, did_you_mean
from pointsman.pipeline.context import LOADING, LoadedEnough, Loading


class LoadFailed(PointsmanError):
    """Code cannot be loaded, or its object cannot be made; the message says where."""


def load(codes: Iterable[str], folder: str) -> list[Any]:
    """The classes and functions of these names, in order. Raises `LoadFailed`."""
    if folder:
        _find_from(folder)
    split = [_split(code) for code in codes]
    wanted: dict[str, set[str]] = {}
    for module, name in split:
        wanted.setdefault(module, set()).add(name.partition(".")[0])
    modules = {module: _module(module, Path(folder), frozenset(names)) for module, names in wanted.items()}
    return [_named(modules[module], module, name) for module, name in split]


def first_own_frame(error: BaseException, files: Iterable[str] = ()) -> str:
    """file:line where an error was raised: the innermost frame in these files, else the innermost frame."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    known = [frame for frame in frames if frame.filename in set(files)]
    return next((f"{frame.filename}:{frame.lineno}" for frame in reversed(known or frames)), "")


def _split(code: str) -> tuple[str, str]:
    module, _, name = code.rpartition(":")
    if not module or not name:
        raise LoadFailed(f'"{code}" names no code; write module:Name or path/to/file.py:Name')
    return module, name


def _module(module: str, folder: Path, wanted: frozenset[str]) -> ModuleType:
    if module.endswith(".py"):
        path = (folder / module).resolve()
        if not path.is_file():
            raise LoadFailed(f"{module} does not exist (looked for {path})")
        _find_from(str(path.parent))
        return _executed(_spec_of_file(path), module, wanted)
    known = sys.modules.get(module)
    if known is not None:
        return known
    try:
        spec = importlib.util.find_spec(module)
    except Exception as error:  # a parent package is missing, or raises
        raise _failed(module, error) from error
    if spec is None or spec.loader is None:
        raise LoadFailed(f"there is no module {module} (looked in {', '.join(sys.path)})")
    loaded = _executed(spec, module, wanted)
    parent, _, last = module.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, loaded)
    return loaded


def _spec_of_file(path: Path) -> ModuleSpec:
    """A spec with the name that an import from its own folder would give it, unless another module has that name."""
    name = path.stem
    try:
        own = name.isidentifier() and name not in sys.stdlib_module_names and name != "__main__"
        found = importlib.util.find_spec(name) if own else None
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None or Path(found.origin).resolve() != path:
        name = f"_pointsman_{crc32(str(path).encode()):08x}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    return spec


def _executed(spec: ModuleSpec, where: str, wanted: frozenset[str]) -> ModuleType:
    """The module, executed to its end, or until it has defined what is wanted and would run its pipeline."""
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    sys.modules[spec.name] = module
    token = LOADING.set(Loading(where, wanted, vars(module)))
    try:
        spec.loader.exec_module(module)
    except LoadedEnough:
        pass
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise _failed(where, error) from error
    finally:
        LOADING.reset(token)
    return module


def _named(module: ModuleType, where: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = [known for known in dir(found) if not known.startswith("__")]
            raise LoadFailed(f'{where} has no "{name}"{did_you_mean(part, public)}') from None
        if hasattr(found, "__pointsman_deployment__"):
            found = found.body
    return found


def _failed(where: str, error: BaseException) -> LoadFailed:
    module_file = getattr(sys.modules.get(where), "__file__", "") or where
    files = {
        frame.filename for frame in traceback.extract_tb(error.__traceback__) if _is_same(frame.filename, module_file)
    }
    if isinstance(error, SystemExit):
        why = f"it called sys.exit({error.code!r}); put that under if __name__ == '__main__'"
    elif isinstance(error, PointsmanError):
        why = str(error)
    else:
        why = f"{type(error).__name__}: {error}"
    return LoadFailed(f"{first_own_frame(error, files) or where}: {why}")


def _is_same(file: str, other: str) -> bool:
    return Path(file).name == Path(other).name


def _find_from(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
