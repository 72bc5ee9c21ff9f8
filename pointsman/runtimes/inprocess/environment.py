"""The environment variables of nodes that run in this process. Each node adds its own to those of the process.

`os.environ` is one object for all threads. While code of a node with variables runs, `os.environ` shows these variables
too, and variables that the code sets stay with the node. Libraries written in C read the environment of the process,
which has none of these variables.
"""

import os
from collections.abc import Iterator, MutableMapping
from typing import Any

from pointsman.pipeline.context import CURRENT


class NodeEnvironment(type(os.environ)):  # type: ignore[misc]
    """`os.environ`, with the variables of the current node first."""

    def __getitem__(self, key: str) -> str:
        own = CURRENT.get().env
        if own is not None and key in own:
            value = own[key]
            if value is None:
                raise KeyError(key)
            return value
        found: str = super().__getitem__(key)
        return found

    def __setitem__(self, key: str, value: str) -> None:
        own = CURRENT.get().env
        if own is None:
            super().__setitem__(key, value)
        elif type(value) is not str:
            raise TypeError(f"str expected, not {type(value).__name__}")
        else:
            own[key] = value

    def __delitem__(self, key: str) -> None:
        own = CURRENT.get().env
        if own is None:
            super().__delitem__(key)
        else:
            self[key]
            own[key] = None

    def __iter__(self) -> Iterator[str]:
        own = CURRENT.get().env
        if own is None:
            yield from super().__iter__()
            return
        yield from (key for key in super().__iter__() if key not in own)
        yield from (key for key, value in own.items() if value is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def environment_of(variables: Any) -> MutableMapping[str, str | None] | None:
    """The value of `CallContext.env` for a node with these variables; None if the node has no variables."""
    if not variables:
        return None
    if type(os.environ) is not NodeEnvironment:
        os.environ.__class__ = NodeEnvironment
    return dict(variables)
