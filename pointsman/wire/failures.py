"""What can go wrong between processes: with a value, or with a call."""

from typing import Any

import msgspec

from pointsman.errors import PointsmanError


class Unsendable(PointsmanError):
    """A value that cannot leave its process."""


class UnreadableBlob(PointsmanError):
    """A blob that is broken, or whose shared memory is gone."""


class CallFailed(PointsmanError):
    """A node or a model could not do what it was asked; the message is what it said."""

    def __init__(self, message: str, *, status: int = 500, kind: str = "", node: str = "", trace: str = "") -> None:
        self.message = message
        self.status = status
        """As HTTP has it: 500 the code raised, 404 no such method, 422 bad input, 503 nobody there, 504 too late."""
        self.kind = kind
        """The name of the error's class on the other side; empty: not known."""
        self.node = node
        self.trace = trace
        said = f"{kind}: {message}" if kind else message
        super().__init__(f"{node}: {said}" if node else said)

    @classmethod
    def from_answer(cls, status: int, body: bytes, node: str = "") -> "CallFailed":
        """Read an answer of a replica, of the gateway, or of a model."""
        try:
            said = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            said = None
        if isinstance(said, dict) and isinstance(said.get("error"), dict):
            said = said["error"]
        if not isinstance(said, dict):
            text = body[:500].decode("utf-8", "replace").strip()
            return cls(text or f"it answered {status} without a word", status=status, node=node)
        if "message" not in said and "detail" in said:
            return cls(_in_words(said["detail"]), status=status, kind="BadInput", node=node)
        return cls(
            str(said.get("message", "")) or f"it answered {status}",
            status=status,
            kind=str(said.get("type") or ""),
            node=str(said.get("node") or node),
            trace=str(said.get("traceback") or ""),
        )


def _in_words(detail: Any) -> str:
    if not isinstance(detail, list):
        return str(detail)
    problems = [one for one in detail if isinstance(one, dict)]
    return "; ".join(f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}" for one in problems)
