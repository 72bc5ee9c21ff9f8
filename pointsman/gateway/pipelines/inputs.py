"""The input of an application, where no code of the user makes it: JSON of a client, or the arguments of a handle."""

from typing import Any

import msgspec

from pointsman.gateway.openai import BadRequest
from pointsman.gateway.pipelines.prepared import PreparedApplication
from pointsman.gateway.requests import HttpRequest
from pointsman.pipeline.inputs import input_value, part_of
from pointsman.runtimes.wire import UnreadableBlob, Unsendable, decode_plain, encode_plain

ARGUMENTS = b"application/x-pointsman-arguments"
"""The type of a body that has the arguments of a handle's call: a plain blob of args and kwargs."""


def inputs_of(application: PreparedApplication, http: HttpRequest) -> list[bytes]:
    """The parts of the input that are used, each as a blob. Raises `BadRequest` or `BadInput`."""
    value = _arguments(http.body) if http.headers.get(b"content-type") == ARGUMENTS else _json(http.body)
    try:
        return [encode_plain(part_of(value, part.path)) for part in application.flow.inputs]
    except Unsendable as error:  # JSON has integers of any size
        raise BadRequest(f"the input cannot be passed on: {error}") from None


def _json(body: bytes | memoryview) -> Any:
    try:
        return msgspec.json.decode(body) if body else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None


def _arguments(body: bytes | memoryview) -> Any:
    try:
        told = decode_plain(body)
        return input_value(told["args"], told["kwargs"])
    except (UnreadableBlob, LookupError, TypeError) as error:
        raise BadRequest(f"the arguments cannot be read: {error}") from None
