"""Why something was decided, as data: a code for programs, facts for both, and text for people.

A `Reason` is made where the decision is made. Its text is rendered by `render/sentences.py` when it is shown, and no
code reads the text back. To recognise or group reasons, compare their codes and facts. docs/reasons.md lists the codes.
"""

from collections.abc import Iterable, Mapping
from math import isclose, isfinite
from typing import Any

import msgspec

from pointsman.render.sentences import detail, sentence

__all__ = ["Counted", "Reason", "counted", "reason_of"]


class Reason(msgspec.Struct, frozen=True):
    """A stable code, and the facts on which a decision rested. `str()` renders the sentence for operators.

    A fact may be a reason itself. If a reason has the fact `text`, that fact is shown in place of a sentence.
    """

    code: str
    facts: Mapping[str, Any] = {}

    def __str__(self) -> str:
        return sentence(self.code, self.facts)

    @property
    def detail(self) -> str:
        """The figures of the reason without its kind. Empty if the reason has no figures."""
        return detail(self.code, self.facts)

    def having(self, **facts: Any) -> "Reason":
        return Reason(self.code, {**self.facts, **facts})

    def plain(self) -> "Reason":
        """The reason, with its facts as JSON can carry them. It can then be stored and read again."""
        return Reason(self.code, _plain(self.facts))

    def is_like(self, other: "Reason") -> bool:
        """Whether both reasons have the same code and facts. Figures may differ by a fifth."""
        return self.code == other.code and _alike(_plain(self.facts), _plain(other.facts))

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: code and facts for programs, text for people."""
        return {"code": self.code, "facts": _plain(self.facts), "text": str(self)}


def reason_of(plugin: str, given: "Reason | str") -> Reason:
    """The reason that a plugin gave. Plain text becomes a fact of a reason whose code is the plugin's name."""
    return given if isinstance(given, Reason) else Reason(plugin, {"text": given})


class Counted(msgspec.Struct, frozen=True):
    """How many candidates were rejected with one code, and the first rejected candidate as an example."""

    code: str
    count: int
    candidate: str
    facts: Mapping[str, Any]
    alike: bool
    """Whether all these rejections have the same facts."""


def counted(rejections: Iterable[tuple[object, Reason]]) -> list[Counted]:
    """Rejections by code, in the order in which the codes first occur."""
    groups: dict[str, list[tuple[object, Reason]]] = {}
    for candidate, reason in rejections:
        groups.setdefault(reason.code, []).append((candidate, reason))
    return [
        Counted(code, len(group), str(group[0][0]), group[0][1].facts, all(one == group[0][1] for _, one in group[1:]))
        for code, group in groups.items()
    ]


def _alike(one: Any, other: Any) -> bool:
    """Whether two plain facts are alike. If they contain reasons, the texts of these reasons do not count."""
    match one, other:
        case ({"code": code, "facts": facts}, {"code": code_of_other, "facts": facts_of_other}):
            return bool(code == code_of_other) and _alike(facts, facts_of_other)
        case (dict(), dict()):
            return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
        case (list(), list()):
            return len(one) == len(other) and all(map(_alike, one, other))
        case (int() | float(), int() | float()):
            return isclose(one, other, rel_tol=0.2)
    return bool(one == other)


def _plain(value: Any) -> Any:
    """A fact as JSON can carry it. A number that is not finite becomes None."""
    if isinstance(value, Reason):
        return value.as_dict()
    if isinstance(value, Counted):
        return {name: _plain(getattr(value, name)) for name in Counted.__struct_fields__}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
