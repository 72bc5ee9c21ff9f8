"""The tree of errors. Each message says what was requested, what was found, and what to do about it.

    PointsmanError
      ConfigError          a file or a parameter is wrong; nothing was applied
      UnknownName          a name that does not exist; suggests the nearest one that does
      PluginError          a plugin or policy broke its contract; says how

An expected outcome (no instance has room, the queue is full) is a value, not an error.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class PointsmanError(Exception):
    """Anything that Pointsman raises on purpose."""


class UnknownName(PointsmanError, LookupError):
    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        super().__init__(f'unknown {kind} "{name}"{did_you_mean(name, self.known)}')


class PluginError(PointsmanError):
    def __init__(self, plugin: str, broken: str) -> None:
        self.plugin, self.broken = plugin, broken
        super().__init__(f'plugin "{plugin}" {broken}')


class ConfigError(PointsmanError, ValueError):
    """All problems of a configuration, one line each."""

    def __init__(self, problems: Sequence[object]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def did_you_mean(name: str, known: Iterable[str], *, list_known: bool = True) -> str:
    """The end of an error about an unknown name: the nearest known one, else all of them unless `list_known` is off."""
    names = sorted(known)
    folded = {other.casefold(): other for other in names}
    near = get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    if near:
        return f'; did you mean "{folded[near[0]]}"?'
    if not list_known:
        return ""
    return f"; known: {', '.join(names)}" if names else "; none are known"
