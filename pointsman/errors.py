"""The tree of errors. Each message says what was requested, what was found, and what to do about it.

    PointsmanError
      ConfigError          a file or a parameter is wrong; nothing was applied
      UnknownName          a name that does not exist; suggests the nearest one that does
      PluginError          a plugin or policy broke its contract; says how
      NotStored            the state of the plane cannot be written or read; nothing was changed

An expected outcome (no instance has room, the queue is full) is a value, not an error.
"""

import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from heapq import nlargest, nsmallest
from itertools import islice, pairwise
from pathlib import Path
from typing import Any


class PointsmanError(Exception):
    """Anything that Pointsman raises on purpose."""


class UnknownName(PointsmanError, LookupError):
    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        super().__init__(f'unknown {kind} "{shown(name)}"{did_you_mean(name, self.known)}')


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
"""Characters of a text from outside that an error repeats."""
LISTED = 50
"""Known names that an error lists."""
LONGEST = 100
"""Characters of a name that the nearest one is searched for: the search takes quadratic time."""
CONSIDERED, COMPARED = 200, 4
"""Names that the search looks at: those with the same first letter and of the most similar length; and names that it
compares letter by letter: those with the most pairs of letters in common."""


def shown(text: str, limit: int = SHOWN) -> str:
    """A text from outside as an error repeats it: at most `limit` characters of it."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def listed(names: Collection[Any], write: Callable[[Any], str] = str) -> str:
    """Names for an error: at most `LISTED` of them."""
    rest = len(names) - LISTED
    return ", ".join(shown(write(name)) for name in islice(names, LISTED)) + (f" and {rest} more" if rest > 0 else "")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one; None if none is, or if the name is too long to be a mistyped one."""
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
    """The end of an error about an unknown name: the nearest known one, else all of them unless `list_known` is off."""
    names = sorted(known)
    near = nearest(name, names)
    if near is not None:
        return f'; did you mean "{near}"?'
    if not list_known:
        return ""
    return f"; known: {listed(names)}" if names else "; none are known"


# Commands that messages suggest


OFFLINE = frozenset({"build", "check", "completion", "estimate", "key", "schema"})
"""Commands that ask no plane."""


class ProgramCall:
    """How this process was called, so that the commands in its messages work in the same shell."""

    def __init__(self) -> None:
        self.state = ""
        """The state directory; empty: the default one."""
        self.url = ""
        """Of a remote plane, in place of a state directory."""

    @property
    def program(self) -> str:
        """What runs `pointsman` in the shell that has called this process."""
        import shutil  # only messages need it, and commands must start fast

        main = sys.modules.get("__main__")
        spec, script = getattr(main, "__spec__", None), Path(sys.argv[0])
        if spec is not None and spec.name.startswith("pointsman."):
            return f"{shlex.quote(sys.orig_argv[0])} -m pointsman"
        if script.name != "pointsman" or not script.is_file():
            return "pointsman"  # a program of the user's own
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
"""Set by the command line."""
command = PROGRAM_CALL.command
