"""A client's headers, as the deciding part wants them: text by lower-cased name, made when somebody asks."""

from collections.abc import Iterator, Mapping


class ClientHeaders(Mapping[str, str]):
    """Headers as they came, and what was said elsewhere in a header's stead."""

    __slots__ = ("_raw",)

    def __init__(self, raw: dict[bytes, bytes]) -> None:
        self._raw = raw

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        value = self._raw.get(name.encode("latin-1", "replace"))
        return default if value is None else value.decode("latin-1")

    def __getitem__(self, name: str) -> str:
        return self._raw[name.encode("latin-1", "replace")].decode("latin-1")

    def __iter__(self) -> Iterator[str]:
        return (name.decode("latin-1") for name in self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def __repr__(self) -> str:
        return repr(dict(self))
