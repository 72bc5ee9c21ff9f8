"""A client's request, for a preprocessor: the part of Starlette's `Request` that makes sense once it is whole."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from pointsman.runtimes.wire import HttpHead


class Headers(Mapping[str, str]):
    """By name, in whatever case."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = {name.lower(): value for name, value in headers.items()}

    def __getitem__(self, name: str) -> str:
        return self._headers[name.lower()]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._headers

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)


class QueryParams(Mapping[str, str]):
    """By name: the last value that was given; `getlist` has all of them."""

    def __init__(self, query: str) -> None:
        self._pairs = parse_qsl(query, keep_blank_values=True)
        self._last = dict(self._pairs)

    def getlist(self, name: str) -> list[str]:
        return [value for key, value in self._pairs if key == name]

    def __getitem__(self, name: str) -> str:
        return self._last[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)


class Url(NamedTuple):
    """Where the request was sent."""

    path: str
    query: str

    def __str__(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path


class Request:
    """The request of a client, read whole."""

    def __init__(self, head: HttpHead, body: bytes) -> None:
        self.method = head.method
        self.url = Url(head.path, head.query)
        self.headers = Headers(head.headers)
        self._body = body

    @property
    def query_params(self) -> QueryParams:
        return QueryParams(self.url.query)

    async def body(self) -> bytes:
        return self._body

    async def text(self) -> str:
        return self._body.decode()

    async def json(self) -> Any:
        return msgspec.json.decode(self._body)
