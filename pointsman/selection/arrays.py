"""numpy, loaded when the first fleet is long enough to need it: most are not, and it takes time and memory to load."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["np"]


class _WhenNeeded(ModuleType):
    def __getattr__(self, name: str) -> Any:
        loaded = import_module(self.__name__)
        self.__dict__.update(loaded.__dict__)
        return getattr(loaded, name)


if TYPE_CHECKING:
    import numpy as np
else:
    np = _WhenNeeded("numpy")
