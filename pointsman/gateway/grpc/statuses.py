"""What a failure is called in gRPC."""

from typing import Any, Never, TypeAlias

import grpc

from pointsman.gateway.grpc.audience import NotAnswered

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""By the status that HTTP has for it; all others are INTERNAL."""

MOST_WORDS = 2000
"""They go as a header, and clients take 8 KiB of those."""


async def refuse(context: Context, error: NotAnswered, request_id: str) -> Never:
    """End a call with a status instead of an answer."""
    trailing = [("x-request-id", request_id)] if request_id else []
    if error.retry_after_s is not None:
        trailing.append(("retry-after", str(error.retry_after_s)))
    words = str(error)
    if len(words) > MOST_WORDS:
        words = f"{words[:MOST_WORDS]}…"
    await context.abort(CODES.get(error.status, grpc.StatusCode.INTERNAL), words, tuple(trailing))
