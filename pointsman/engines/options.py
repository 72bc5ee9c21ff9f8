"""The options of a server's command line, in any spelling that servers accept, and their meaning for the server's
placement."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pointsman.errors import ConfigError
from pointsman.parameters import camel_case

_MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Options:
    """Options of a command line, as `--name VALUE` or `--name=VALUE`. A name may have underscores for dashes, or be
    in a short form. If an option is repeated, its last value counts."""

    def __init__(self, args: Iterable[str], short: Mapping[str, str] | None = None) -> None:
        """`short`: other forms of options, with the name that each form stands for."""
        self._short = dict(short or {})
        self._found: dict[str, str] = {}
        name = ""
        for word in args:
            if word.startswith("-") and not _is_number(word):
                written, equals, value = word.partition("=")
                name = self._name(written)
                self._found[name] = value
                name = "" if equals else name
            elif name:
                self._found[name] = word
                name = ""

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def _name(self, written: str) -> str:
        plain = written.lstrip("-").replace("_", "-")
        return self._short.get(written, self._short.get(plain, plain))

    def text(self, name: str) -> str | None:
        return self._found.get(name) or None

    def whole(self, name: str) -> int | None:
        """A whole number, which may be written as 32k or 32K; None if it is absent or not a whole number."""
        value = self._found.get(name, "")
        factor = _MULTIPLES.get(value[-1:], 1)
        number = value[:-1] if factor > 1 else value
        try:
            return int(float(number) * factor) if factor > 1 else int(number)
        except ValueError:
            return None

    def number(self, name: str) -> float | None:
        value = self._found.get(name, "")
        return float(value) if _is_number(value) else None

    def json(self, name: str) -> Mapping[str, Any]:
        """A JSON object; empty if the option is absent or is not an object. `--name.key VALUE` adds a key to it."""
        try:
            given = msgspec.json.decode(self._found.get(name, "") or "{}")
        except msgspec.DecodeError:
            given = {}
        dotted = {key.partition(".")[2]: value for key, value in self._found.items() if key.startswith(f"{name}.")}
        return {**(given if isinstance(given, dict) else {}), **dotted}

    def agreed(self, parameter: str, given: Any, *names: str) -> Any:
        """The value of an engine's parameter, which an option may set instead. Raises ConfigError if parameter and
        option are both set, and differ."""
        for name in names:
            if name not in self:
                continue
            kind = type(given) if given is not None else None
            found: Any = self.whole(name) if kind is int else self.number(name) if kind is float else self.text(name)
            if given is None:
                return self.whole(name) if self.whole(name) is not None else self.number(name) or self.text(name)
            if found != given:
                written, option = camel_case(parameter), self._found[name]
                raise ConfigError([f"{written} is {given}, and args say --{name} {option}; keep one of them"])
        return given


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def split_shares(written: str | Sequence[float]) -> tuple[float, ...]:
    """Shares of GPUs, from text such as 3,1 or from numbers. Raises ConfigError for anything else."""
    words = written.replace("/", ",").split(",") if isinstance(written, str) else list(written)
    try:
        shares = tuple(float(word) for word in words)
    except (TypeError, ValueError):
        raise ConfigError([f"a tensor split is a list of numbers such as 3,1, found {written}"]) from None
    if not shares or min(shares) < 0 or not sum(shares):
        raise ConfigError([f"the shares of a tensor split are at least 0, and not all 0, found {written}"])
    return shares
