"""Values that nodes of one process hand to each other: each receiver gets a copy, as if it were another process.

So code that changes an argument or a result changes nothing elsewhere, arrays arrive read-only, and values that cannot
be sent to another process are refused here too. Only classes are handed over as they are, because the class of a value
may be defined inside a function, from which another process could not import it.
"""

import io
import pickle
from types import NoneType
from typing import Any, NamedTuple

from pointsman.wire import Unsendable

UNCHANGEABLE = frozenset({NoneType, bool, int, float, str, bytes})


class Packed(NamedTuple):
    """A value in transit, from which each receiver makes its own copy."""

    pickled: bytes
    buffers: tuple[memoryview, ...] = ()
    """Copies of arrays, which receivers share read-only."""
    classes: tuple[Any, ...] = ()
    """Classes that only this process can find."""


def packed(value: Any) -> Any:
    """The value itself if it cannot change, else a `Packed`. Raises `Unsendable`."""
    if type(value) in UNCHANGEABLE:
        return value
    buffers: list[pickle.PickleBuffer] = []
    try:
        pickled = pickle.dumps(value, protocol=5, buffer_callback=_keeping(buffers))
        return Packed(pickled, _copies(buffers))
    except Exception:  # perhaps the value contains a class that cannot be imported
        return _packed_with_classes(value)


def unpacked(value: Any) -> Any:
    """The value for one receiver."""
    if type(value) is not Packed:
        return value
    if not value.classes:
        return pickle.loads(value.pickled, buffers=value.buffers)
    return LocalUnpickler(value).load()


def _packed_with_classes(value: Any) -> Packed:
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = LocalPickler(file, protocol=5, buffer_callback=_keeping(buffers))
    pickler.classes = []
    try:
        pickler.dump(value)
    except Exception as error:  # a user's class may raise anything while it is pickled
        raise Unsendable(
            f"a value of type {type(value).__name__} cannot be sent to another process: {error}"
        ) from error
    return Packed(file.getvalue(), _copies(buffers), tuple(pickler.classes))


class LocalPickler(pickle.Pickler):
    classes: list[Any]

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, type) or "<locals>" not in obj.__qualname__:
            return None
        self.classes.append(obj)
        return len(self.classes) - 1


class LocalUnpickler(pickle.Unpickler):
    def __init__(self, value: Packed) -> None:
        super().__init__(io.BytesIO(value.pickled), buffers=value.buffers)
        self._classes = value.classes

    def persistent_load(self, pid: Any) -> Any:
        return self._classes[pid]


def _keeping(buffers: list[pickle.PickleBuffer]) -> Any:
    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            buffer.raw()
        except BufferError:  # the array is not contiguous
            return True
        buffers.append(buffer)
        return False

    return keep


def _copies(buffers: list[pickle.PickleBuffer]) -> tuple[memoryview, ...]:
    return tuple(memoryview(bytes(buffer.raw())) for buffer in buffers)
