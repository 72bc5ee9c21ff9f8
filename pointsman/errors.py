"""The tree of errors. Each message says what was requested, what was found, and what to do about it.

    PointsmanError
      ConfigError          a file or a parameter is wrong; nothing was applied
      UnknownName          a name does not exist; the message suggests the nearest known name
      UnusableFile         a file cannot be read or written; the message says which file, and why
      PluginError          a plugin or policy broke its contract; the message says how
      NotStored            the state of the plane cannot be written or read; nothing was changed

An expected outcome (no instance has room, the queue is full) is a value, not an error.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from heapq import nlargest, nsmallest
from itertools import islice, pairwise
from pathlib import Path
from typing import Any


class PointsmanError(Exception):
    """The base of all errors that Pointsman raises on purpose."""


class UnknownName(PointsmanError, LookupError):
    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        super().__init__(f'unknown {kind} "{shown(name)}"{did_you_mean(name, self.known)}')


class UnusableFile(PointsmanError):
    def __init__(self, path: Path, error: OSError | UnicodeDecodeError, verb: str = "read") -> None:
        self.path = path
        super().__init__(f"cannot {verb} {shown(str(path))}: {why_unusable(path, error, verb)}")


class PluginError(PointsmanError):
    def __init__(self, plugin: str, broken: str) -> None:
        self.plugin, self.broken = plugin, broken
        super().__init__(f'plugin "{plugin}" {broken}')


class NotStored(PointsmanError):
    """A change that was refused because it could not be stored."""


class ConfigError(PointsmanError, ValueError):
    """All problems of a configuration, one line each."""

    def __init__(self, problems: Sequence[object]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


SHOWN = 200
"""Maximum number of characters that an error repeats from an outside text."""
LISTED = 50
"""Maximum number of known names that an error lists."""
LONGEST = 100
"""Maximum length of a name for which the nearest known name is searched. The search takes quadratic time."""
CONSIDERED, COMPARED = 200, 4
"""Maximum numbers of names in a search. The search considers the names with the same first letter and the most similar
length. Of these, it compares the names with the most pairs of letters in common letter by letter."""
MAX_ENTRIES = 2000
"""Maximum number of files in a folder whose names are compared with a missing name."""


def shown(text: str, limit: int = SHOWN) -> str:
    """A text from outside, as an error repeats it: at most the first `limit` characters."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def shown_bytes(data: bytes, limit: int = 60) -> str:
    """Bytes from outside, as an error repeats them: in quotes, with bytes that are not text written like `\\x00`."""
    return f'"{repr(bytes(data[:limit]))[2:-1]}"'


def listed(names: Collection[Any], write: Callable[[Any], str] = str) -> str:
    """A list of names for an error: at most `LISTED` names, and the number of further names."""
    rest = len(names) - LISTED
    return ", ".join(shown(write(name)) for name in islice(names, LISTED)) + (f" and {rest} more" if rest > 0 else "")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to `name`. None if no known name is similar, or if `name` is too long."""
    if len(name) > LONGEST:
        return None
    wanted = name.casefold()
    folded = {other.casefold(): other for other in known if len(other) <= 3 * LONGEST}
    likely: Sequence[str] = list(folded)
    if len(likely) > CONSIDERED:
        first = wanted[:1]
        likely = nsmallest(CONSIDERED, likely, key=lambda one: (one[:1] != first, abs(len(one) - len(wanted))))
    if len(likely) > COMPARED:
        pairs = _pairs(wanted)
        likely = nlargest(COMPARED, likely, key=lambda other: len(pairs & _pairs(other)) / (len(other) + len(wanted)))
    near = get_close_matches(wanted, likely, n=1, cutoff=0.6)
    return folded[near[0]] if near else None


def _pairs(name: str) -> set[tuple[str, str]]:
    return set(pairwise(name))


def did_you_mean(name: str, known: Iterable[str], *, list_known: bool = True) -> str:
    """The end of an error about an unknown name: the nearest known name.

    If no known name is similar, the end lists the known names, unless `list_known` is off.
    """
    names = sorted(known)
    near = nearest(name, names)
    if near is not None:
        return f'; did you mean "{near}"?'
    if not list_known:
        return ""
    return f"; known: {listed(names)}" if names else "; none are known"


# Messages of a validator

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
_EXPECTED = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_FIELD = re.compile(r"Object (?:contains|missing) (unknown|required) field `([^`]*)`")


def in_words(error: Exception) -> str:
    """An error from msgspec in plain words. "max_tokens: expected a whole number, found text" stands for
    "Expected `int`, got `str` - at `$.max_tokens`"."""
    said, _, where = str(error).partition(" - at `$")
    where = where.rstrip("`").lstrip(".")
    if match := _EXPECTED.fullmatch(said):
        wanted, found = (" or ".join(_TYPES.get(one, one) for one in part.split(" | ")) for part in match.groups())
        said = f"expected {wanted}, found {found}"
    elif match := _FIELD.fullmatch(said):
        said = f'unknown field "{match[2]}"' if match[1] == "unknown" else f'the field "{match[2]}" is missing'
    return f"{where}: {said}" if where else said


# Files, and errors of the operating system


def system_reason(error: OSError) -> str:
    """Why the operating system refused something, in its own words, such as `Address already in use`.

    Python's additions to these words are left out.
    """
    if (error.errno or 0) > 0 and not hasattr(error, "library"):  # errors of TLS and of host lookup have no such text
        return os.strerror(error.errno or 0)
    return error.strerror or str(error) or "the system does not say why"


def text_of_file(path: Path) -> str:
    """The text of a user's file. Raises OSError or UnicodeDecodeError, which `why_unusable` explains."""
    data = path.read_bytes()
    text = data.decode("utf-8-sig")
    if "\0" in text:
        raise UnicodeDecodeError("utf-8", data, data.index(b"\0"), data.index(b"\0") + 1, "a zero byte")
    return text


def why_unusable(path: Path, error: OSError | UnicodeDecodeError, verb: str = "read") -> str:
    """Why a file cannot be read or written, and what to do about it. `verb` is "read" or "write"."""
    match error:
        case UnicodeDecodeError():
            return _why_no_text(error.object)
        case FileNotFoundError() if path.parent.is_dir():
            return "there is no such file" + _near_file(path)
        case FileNotFoundError():
            return f"there is no directory {path.parent}"
        case IsADirectoryError():
            return "it is a directory; name a file"
        case NotADirectoryError():
            return f"{next((one for one in path.parents if one.exists()), path.parent)} is not a directory"
        case PermissionError():
            return f"permission denied; allow this user to {verb} it"
    return system_reason(error)


def _why_no_text(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "it is UTF-16 text; save it as UTF-8"
    return "it is a binary file, not text" if b"\0" in data else "it is not UTF-8 text; save it as UTF-8"


def _near_file(path: Path) -> str:
    """A hint that names the most similar file name in the same folder. Empty if no name is similar."""
    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in islice(entries, MAX_ENTRIES)]
    except OSError:
        return ""
    near = nearest(path.name, names)
    return "" if near is None else f'; did you mean "{path.parent / near}"?'


# Commands that messages suggest


OFFLINE = frozenset({"build", "check", "completion", "estimate", "key", "lab", "schema"})
"""Commands that do not talk to a plane."""


class ProgramCall:
    """How this process was called. With this, the commands in its messages work in the same shell."""

    def __init__(self) -> None:
        self.state = ""
        """The state directory. Empty if it is the default one."""
        self.url = ""
        """The URL of a remote plane. Empty if the plane is found by its state directory."""

    @property
    def program(self) -> str:
        """The words that call `pointsman` in the shell from which this process was started."""
        import shutil  # imported here because only messages need it, and commands must start fast

        main = sys.modules.get("__main__")
        spec, script = getattr(main, "__spec__", None), Path(sys.argv[0])
        if spec is not None and spec.name.startswith("pointsman."):
            return f"{shlex.quote(sys.orig_argv[0])} -m pointsman"
        if script.name != "pointsman" or not script.is_file():
            return "pointsman"  # a user's own program
        found = shutil.which("pointsman")
        return "pointsman" if found and script.samefile(found) else shlex.quote(sys.argv[0])

    def command(self, name: str, *words: str) -> str:
        """A command for the plane that this process talks to, quoted for a shell."""
        if name not in OFFLINE:
            if self.url and name != "up":
                words += ("--url", self.url)
            elif self.state:
                words += ("--state", self.state)
        return " ".join([self.program, name, *map(shlex.quote, words)])


PROGRAM_CALL = ProgramCall()
"""The call of this process. The command line sets its attributes."""
command = PROGRAM_CALL.command
