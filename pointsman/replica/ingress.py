"""User code that makes the input of a request: a preprocessor, a schema, or first a preprocessor and then a schema."""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from pointsman.pipeline.flow import BadInput, input_value, part_of
from pointsman.pipeline.graph import Access
from pointsman.replica.calling import Calling
from pointsman.replica.calls import CallRefused
from pointsman.replica.methods import Method
from pointsman.wire import ARGUMENTS, HttpHead, SharedBuffers, decode_plain, encode_value


class Headers(Mapping[str, str]):
    """Headers by name; upper and lower case do not matter."""

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
    """The parameters of a query by name. A repeated parameter has its last value; `getlist` returns all its values."""

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
    path: str
    query: str

    def __str__(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path


class Request:
    """A client's request for a preprocessor: the part of Starlette's `Request` that applies to a complete request."""

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


class GivenInput(msgspec.Struct, frozen=True):
    """The input of a call with arguments. It is not read from a request, so it needs no preprocessor."""

    value: Any


def request_of(head: HttpHead, body: bytes) -> Request | GivenInput:
    """The request of a client over HTTP, or the input that a caller gave to a handle."""
    if head.headers.get("content-type") != ARGUMENTS:
        return Request(head, body)
    given = decode_plain(body)
    return GivenInput(input_value(given["args"], given["kwargs"]))


class IngressInput:
    """Makes the input of a request with a preprocessor, a schema, or first a preprocessor and then a schema."""

    def __init__(
        self,
        preprocessor: Any,
        schema: Any,
        run: Callable[[Method, Request], Awaitable[Any]] | None = None,
    ) -> None:
        """`run`: the function that calls the preprocessor; None if the preprocessor is called directly."""
        self._preprocessor = None if preprocessor is None else Method("preprocessor", preprocessor)
        self.schema = schema
        self._run = run or _called

    async def of(self, request: Request | GivenInput) -> Any:
        """The input of a request. Raises `CallRefused` if the input is not valid."""
        if isinstance(request, GivenInput):
            value = request.value
        elif self._preprocessor is None:
            try:
                value = await request.json()
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise CallRefused([{"loc": ["body"], "msg": f"not JSON: {error}", "type": "json_invalid"}]) from None
        else:
            value = await self._preprocessed(self._preprocessor, request)
        return value if self.schema is None else self._validated(value)

    async def _preprocessed(self, preprocessor: Method, request: Request) -> Any:
        try:
            return await self._run(preprocessor, request)
        except CallRefused:
            raise
        except Exception as error:
            if isinstance(status := getattr(error, "status_code", None), int):  # an HTTP error of a web framework
                raise CallRefused(getattr(error, "detail", str(error)), status) from error
            if problems := _problems(error):
                raise CallRefused(problems) from error
            if isinstance(error, ValueError):  # the usual error for input that cannot be parsed
                raise CallRefused([{"loc": ["body"], "msg": str(error), "type": "value_error"}]) from error
            raise

    def _validated(self, value: Any) -> Any:
        if isinstance(value, self.schema):
            return value
        try:
            return self.schema.model_validate(value)
        except Exception as error:
            if problems := _problems(error):
                raise CallRefused(problems) from None
            raise


async def _called(method: Method, request: Request) -> Any:
    result = method.function(request)
    return await result if inspect.isawaitable(result) else result


class Ingress:
    """The object of an ingress replica. Its methods are called like the methods of any node."""

    def __init__(self, preprocessor: Any, schema: Any, calling: Calling, shared: SharedBuffers | None) -> None:
        self._made = IngressInput(preprocessor, schema, calling.value)
        self._shared = shared

    async def input(
        self, request: Request | GivenInput, *, paths: Sequence[Sequence[tuple[int | str, bool]]] = ((),)
    ) -> list[bytes]:
        """The parts of the input at these paths, each as a blob. Raises `CallRefused` if the input is not valid."""
        value = await self._made.of(request)
        try:
            parts = [part_of(value, [Access(*access) for access in path]) for path in paths]
        except BadInput as error:
            raise CallRefused([{"loc": ["body"], "msg": str(error), "type": "missing"}]) from None
        return [encode_value(part, self._shared) for part in parts]

    async def openapi(self) -> Any:
        """The JSON schema of the input; None if the schema is unknown."""
        describe = getattr(self._made.schema, "model_json_schema", None)
        return None if describe is None else describe()


def _problems(error: Exception) -> list[dict[str, Any]]:
    """The problems of a pydantic error; empty for other errors."""
    errors = getattr(error, "errors", None)
    if not callable(errors) or type(error).__name__ != "ValidationError":
        return []
    return [{"loc": list(one["loc"]), "msg": one["msg"], "type": one["type"]} for one in errors(include_url=False)]
