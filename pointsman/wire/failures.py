"""Errors of a call, in the form that the caller gets.

Enters: an exception that code has raised. Leaves: the same exception, with class and message, if the caller can import
the class, else `CallFailed`, which has both as text. The one rule: exceptions are restored only from the answers of
replicas of this plane, because restoring runs code; they are never restored from a model server or a client.
"""

import io
import pickle
import sys
from base64 import b64decode, b64encode
from importlib import import_module
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from pointsman.errors import PointsmanError
from pointsman.pipeline.flow import BadInput

MAX_PICKLED = 16 * 1024
"""Maximum bytes of a pickled exception; a larger exception is sent only as text."""


class CallFailed(PointsmanError):
    """A call of a node or a model failed; the message is that of its error."""

    def __init__(self, message: str, *, status: int = 500, kind: str = "", node: str = "", trace: str = "") -> None:
        self.message = message
        self.status = status
        """HTTP status: 500 if the code raised, 404 if there is no such method, 422 for bad input, 503 if there is no
        instance, 504 after the deadline."""
        self.kind = kind
        """The class name of the error on the other side; empty if unknown."""
        self.node = node
        self.trace = trace
        text = f"{kind}: {message}" if kind else message
        super().__init__(f"{node}: {text}" if node else text)

    @classmethod
    def from_answer(cls, status: int, body: bytes, node: str = "") -> "CallFailed":
        """The error for the error response of a replica, of the gateway, or of a model."""
        error = _error_in(body)
        if error is None:
            text = body[:500].decode("utf-8", "replace").strip()
            return cls(text or f"it answered {status} without a body", status=status, node=node)
        if "message" not in error and "detail" in error:
            return RefusedInput.of(error["detail"], status, node)
        return cls(
            str(error.get("message", "")) or f"it answered {status}",
            status=status,
            kind=str(error.get("type") or ""),
            node=str(error.get("node") or node),
            trace=str(error.get("traceback") or ""),
        )


class RefusedInput(CallFailed, BadInput):
    """The input of a request lacks a part, or does not match its schema."""

    @classmethod
    def of(cls, detail: Any, status: int = 422, node: str = "") -> "RefusedInput":
        """The error for these problems, each of which names its field."""
        return cls(_problems_in(detail), status=status, kind="BadInput", node=node)


def raised_by(status: int, body: bytes, node: str = "") -> Exception:
    """The exception that the code of a replica has raised, restored from the gateway's answer to a handle."""
    failed = CallFailed.from_answer(status, body, node)
    error = _error_in(body) or {}
    restored = _restored(str(error.get("pickled") or ""))
    if restored is None:
        return failed
    if failed.trace:
        restored.add_note(f'in node "{failed.node}":\n{failed.trace.rstrip()}')
    restored.__cause__ = failed
    return restored


def pickled(error: BaseException) -> str:
    """An exception as text for `raised_by`; empty if the exception cannot be sent in this way."""
    if not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration):
        return ""
    try:
        made = pickle.dumps(error)
    except Exception:  # the user's class may raise anything; the error is then sent as text only
        return ""
    return b64encode(made).decode() if len(made) <= MAX_PICKLED else ""


def _restored(text: str) -> Exception | None:
    if not text:
        return None
    try:
        found = ErrorUnpickler(io.BytesIO(b64decode(text))).load()
    except Exception:  # the class cannot be imported here, or the exception cannot be created from its arguments
        return None
    return found if isinstance(found, Exception) else None


class ErrorUnpickler(pickle.Unpickler):
    """Finds the classes of the running program. Replicas load its file under another module name, and importing that
    module here would run the program again."""

    def find_class(self, module: str, name: str) -> Any:
        main = sys.modules.get("__main__")
        file = getattr(main, "__file__", None)
        if module not in sys.modules and file is not None:
            path = Path(file).resolve()
            if module in (path.stem, f"_pointsman_{crc32(str(path).encode()):08x}_{path.stem}"):
                module = "__main__"
        found: Any = sys.modules.get(module) or import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found


def _error_in(body: bytes) -> dict[str, Any] | None:
    try:
        error = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if isinstance(error, dict) and isinstance(error.get("error"), dict):
        error = error["error"]
    return error if isinstance(error, dict) else None


def _problems_in(detail: Any) -> str:
    if not isinstance(detail, list):
        return str(detail)
    problems = [one for one in detail if isinstance(one, dict)]
    return "; ".join(f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}" for one in problems)
