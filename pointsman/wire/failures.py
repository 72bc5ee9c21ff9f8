"""Failures of calls between processes, and of their values."""

from typing import Any

import msgspec

from pointsman.errors import PointsmanError


class Unsendable(PointsmanError):
    """A value that cannot leave its process."""


class UnreadableBlob(PointsmanError):
    """A blob that is broken, or whose shared memory is gone."""


class CallFailed(PointsmanError):
    """A call of a node or a model failed; the message is its own."""

    def __init__(self, message: str, *, status: int = 500, kind: str = "", node: str = "", trace: str = "") -> None:
        self.message = message
        self.status = status
        """HTTP status: 500 the code raised, 404 no such method, 422 bad input, 503 no instance, 504 too late."""
        self.kind = kind
        """The class name of the error on the other side; empty if unknown."""
        self.node = node
        self.trace = trace
        text = f"{kind}: {message}" if kind else message
        super().__init__(f"{node}: {text}" if node else text)

    @classmethod
    def from_answer(cls, status: int, body: bytes, node: str = "") -> "CallFailed":
        """From the error response of a replica, of the gateway, or of a model."""
        try:
            error = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            error = None
        if isinstance(error, dict) and isinstance(error.get("error"), dict):
            error = error["error"]
        if not isinstance(error, dict):
            text = body[:500].decode("utf-8", "replace").strip()
            return cls(text or f"it answered {status} without a body", status=status, node=node)
        if "message" not in error and "detail" in error:
            return cls(_problems_in(error["detail"]), status=status, kind="BadInput", node=node)
        return cls(
            str(error.get("message", "")) or f"it answered {status}",
            status=status,
            kind=str(error.get("type") or ""),
            node=str(error.get("node") or node),
            trace=str(error.get("traceback") or ""),
        )


def _problems_in(detail: Any) -> str:
    if not isinstance(detail, list):
        return str(detail)
    problems = [one for one in detail if isinstance(one, dict)]
    return "; ".join(f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}" for one in problems)
