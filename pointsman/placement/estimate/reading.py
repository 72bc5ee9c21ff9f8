"""Reading of untrusted files: never beyond the end of a file, and with errors that name it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from pointsman.errors import PointsmanError, why_unusable
from pointsman.parameters import quoted

MAX_JSON_BYTES = 128 << 20
"""The safetensors format itself allows 100 MB."""


class UnreadableModel(PointsmanError):
    """A file of a model is not as expected. The message names the file, and says what was expected and what was found,
    or why the file cannot be read at all."""

    def __init__(self, path: Path, expected: str = "", found: str = "", *, why: str = "") -> None:
        self.path, self.expected, self.found = path, expected, found
        super().__init__(f"{path} cannot be read as a model: {why or f'expected {expected}, found {found}'}")


class Source:
    """A file that is read in pieces from its beginning, never beyond its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.exists() and not path.is_file():  # reading a pipe would block
                raise UnreadableModel(path, "a file", "a directory" if path.is_dir() else "something else")
            self.size = path.stat().st_size
            self._file = path.open("rb")
        except OSError as error:
            raise UnreadableModel(path, why=why_unusable(path, error)) from None

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def position(self) -> int:
        return self._file.tell()

    @property
    def left(self) -> int:
        return self.size - self._file.tell()

    def take(self, count: int, what: str) -> bytes:
        self.demand(count, what)
        try:
            data = self._file.read(count)
        except OSError as error:
            raise UnreadableModel(self.path, why=why_unusable(self.path, error)) from None
        if len(data) < count:
            self.fail(f"{count:,} bytes of {what}", f"the end of the file after {len(data):,}")
        return data

    def skip(self, count: int, what: str) -> None:
        self.demand(count, what)
        self._file.seek(count, 1)

    def demand(self, count: int, what: str) -> None:
        """Raise if fewer than `count` bytes follow. Otherwise a damaged length would allocate too much memory."""
        if count > self.left:
            self.fail(
                f"{count:,} bytes of {what} at byte {self.position:,}", f"only {self.left:,} more; it is truncated"
            )

    def fail(self, expected: str, found: str) -> NoReturn:
        raise UnreadableModel(self.path, expected, found)


def json_object(path: Path, data: bytes | None = None) -> dict[str, Any]:
    """The JSON object that a file, or a part of a file, consists of."""
    if data is None:
        with Source(path) as source:
            if source.size > MAX_JSON_BYTES:
                source.fail(f"JSON of at most {MAX_JSON_BYTES >> 20} MiB", f"{source.size:,} bytes")
            data = source.take(source.size, "JSON")
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableModel(path, "a JSON object", str(error)[:120]) from None
    if not isinstance(found, dict):
        raise UnreadableModel(path, "a JSON object", quoted(found))
    return found


class Fields:
    """The fields of a configuration. The type of each field is checked when the field is read."""

    MAX = 1 << 48

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self._prefix = path, values, prefix

    def whole(self, *names: str) -> int | None:
        """The first of these fields that is present and not null, as a whole number >= 0; None if there is none."""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self.MAX:
                self._fail(name, "a whole number >= 0", value)
            return value
        return None

    def needed(self, *names: str, least: int = 1) -> int:
        """Like `whole`, but one of the fields is required, and must be at least `least`."""
        found = self.whole(*names)
        if found is None or found < least:
            self._fail(" or ".join(names), f"a whole number >= {least}", "nothing" if found is None else found)
        return found

    def text(self, name: str) -> str:
        value = self.get(name)
        return value if isinstance(value, str) else ""

    def get(self, name: str) -> Any:
        return self.values.get(self._prefix + name)

    def wholes(self, name: str) -> list[int] | None:
        """The value of a field if it is a list of whole numbers; None otherwise."""
        value = self.get(name)
        if not isinstance(value, list) or not all(isinstance(one, int) and 0 <= one < self.MAX for one in value):
            return None
        return [int(one) for one in value]

    def _fail(self, name: str, expected: str, found: object) -> NoReturn:
        shown = quoted(found, 80) if found != "nothing" else "nothing"
        raise UnreadableModel(self.path, f"{expected} as {self._prefix}{name}", shown)
