"""Handles of pipelines that run in this process: a call of a node is a call of its method."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from pointsman.pipeline import Node
from pointsman.pipeline.graph import CALL


class InProcessMethods(Protocol):
    """Whoever knows the methods of nodes."""

    def method(self, node: str, method: str, rank: int | None = None) -> Callable[..., Any]: ...


class InProcessHandle:
    """A node, for code that calls it: `await handle.method(x)`, or `handle.method.remote(x).result()`."""

    def __init__(self, methods: InProcessMethods, node: Node) -> None:
        self._methods = methods
        self._node = node

    def __getattr__(self, name: str) -> "InProcessMethod":
        if name.startswith("_"):
            raise AttributeError(name)
        return InProcessMethod(self._methods, self._node, name)

    def __call__(self, *args: Any, **kwargs: Any) -> "InProcessResponse":
        return InProcessMethod(self._methods, self._node, CALL)(*args, **kwargs)

    def remote(self, *args: Any, **kwargs: Any) -> "InProcessResponse":
        return self(*args, **kwargs)


class InProcessMethod:
    """A method of a node."""

    def __init__(self, methods: InProcessMethods, node: Node, name: str) -> None:
        self._methods = methods
        self._node = node
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> "InProcessResponse":
        return InProcessResponse(lambda: self._called(args, kwargs))

    def remote(self, *args: Any, **kwargs: Any) -> "InProcessResponse":
        return self(*args, **kwargs)

    async def stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Piece by piece, what a generator yields."""
        result = self._methods.method(self._node.name, self._name)(*args, **kwargs)
        if hasattr(result, "__aiter__"):
            async for piece in result:
                yield piece
        else:
            for piece in result:
                yield piece

    async def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shards = self._node.options.shards
        if shards == 1:
            return await _result(self._methods.method(self._node.name, self._name)(*args, **kwargs))
        ranks = [self._methods.method(self._node.name, self._name, rank) for rank in range(shards)]
        parts = await asyncio.gather(*(_result(one(*args, **kwargs)) for one in ranks))
        if not self._node.joins:
            return list(parts)
        return await _result(self._methods.method(self._node.name, "join", 0)(list(parts)))


class InProcessResponse:
    """What a call will return."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, None, Any]:
        return self._call().__await__()  # type: ignore[no-any-return]

    def result(self, timeout_s: float | None = None) -> Any:
        """The result, waited for."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, self._call()).result(timeout_s)


async def _result(found: Any) -> Any:
    if inspect.isawaitable(found):
        return await found
    if hasattr(found, "__aiter__"):
        return [piece async for piece in found]
    return list(found) if inspect.isgenerator(found) else found
