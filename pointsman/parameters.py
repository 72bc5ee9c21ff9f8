"""How parameters are written in configuration, where a signature or a field alone does not show it.

A plugin's parameters are the keyword arguments of its `__init__`, validated by their annotations. `queue_threshold` is
written `queueThreshold`; nested parameters are `Parameters` structs. The marks below go into `Annotated`.
"""

import importlib.util
import json
import os
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from ipaddress import ip_address
from math import ceil
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta


class Parameters(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The base of nested parameters. Their names are in snake case in Python, and in camel case in YAML."""


class Spelled(msgspec.Struct, frozen=True):
    """A parameter whose name in YAML differs from its camel case form."""

    name: str


class PluginRef(msgspec.Struct, frozen=True):
    """A reference to another plugin. In YAML it is the name of that plugin; the constructor gets the plugin itself."""

    role: str
    """The role of that plugin for error messages, such as decider or saturation detector."""
    default: str = ""
    """The plugin to use if YAML names none: a declared plugin of this name, else a new one with default parameters.
    Empty if there is no default."""


class NoEffect(msgspec.Struct, frozen=True):
    """A field that is accepted because published documents have it. It has no effect, and a warning says why."""

    why: str


class ReadBy(msgspec.Struct, frozen=True):
    """A text in YAML that `read` must be able to read, such as a cron expression. The constructor gets the text."""

    read: Callable[[str], object]
    """Reads the text. Raises a ValueError that says what to write instead."""


class DurationText(msgspec.Struct, frozen=True):
    """A duration, written in YAML as 200ms, 1.5s or 1m30s. A number without a unit means seconds."""


class QuantityText(msgspec.Struct, frozen=True):
    """A quantity, written in YAML as 500, 2k or 1Gi."""


class FileName(msgspec.Struct, frozen=True):
    """A path in YAML, relative to the document's folder. The constructor gets an absolute path.

    `package:NAME/FILE` is a file inside an installed Python package, and stays as it is.
    """

    or_name: bool = False
    """Whether the text may also be a name, such as the name of a model on a hub. If so, it is a path only if the file
    exists, or if the text begins with a dot, a slash or ~."""
    must_exist: bool = True


Duration = Annotated[float, DurationText()]
"""Seconds."""
Quantity = Annotated[int, QuantityText()]
ExistingFile = Annotated[str, FileName()]
FileOrName = Annotated[str, FileName(or_name=True)]

Number = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0)]
Above0 = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Part = Annotated[float, Meta(ge=0, le=1)]
Wait = Annotated[Duration, Meta(ge=0)]
Time = Annotated[Duration, Meta(gt=0)]
Size = Annotated[Quantity, Meta(ge=0)]
Bytes = Annotated[Quantity, Meta(ge=1)]


def unmarked(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its `Annotated`, and the marks from it."""
    if get_origin(annotation) is Annotated:
        kind, *marks = get_args(annotation)
        return kind, tuple(marks)
    return annotation, ()


def yaml_name(field: msgspec.structs.FieldInfo) -> str:
    """The name of a field in YAML: camel case without the suffix `_s` for seconds, unless it is `Spelled`."""
    spelled = next((mark.name for mark in unmarked(field.type)[1] if isinstance(mark, Spelled)), None)
    return spelled or camel_case(field.name.removesuffix("_s"))


def is_duration(annotation: Any) -> bool:
    """Whether a field of this type is a duration in seconds."""
    return any(isinstance(mark, DurationText) for mark in unmarked(annotation)[1]) or any(
        is_duration(member) for member in get_args(annotation) if member is not annotation
    )


# Secrets: a value that may be a secret is never shown or logged, wherever it comes from

HIDDEN = "***"
"""The text that replaces a value that must not be shown."""
_NAMES = (
    r"(?:sha256|secret|password|passwd|passphrase|pwd|credentials?|authorization|cookie"
    r"|(?:api|admin|access|private|auth|signing|hmac)[-_]?keys?|token)"
)
_SECRET = re.compile(rf"{_NAMES}$", re.IGNORECASE)
_ENVIRONMENT = re.compile(r"(^|\.)env\.")
_VALUE = r"""(?:(?:bearer|basic)\s+)?(?:"[^"]*"|'[^']*'|[^\s"',}]+)"""
_ASSIGNED = re.compile(rf"""([\w.-]*{_NAMES}["']?\s*[:=]\s*|(?<!\S)-[\w.-]*{_NAMES}\s+){_VALUE}""", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer\s+)[^\s\"']+", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def is_secret(name: str) -> bool:
    """Whether a setting of this name may have a secret as its value. Any environment variable may have one."""
    return _SECRET.search(name) is not None or _ENVIRONMENT.search(name) is not None


def without_secrets(value: Any, name: str = "") -> Any:
    """Plain data without values that may be secrets, judged by the names of their settings or options."""
    if name and is_secret(name) and value not in (None, "", [], (), {}):
        return HIDDEN
    if isinstance(value, dict):
        return {key: without_secrets(entry, f"{name}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        if all(isinstance(one, str) for one in value):
            return words_without_secrets(value)
        return [without_secrets(one, name) for one in value]
    return text_without_secrets(value) if isinstance(value, str) else value


def words_without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command, without the values of options that may be secrets."""
    shown: list[str] = []
    is_value = False
    for word in words:
        shown.append(HIDDEN if is_value and not word.startswith("--") else text_without_secrets(word))
        is_value = word.startswith("-") and _SECRET.search(word) is not None
    return shown


def text_without_secrets(text: str) -> str:
    """A text such as a command line, without values that may be secrets.

    Secrets are found in forms such as --api-key X, TOKEN=X, Bearer X and http://user:X@host.
    """
    shown = _ASSIGNED.sub(rf"\g<1>{HIDDEN}", text)
    return _IN_URL.sub(HIDDEN, _BEARER.sub(rf"\g<1>{HIDDEN}", shown))


def camel_case(name: str) -> str:
    """A name in camel case: queue_threshold becomes queueThreshold."""
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


def seconds(text: str) -> float:
    """Read a duration such as 200ms, 60s or 1m30s. Raises a ValueError with examples for any other text."""
    unsigned = text.removeprefix("-")
    parts = _PART.findall(unsigned)
    if unsigned == "0":
        return 0.0
    if not parts or "".join(number + unit for number, unit in parts) != unsigned:
        raise ValueError(f'"{text}" is not a duration; write for example 200ms, 60s or 1m30s')
    total = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return -total if text.startswith("-") else total


def duration_text(length_s: float) -> str:
    """Write a duration as 1h, 1m30s or 200ms. `seconds` reads the same value from this text."""
    milliseconds, parts = round(abs(length_s) * 1000), []
    if abs(milliseconds / 1000 - abs(length_s)) > 1e-9:
        return f"{length_s:.9f}".rstrip("0") + "s"
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, milliseconds = divmod(milliseconds, size)
        parts += [f"{count}{unit}"] if count else []
    return ("-" if length_s < 0 else "") + ("".join(parts) or "0s")


_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_QUANTITY = re.compile(r"([+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d{1,2})?)(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E|)")


def quantity(text: str) -> int:
    """Read an amount such as 500, 2k, 1Gi or 1e9, rounded up. Raises a ValueError with examples for any other text."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f'"{text}" is not an amount; write for example 500, 2k or 1Gi')
    return ceil(Decimal(match[1]) * (_DECIMAL | _BINARY)[match[2]])


def packaged(name: str) -> Path | None:
    """The file that `package:NAME/FILE` names, found without importing the package. None if it is not installed."""
    package, _, file = name.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    return next((folder / file for folder in folders if (folder / file).exists()), folders[0] / file)


_HOST = r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
_LISTEN = re.compile(rf"{_HOST}:(?P<port>\d{{1,5}})")
_BASE_URL = re.compile(rf"(?P<scheme>https?)://{_HOST}:(?P<port>\d{{1,5}})/?", re.IGNORECASE)
_ANY_URL = re.compile(rf"https?://{_HOST}(?::(?P<port>\d{{1,5}}))?(?:/.*)?", re.IGNORECASE)


def host_and_port(text: str) -> tuple[str, int]:
    """Read an address such as 127.0.0.1:8080 or [::1]:8080. Raises a ValueError with examples for any other text."""
    match = _LISTEN.fullmatch(text)
    if match is None or int(match["port"]) > 65535 or not _is_host(match["host"]):
        raise ValueError(f"expected host:port, such as 127.0.0.1:8080 or [::1]:8080, found {quoted(text)}")
    return match["host"].strip("[]"), int(match["port"])


def base_url(text: str) -> tuple[str, str]:
    """Read http://host:port or https://host:port. Returns it without a final slash, and its host:port.

    Raises a ValueError with examples for any other text.
    """
    match = _BASE_URL.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65535 or not _is_host(match["host"]):
        raise ValueError(f"expected http://host:port or https://host:port, without a path, found {quoted(text)}")
    address = f"{match['host'].lower()}:{int(match['port'])}"
    return f"{match['scheme'].lower()}://{address}", address


# Keys of engines: documents and values say where a key is. Only the code that sends the key reads it.


def key_source(variable: str, file: str) -> str:
    """Where a key is found: in an environment variable or in a file. Empty if there is no key."""
    return f"env:{variable}" if variable else f"file:{file}" if file else ""


def read_key(source: str) -> str:
    """The key. Empty if `source` is empty. Raises a ValueError that says what is wrong and does not repeat the key."""
    kind, _, name = source.partition(":")
    if not source:
        return ""
    if kind == "env":
        where, key = f"environment variable {name}", os.environ.get(name, "")
        missing = f"{where} is not set; export it before the plane is started"
    else:
        where, missing = f"file {name}", f"file {name} is empty; write the API key into it"
        try:
            key = Path(name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ValueError(f"the API key in {where} cannot be read: {why}") from None
    if not key:
        raise ValueError(f"there is no API key: {missing}")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"the API key in {where} cannot be sent: it must be printable ASCII without spaces")
    return key


def is_url(text: str) -> bool:
    """Whether a text is http://host or https://host, with or without a port and a path."""
    match = _ANY_URL.fullmatch(text)
    return match is not None and 1 <= int(match["port"] or 80) <= 65535 and _is_host(match["host"])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on this host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return f".{host.lower()}".endswith(".localhost")


def _is_host(host: str) -> bool:
    """Whether a text is a host name or a valid IP address. An IPv6 address must be in brackets."""
    if host[0] != "[" and re.search(r"[^0-9.]", host):
        return True
    try:
        return ip_address(host.strip("[]")).version == (6 if host[0] == "[" else 4)
    except ValueError:
        return False


def quoted(value: Any, max_length: int = 60) -> str:
    """A value as an error message shows it: text is in quotes, numbers are as they are, long values are shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= max_length else text[: max_length - 4] + '..."'
