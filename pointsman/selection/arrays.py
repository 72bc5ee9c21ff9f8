"""numpy, loaded on first use: most fleets are too small to need it."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["np"]


class _LoadedOnUse(ModuleType):
    def __getattr__(self, name: str) -> Any:
        loaded = import_module(self.__name__)
        self.__dict__.update(loaded.__dict__)
        return getattr(loaded, name)


if TYPE_CHECKING:
    import numpy as np
else:
    np = _LoadedOnUse("numpy")
