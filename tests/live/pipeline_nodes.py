"""Nodes of the pipelines that the live tests deploy. Replicas load this file by path."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

import pointsman as pm


@pm.deployment(idempotent=True)
class Model:
    def __init__(self, val: int) -> None:
        self.val = val

    def forward(self, value: int) -> int:
        return self.val * value

    async def forward_async(self, value: int, seconds: float = 0.01) -> int:
        await asyncio.sleep(seconds)
        return self.val * value

    def pid(self, _: Any) -> int:
        return os.getpid()


@pm.deployment(idempotent=True)
def ensemble(a: int, b: int, c: int = 0) -> int:
    return a + b + c


@pm.deployment
def total(values: Any) -> Any:
    return sum(values.values() if isinstance(values, dict) else values)


@pm.deployment
class Counter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self, _: Any) -> int:
        self.calls += 1
        return self.calls


@pm.deployment
class Streamer:
    def words(self, text: str) -> Iterator[str]:
        for word in text.split():
            yield f"{word} "

    async def numbers(self, to: int) -> AsyncIterator[dict[str, int]]:
        for number in range(to):
            await asyncio.sleep(0.001)
            yield {"number": number}

    def fails(self, after: int) -> Iterator[str]:
        for number in range(after):
            yield f"{number} "
        raise ValueError("no more")


@pm.deployment(max_concurrency=16)
class Batched:
    """Returns each result with the size of its batch."""

    @pm.batch(max_batch_size=4, wait_ms=50)
    async def double(self, values: list[int]) -> list[list[int]]:
        return [[2 * value, len(values)] for value in values]


@pm.deployment
class Router:
    def __init__(self, cheap: Any, expensive: Any) -> None:
        self.cheap, self.expensive = cheap, expensive

    async def __call__(self, value: int) -> Any:
        if value < 0:
            return await self.cheap.nothing(value)
        results = await asyncio.gather(*(self.cheap.forward(one) for one in range(3)))
        chosen = self.cheap if value < 10 else self.expensive
        return [await chosen.forward(value), *results]


@pm.deployment(shards=2)
class Sharded:
    def __init__(self) -> None:
        self.rank = pm.current().rank or 0

    def part(self, values: list[int]) -> int:
        return sum(values[self.rank :: 2])

    def join(self, parts: list[int]) -> dict[str, Any]:
        return {"parts": parts, "by": self.rank}


@pm.deployment
class Slow:
    async def sleep(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    def time_left(self, _: Any) -> float | None:
        return pm.current().time_left_s

    async def until_file_exists(self, file: str) -> str:
        while not Path(file).exists():
            await asyncio.sleep(0.01)
        return "done"


@pm.deployment
def broken(value: Any) -> Any:
    raise ValueError(f"cannot take {value!r}")


@pm.deployment
class Configured:
    def __init__(self) -> None:
        self.threshold = 0.0

    def reconfigure(self, config: dict[str, float]) -> None:
        if config["threshold"] < 0:
            raise ValueError("the threshold must not be negative")
        self.threshold = config["threshold"]

    def show(self, _: Any) -> list[Any]:
        return [self.threshold, os.getpid()]


@pm.deployment
class Arrays:
    def make(self, size: int) -> Any:
        return np.arange(size, dtype=np.float64)

    def sum(self, array: Any) -> float:
        return float(array.sum())


class Order(BaseModel):
    item: str
    count: int


@pm.deployment
def price(item: str, count: int) -> dict[str, Any]:
    return {"item": item, "price": 3 * count}


async def three_numbers(request: Any) -> list[int]:
    """A preprocessor: the numbers in the request body, as the diamond takes them."""
    text = (await request.body()).decode()
    return [int(word) for word in text.split(request.query_params.get("by", ","))]


def diamond(**input_options: Any) -> Any:
    with pm.InputNode(**input_options) as dag_input:
        m1 = Model.bind(1)
        m2 = Model.bind(2)
        m1_output = m1.forward.bind(dag_input[0])
        m2_output = m2.forward.bind(dag_input[1])
        return ensemble.bind(m1_output, m2_output, dag_input[2])


@pm.deployment
class Caller:
    """Calls a model twice: without streaming, then with it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    async def __call__(self, prompt: str) -> list[str]:
        text = await self.model.complete(prompt, max_tokens=4, temperature=0)
        pieces = [piece async for piece in self.model.complete.stream(prompt, max_tokens=4, temperature=0)]
        return [text, "".join(pieces)]


async def image_of(request: Any) -> Any:
    """A preprocessor: the request body as an array large enough for shared memory."""
    return np.frombuffer(await request.body(), dtype=np.uint8).reshape(-1, 1000)


@pm.deployment
class Delegates:
    """Makes and sums arrays on another node, through handles."""

    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays

    async def __call__(self, size: int) -> float:
        array = await self.arrays.make(size)
        return float(await self.arrays.sum(array)) + float(array[1])


@pm.deployment
def shape(array: Any) -> list[int]:
    return list(array.shape)


@pm.deployment
class Watched:
    """Records a metric for a custom scaling policy."""

    def look(self, pages: int) -> int:
        pm.record_metric("pages_waiting", pages)
        return pages


@pm.deployment
class Endless:
    """Streams without end and writes the number of bytes it has yielded to a file."""

    async def chunks(self, file: str) -> AsyncIterator[str]:
        yielded = 0
        try:
            while True:
                yield "x" * 65536
                yielded += 65536
                Path(file).write_text(str(yielded))
                await asyncio.sleep(0)
        finally:
            Path(file).write_text("stopped")
