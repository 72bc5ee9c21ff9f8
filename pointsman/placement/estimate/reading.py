"""Reading what somebody else wrote: never more than the file holds, and errors that name it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from pointsman.errors import PointsmanError

MOST_JSON = 128 << 20
"""Bytes of JSON that are read. The format of safetensors itself allows 100 MB."""


class UnreadableModel(PointsmanError):
    """A model's file is not what it should be; says which, what was expected and what was found."""

    def __init__(self, path: Path, expected: str, found: str) -> None:
        self.path, self.expected, self.found = path, expected, found
        super().__init__(f"{path} cannot be read as a model: expected {expected}, found {found}")


class Source:
    """A file that is read from its beginning, piece by piece, and never beyond its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.exists() and not path.is_file():  # a pipe would be waited for
                raise UnreadableModel(path, "a file", "a directory" if path.is_dir() else "something else")
            self.size = path.stat().st_size
            self._file = path.open("rb")
        except OSError as error:
            raise UnreadableModel(path, "a file", error.strerror or str(error)) from None

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def place(self) -> int:
        return self._file.tell()

    @property
    def left(self) -> int:
        return self.size - self._file.tell()

    def take(self, count: int, what: str) -> bytes:
        """The next bytes."""
        self.demand(count, what)
        try:
            data = self._file.read(count)
        except OSError as error:
            raise UnreadableModel(self.path, what, error.strerror or str(error)) from None
        if len(data) < count:
            self.fail(f"{count:,} bytes of {what}", f"the end of the file after {len(data):,}")
        return data

    def skip(self, count: int, what: str) -> None:
        """Leave bytes unread."""
        self.demand(count, what)
        self._file.seek(count, 1)

    def demand(self, count: int, what: str) -> None:
        """Say so if fewer bytes follow. Without this, a damaged length would ask for memory that nobody has."""
        if count > self.left:
            self.fail(f"{count:,} bytes of {what} at byte {self.place:,}", f"only {self.left:,} more; it is truncated")

    def fail(self, expected: str, found: str) -> NoReturn:
        raise UnreadableModel(self.path, expected, found)


def json_object(path: Path, data: bytes | None = None) -> dict[str, Any]:
    """A file that is one JSON object, or such a part of it."""
    if data is None:
        with Source(path) as source:
            if source.size > MOST_JSON:
                source.fail(f"JSON of at most {MOST_JSON >> 20} MiB", f"{source.size:,} bytes")
            data = source.take(source.size, "JSON")
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableModel(path, "a JSON object", str(error)[:120]) from None
    if not isinstance(found, dict):
        raise UnreadableModel(path, "a JSON object", f"a {type(found).__name__}")
    return found


class Fields:
    """The fields of a configuration, each checked for its kind when it is asked for."""

    MOST = 1 << 48

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self._prefix = path, values, prefix

    def whole(self, *names: str) -> int | None:
        """The first of these that is there and not null, a whole number from 0 on."""
        for name in names:
            value = self.values.get(self._prefix + name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self.MOST:
                self._fail(name, "a whole number from 0 on", value)
            return value
        return None

    def needed(self, *names: str, least: int = 1) -> int:
        """The same, and it must be there."""
        found = self.whole(*names)
        if found is None or found < least:
            self._fail(" or ".join(names), f"a whole number from {least} on", "nothing" if found is None else found)
        return found

    def text(self, name: str) -> str:
        value = self.values.get(self._prefix + name)
        return value if isinstance(value, str) else ""

    def get(self, name: str) -> Any:
        return self.values.get(self._prefix + name)

    def wholes(self, name: str) -> list[int] | None:
        """A list of whole numbers, if it is one."""
        value = self.get(name)
        if not isinstance(value, list) or not all(isinstance(one, int) and 0 <= one < self.MOST for one in value):
            return None
        return [int(one) for one in value]

    def _fail(self, name: str, expected: str, found: object) -> NoReturn:
        told = repr(found) if found != "nothing" else "nothing"
        raise UnreadableModel(self.path, f"{expected} as {self._prefix}{name}", told[:80])
