"""Code of the applications under test. Each calls one method."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pydantic

import pointsman as pm


class Order(pydantic.BaseModel):
    """Input of the application `shop`."""

    item: str
    count: int = pydantic.Field(gt=0)


class Everything:
    def echo(self, value: Any) -> Any:
        return value

    def as_bytes(self, value: str) -> bytes:
        return value.encode()

    def order(self, item: str, count: int) -> str:
        return f"{count} x {item}"

    def boom(self, value: Any) -> None:
        raise ValueError(f"no {value} today")

    def context(self, value: Any) -> dict[str, Any]:
        """The context of the call."""
        now = pm.current()
        return {"priority": now.priority, "tenant": now.tenant, "late": now.deadline is not None}

    def count(self, to: int) -> Iterator[dict[str, int]]:
        for number in range(to):
            yield {"n": number}

    async def words(self, text: str) -> AsyncIterator[str]:
        for word in text.split():
            yield f"{word} "

    async def large(self, mark: str) -> AsyncIterator[list[int]]:
        """Yields far more than all buffers hold, and writes its progress to a file."""
        for number in range(1000):
            Path(mark).write_text(str(number))
            yield [number] * 20_000

    def half(self, value: int) -> Iterator[int]:
        yield value
        raise ValueError("the other half is missing")

    async def forever(self, mark: str) -> None:
        """Writes to a file when it begins and when it is cancelled."""
        Path(mark).write_text("begun")
        try:
            await asyncio.sleep(3600)
        finally:
            Path(mark).write_text("cancelled")
