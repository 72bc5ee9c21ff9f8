"""A handle to an application that runs: called from a program outside, over the socket of its plane."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from pointsman.gateway.pipelines.audience import BLOB_TYPE
from pointsman.gateway.pipelines.inputs import ARGUMENTS
from pointsman.runtimes.handles import Response, Stream
from pointsman.runtimes.requesting import Requesting
from pointsman.runtimes.wire import CallFailed, Unsendable, decode_value, encode_plain


class ApplicationHandle:
    """An application: `handle.remote(1, 2).result()`, `await handle.remote(1, 2)`, `for piece in handle.stream(1)`.

    Arguments are plain data: None, bool, numbers, text, bytes, lists, mappings, arrays. Results are whatever the last
    node returned.
    """

    def __init__(
        self, name: str, loop: asyncio.AbstractEventLoop, socket: Path, url: str, close: Callable[[], None]
    ) -> None:
        self.name = name
        self.url = f"{url}/{name}"
        """Where clients over HTTP send their requests."""
        self._loop = loop
        self._transport = Requesting.unix(str(socket))
        self.close = close
        """Stop the plane that was started for it in this process, with everything that runs there."""

    def remote(self, *args: Any, **kwargs: Any) -> Response:
        """Call it; the answer is under way."""
        return Response(self._answer(_encoded(args, kwargs)), self._loop)

    __call__ = remote

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """Its answer piece by piece."""
        return Stream(self._pieces(_encoded(args, kwargs)), self._loop)

    async def _answer(self, body: bytes) -> Any:
        headers = {"content-type": ARGUMENTS.decode(), "accept": BLOB_TYPE.decode()}
        async with self._transport.ask(f"/{self.name}", body, headers) as answer:
            said = await answer.read()
        if answer.status != 200:
            raise CallFailed.from_answer(answer.status, said)
        return decode_value(said)

    async def _pieces(self, body: bytes) -> AsyncIterator[Any]:
        headers = {"content-type": ARGUMENTS.decode(), "accept": f"{BLOB_TYPE.decode()}; pieces"}
        async with self._transport.ask(f"/{self.name}", body, headers) as answer:
            if answer.status != 200:
                raise CallFailed.from_answer(answer.status, await answer.read())
            held = b""
            async for data in answer.pieces():
                held += data
                while len(held) >= 4 and len(held) >= (end := 4 + int.from_bytes(held[:4], "little")):
                    yield decode_value(held[4:end])
                    held = held[end:]

    def __repr__(self) -> str:
        return f"<application {self.name} at {self.url}>"


def _encoded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Arguments as the gateway reads them. Raises `Unsendable`."""
    try:
        return encode_plain({"args": list(args), "kwargs": kwargs})
    except Unsendable as error:
        raise Unsendable(f"{error}; hand plain data to an application") from None
