"""Nodes of the scenarios. Replicas load this file by path."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pointsman as pm
from pointsman.errors import PointsmanError


def note(log: str, what: str) -> None:
    """An effect: a line in a file, whichever process has it."""
    with Path(log).open("a", encoding="utf-8") as file:
        file.write(f"{what}\n")


def effects(log: str) -> list[str]:
    return Path(log).read_text(encoding="utf-8").splitlines() if Path(log).exists() else []


def met(folder: str, mine: str, other: str) -> bool:
    """Whether another call runs at the same time: each leaves a file and waits for that of the other."""
    Path(folder, mine).touch()
    until = time.monotonic() + 5
    while time.monotonic() < until:
        if Path(folder, other).exists():
            return True
        time.sleep(0.005)
    return False


class Refusal(Exception):
    def __init__(self, why: str, code: int) -> None:
        super().__init__(why, code)
        self.code = code


class Odd(Exception):
    """Cannot be made from its own arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Point:
    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)

    __hash__ = None  # type: ignore[assignment]


@pm.deployment
def same(value: Any) -> Any:
    return value


@pm.deployment
def pair(value: int) -> Any:
    return value, {"deep": ["a", 2 * value], "number": complex(1, value)}


@pm.deployment
def add(a: Any, b: Any, c: Any = 0) -> Any:
    return a + b + c


@pm.deployment
def total(values: Any) -> Any:
    return sum(values.values() if isinstance(values, dict) else values)


@pm.deployment
def describe(value: Any) -> list[Any]:
    """The type of a value, and the value as text."""
    return [type(value).__name__, repr(value)]


@pm.deployment
def raises(kind: str) -> Any:
    raise ERRORS[kind]


@pm.deployment
def changes(values: list[int]) -> int:
    """Changes its argument, which must be seen nowhere else."""
    values.append(100)
    return len(values)


@pm.deployment
def makes(what: str) -> Any:
    return MADE[what]()


@pm.deployment
def noted(log: str, what: str, *_: Any) -> str:
    note(log, what)
    return what


@pm.deployment
def meets(folder: str, mine: str, other: str) -> bool:
    return met(folder, mine, other)


@pm.deployment
async def waits(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@pm.deployment
def ends(*results: Any) -> int:
    return len(results)


@pm.deployment
def writes(array: Any) -> str:
    try:
        array[0] = 7
    except ValueError:
        return "read-only"
    return "changed"


@pm.deployment
def coroutine_of(value: int) -> Any:
    async def later() -> int:
        return value + 1

    return later()


@pm.deployment
def generator_of(to: int) -> Any:
    return (number for number in range(to))


@pm.deployment
def count(to: int) -> Iterator[int]:
    yield from range(to)


@pm.deployment
async def count_later(to: int) -> AsyncIterator[int]:
    for number in range(to):
        await asyncio.sleep(0)
        yield number


@pm.deployment
def breaks_after(pieces: int) -> Iterator[int]:
    yield from range(pieces)
    raise Refusal("no more", pieces)


@pm.deployment
async def breaks_later(pieces: int) -> AsyncIterator[int]:
    for number in range(pieces):
        yield number
    raise KeyError("gone")


@pm.deployment
def who() -> list[Any]:
    call = pm.current()
    return [call.node, call.step, call.rank, call.shards, call.priority, call.time_left_s, bool(call.request_id)]


@pm.deployment
class Model:
    def __init__(self, val: int = 1, *, scale: int = 1) -> None:
        self.val, self.scale = val, scale
        self.calls = 0

    def forward(self, value: Any) -> Any:
        return self.val * self.scale * value

    async def later(self, value: int) -> int:
        await asyncio.sleep(0)
        return self.val * value

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def counted(self) -> int:
        return self.calls

    def pieces(self, to: int) -> Iterator[int]:
        for number in range(to):
            yield self.val * number

    async def pieces_later(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield self.val * number

    def breaks(self, after: int) -> Iterator[int]:
        yield from range(after)
        raise Refusal("no more", after)

    def fails(self, kind: str) -> Any:
        raise ERRORS[kind]

    async def fails_later(self, kind: str) -> Any:
        raise ERRORS[kind]

    def note(self, log: str, what: str) -> str:
        note(log, what)
        return what

    def meet(self, folder: str, mine: str, other: str) -> bool:
        return met(folder, mine, other)

    async def sleep(self, log: str) -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            note(log, "cancelled")
            raise

    def change(self, values: list[int]) -> list[int]:
        values.append(1)
        return values

    def make(self, what: str) -> Any:
        return MADE[what]()

    def describe(self, value: Any) -> list[Any]:
        return [type(value).__name__, repr(value)]

    def where(self) -> list[Any]:
        return [pm.current().node, pm.current().priority]

    @staticmethod
    def named(what: str) -> str:
        return f"<{what}>"

    def __call__(self, value: Any) -> Any:
        return [self.val, value]


@pm.deployment
class Slow:
    """Ready only when its async constructor has ended."""

    async def __init__(self, val: int) -> None:  # type: ignore[misc]
        await asyncio.sleep(0.01)
        self.val = val

    def get(self) -> int:
        return self.val


@pm.deployment
class Configured:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def reconfigure(self, config: Any) -> None:
        self.told.append(config)

    def get(self) -> list[Any]:
        return self.told


@pm.deployment
class ConfiguredLater(Configured.body):  # type: ignore[name-defined, misc]
    async def reconfigure(self, config: Any) -> None:
        await asyncio.sleep(0)
        self.told.append(config)


@pm.deployment
class Environment:
    def __init__(self) -> None:
        self.at_first = os.environ.get("COLOUR")

    def get(self) -> list[Any]:
        os.environ["MADE_HERE"] = "yes"
        return [self.at_first, os.environ["COLOUR"], os.getenv("COLOUR"), "COLOUR" in os.environ]

    def made(self) -> Any:
        return os.environ.get("MADE_HERE")

    async def later(self) -> Any:
        return os.environ.get("COLOUR")


@pm.deployment(shards=3)
class Sharded:
    def part(self, values: list[int]) -> int:
        return sum(values[pm.current().rank :: 3])

    def join(self, parts: list[int]) -> int:
        return sum(parts)


@pm.deployment(shards=2)
class Parted:
    def part(self, value: int) -> list[Any]:
        return [pm.current().rank, value]


@pm.deployment(max_concurrency=4)
class Batched:
    @pm.batch(max_batch_size=3, wait_ms=2000)
    async def sized(self, values: list[int]) -> list[list[int]]:
        return [[value, len(values)] for value in values]

    @pm.batch(max_batch_size=1)
    def plain(self, values: list[int], *, scale: list[int]) -> list[int]:
        return [value * one for value, one in zip(values, scale, strict=True)]

    @pm.batch(max_batch_size=1)
    def wrong(self, values: list[int]) -> int:
        return len(values)


@pm.deployment(max_concurrency=1)
class OneByOne:
    """Async, and yet one call at a time."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def work(self) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        return self.most


@pm.deployment
class Driver:
    """Calls other nodes; each method is a scenario."""

    def __init__(self, model: Any, more: Any) -> None:
        self.model = model
        self.other, self.batched, self.sharded = more["other"]
        self.one_by_one = more["one_by_one"]
        self.inner = more["inner"]

    async def run(self, what: str, given: str) -> Any:
        result = getattr(self, what)(given)
        return await result if asyncio.iscoroutine(result) else result

    def run_plainly(self, what: str, given: str) -> Any:
        return getattr(self, what)(given)

    async def awaits(self, _: str) -> Any:
        return [await self.model.forward(3), await self.model(4), await self.model.later.remote(5)]

    async def awaits_twice(self, _: str) -> Any:
        before = await self.other.counted()
        response = self.other.count()
        first, second = await response, await response
        return [first == second, await self.other.counted() - before]

    async def does_not_await(self, log: str) -> Any:
        self.model.note(log, "made")
        until = time.monotonic() + 5
        while not effects(log) and time.monotonic() < until:
            await asyncio.sleep(0.005)
        return effects(log)

    async def side_by_side(self, folder: str) -> Any:
        responses = [self.model.meet(folder, "a", "b"), self.other.meet(folder, "b", "a")]
        return [await response for response in responses]

    async def gathers(self, _: str) -> Any:
        return await asyncio.gather(*(self.model.forward(number) for number in range(20)))

    async def in_a_batch(self, _: str) -> Any:
        return sorted(await asyncio.gather(*(self.batched.sized(number) for number in range(3))))

    async def cancels(self, log: str) -> Any:
        response = self.model.sleep(log)
        await asyncio.sleep(0.2)
        response.cancel()
        with suppress(asyncio.CancelledError):
            await response
        until = time.monotonic() + 5
        while not effects(log) and time.monotonic() < until:
            await asyncio.sleep(0.005)
        return effects(log)

    async def waits_for_some_time(self, log: str) -> Any:
        try:
            await asyncio.wait_for(self.model.sleep(log), 0.1)
        except TimeoutError:
            return "too late"

    async def blocks(self, _: str) -> Any:
        return self.model.forward(1).result()

    async def blocks_on_a_stream(self, _: str) -> Any:
        return list(self.model.pieces.stream(2))

    async def streams(self, _: str) -> Any:
        return [piece async for piece in self.model.pieces.stream(3)]

    async def streams_async(self, _: str) -> Any:
        return [piece async for piece in self.model.pieces_later.stream(3)]

    async def streams_itself(self, _: str) -> Any:
        return [piece async for piece in self.model.stream(3)]

    async def stops_early(self, _: str) -> Any:
        async for piece in self.model.pieces.stream(10_000):
            if piece == 6:
                return piece
        return None

    async def stream_fails(self, _: str) -> Any:
        found = []
        try:
            async for piece in self.model.breaks.stream(2):
                found.append(piece)  # noqa: PERF401 - what came before the error is looked at
        except Refusal as error:
            return [found, error.code, str(error)]

    async def collects(self, _: str) -> Any:
        return [await self.model.pieces(3), await self.model.pieces_later(2)]

    async def catches(self, _: str) -> Any:
        caught = []
        for kind in ("value", "own", "key"):
            try:
                await self.model.fails(kind)
            except (ValueError, Refusal, KeyError) as error:
                caught.append([type(error).__name__, str(error)])
        return caught

    async def retries(self, _: str) -> Any:
        for kind in ("value", "key", "fine"):
            try:
                return await (self.model.fails_later(kind) if kind in ERRORS else self.model.named(kind))
            except (ValueError, KeyError):
                continue
        return None

    async def passes_errors_on(self, _: str) -> Any:
        return await self.inner.asks(self_fails := "own") or self_fails

    async def passes_odd_errors_on(self, _: str) -> Any:
        return await self.model.fails("odd")

    async def is_refused(self, _: str) -> Any:
        await self.model.forwrd(1)

    async def lacks_an_argument(self, _: str) -> Any:
        await self.model.forward()

    async def sends_what_cannot_be_sent(self, _: str) -> Any:
        try:
            await self.model.forward(threading.Lock())
        except PointsmanError as error:
            return type(error).__name__

    async def gets_what_cannot_be_sent(self, _: str) -> Any:
        return await self.model.make("lock")

    async def keeps_its_own(self, _: str) -> Any:
        mine = [0]
        theirs = await self.model.change(mine)
        return [mine, theirs]

    async def keeps_types(self, _: str) -> Any:
        return [await self.model.describe(value) for value in ((1, 2), {3}, 1 << 70, b"x", None, {"a": [1.5]})]

    async def to_shards(self, _: str) -> Any:
        return await self.sharded.part([1, 2, 3, 4])

    async def one_at_a_time(self, _: str) -> Any:
        return max(await asyncio.gather(*(self.one_by_one.work() for _ in range(4))))

    async def knows_the_callee(self, _: str) -> Any:
        return await self.other.where()

    async def through_another(self, _: str) -> Any:
        return await self.inner.asks("fine")

    async def loops(self, _: str) -> Any:
        value = 1
        while value < 50:
            value = await self.model.forward(value)
        return value

    def plainly(self, _: str) -> Any:
        return [self.model.forward(3).result(), self.model.remote(4).result(10)]

    def plain_pieces(self, _: str) -> Any:
        return list(self.model.pieces.stream(3))

    def plain_stream_fails(self, _: str) -> Any:
        return list(self.model.breaks.stream(1))

    def plain_side_by_side(self, folder: str) -> Any:
        responses = [self.model.meet(folder, "a", "b"), self.other.meet(folder, "b", "a")]
        return [response.result(10) for response in responses]

    def plain_twice(self, _: str) -> Any:
        response = self.other.count()
        return response.result() == response.result()

    def plain_timeout(self, log: str) -> Any:
        response = self.model.sleep(log)
        try:
            response.result(0.05)
        except TimeoutError:
            response.cancel()
            return "too late"

    def plain_fails(self, _: str) -> Any:
        return self.model.fails("own").result()


@pm.deployment
class Inner:
    def __init__(self, model: Any) -> None:
        self.model = model

    async def asks(self, kind: str) -> Any:
        return await (self.model.fails(kind) if kind in ERRORS else self.model.named(kind))


async def doubled(request: Any) -> Any:
    return 2 * (await request.json())


def by_name(request: Any) -> Any:
    raise ValueError(f"{request.method} is refused")


async def as_order(request: Any) -> Any:
    return {"name": await request.json()}


ERRORS: dict[str, BaseException] = {
    "value": ValueError("no such value"),
    "key": KeyError("gone"),
    "own": Refusal("not today", 7),
    "odd": Odd(1, 2),
    "exit": SystemExit(3),
    "stop": StopIteration("over"),
    "assertion": AssertionError(),
}
MADE: dict[str, Any] = {
    "tuple": lambda: (1, "two", [3]),
    "set": lambda: {1, 2},
    "big": lambda: 1 << 80,
    "point": lambda: Point(1, 2),
    "array": lambda: import_module("numpy").arange(6).reshape(2, 3),
    "large": lambda: import_module("numpy").full(100_000, 1.5),
    "bytes": lambda: b"\x00\xff",
    "nothing": lambda: None,
    "lock": threading.Lock,
    "names": lambda: {1: "one"},
}
